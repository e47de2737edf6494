"""A loss and a model that a Python caller passes: docs/extending.md.

Configs and checkpoints say only `own`, which never names code to run: whoever resumes such a run or loads its model
passes the part again."""

import copy
from collections.abc import Callable

import torch

from unet_trainer.config.errors import UserError, missing_part
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.model.segmenter import STRIDE, SegmenterSpec
from unet_trainer.system.console import first_line

CustomLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CustomModel = torch.nn.Module | Callable[[SegmenterSpec], torch.nn.Module]


def build_custom_loss(loss: CustomLoss | None, num_ids: int) -> CustomLoss:
    """A copy, if it is a module. Raises UserError for one that this trainer cannot use."""
    if loss is None:
        raise missing_part("loss")
    if isinstance(loss, torch.nn.Module):
        loss = copy.deepcopy(loss).cpu()
        if any(parameter.requires_grad for parameter in loss.parameters()):
            fix = "register them as buffers, or in the model"
            raise UserError(f"loss: it has parameters, which would not be trained; {fix}")
    masks = torch.zeros(2, 8, 8, dtype=torch.int64)
    masks[:, 0] = IGNORED
    masks[:, 1] = 1
    try:
        value = loss(torch.zeros(2, num_ids, 8, 8, requires_grad=True), masks)
    except Exception as error:
        if "device" in str(error):  # it holds tensors on a GPU; the first step tells
            return loss
        tried = f"(2, {num_ids}, 8, 8) logits and (2, 8, 8) masks with {IGNORED} where pixels are ignored"
        raise UserError(f"loss: it fails for {tried}: {type(error).__name__}: {error}") from error
    if not (torch.is_tensor(value) and value.numel() == 1 and value.requires_grad):
        raise UserError(f"loss: need one number with a gradient, got {value!r}")
    return loss


def build_custom_network(model: CustomModel | None, spec: SegmenterSpec) -> torch.nn.Module:
    """A copy of the module, or what the function returns for this spec. Raises UserError."""
    if model is None:
        raise missing_part("model")
    try:
        network = model if isinstance(model, torch.nn.Module) else model(spec)
    except Exception as error:  # it may raise anything
        need = "need a torch.nn.Module, or a function that returns one for a SegmenterSpec"
        raise UserError(f"model: {type(error).__name__}: {error}; {need}") from error
    while (wrapped := getattr(network, "_orig_mod", None)) is not None:  # torch.compile's: a run compiles by itself
        network = wrapped
    network = copy.deepcopy(network)
    if not isinstance(network, torch.nn.Module):
        raise UserError(f"model: got {type(network).__name__} from {model!r}; need a torch.nn.Module")
    sides = [-(-side // STRIDE) * STRIDE for side in spec.image_size]
    taken, wanted = (1, spec.image.channels, *sides), (1, spec.num_classes, *sides)
    try:
        with torch.no_grad():
            output = network.cpu().eval()(torch.zeros(taken))
    except Exception as error:  # it may raise anything
        raise UserError(f"model: it does not take images of shape {taken}: {first_line(error)}") from error
    if not torch.is_tensor(output):
        need = "need a tensor of logits: wrap it in a module that picks them"
        raise UserError(f"model: it returns {type(output).__name__}; {need}")
    if (made := tuple(output.shape)) not in (wanted, (1, spec.num_ids, *sides)):
        raise UserError(f"model: for images of shape {taken} it returns {made}; need logits of shape {wanted}")
    return network
