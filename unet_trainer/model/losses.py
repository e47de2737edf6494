"""Losses by name and their weighted sum, in float32 and with shapes that do not depend on values.

Not smp's: its Dice and Jaccard drop a class that is absent from the batch (a false positive on an empty mask costs
nothing), BCE divides by ignored pixels too, and focal and Lovász index by mask, which no CUDA graph captures.

Each term has two parts, sums over pixels and the value of those sums: in training of a batch, in validation of the
whole set, so that its loss does not depend on how the set is cut into batches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from unet_trainer.config.schema import OWN
from unet_trainer.model.custom import CustomLoss, build_custom_loss

SMOOTH = 1.0  # pixels added to both sides of an overlap ratio: an absent class that is not predicted costs nothing
FOCAL_GAMMA = 2.0


def computed_once(compute: "Callable[[Target], torch.Tensor]") -> property:
    """As functools.cached_property, which has a lock that a compiler cannot trace."""
    name = f"_{compute.__name__}"

    def get(target: "Target") -> torch.Tensor:
        if not hasattr(target, name):
            setattr(target, name, compute(target))
        value: torch.Tensor = getattr(target, name)
        return value

    return property(get)


class Target:
    """Logits and masks, and forms of them that terms share, computed when a term first needs them: one of N,K,H,W takes
    2.5 GB for 16 images of 512² with 150 classes."""

    def __init__(
        self, logits: torch.Tensor, masks: torch.Tensor, class_weights: torch.Tensor, first_class: int
    ) -> None:
        self.logits, self.masks = logits, masks
        self.class_weights, self.first_class = class_weights, first_class

    @computed_once
    def is_known(self) -> torch.Tensor:
        """N,H,W; false where ignored."""
        return self.masks < self.logits.shape[1]

    @computed_once
    def is_true(self) -> torch.Tensor:
        """N,K,H,W booleans; all false where ignored."""
        ids = torch.arange(self.logits.shape[1], dtype=self.masks.dtype, device=self.masks.device)
        return self.masks.unsqueeze(1) == ids.view(1, -1, 1, 1)

    @computed_once
    def log_probabilities(self) -> torch.Tensor:
        return F.log_softmax(self.logits, 1)

    @computed_once
    def probabilities(self) -> torch.Tensor:
        return self.log_probabilities.exp()

    @computed_once
    def log_true(self) -> torch.Tensor:
        """N,H,W log-probabilities of the true class, 0 where ignored. Deterministic, unlike CUDA's NLLLoss2d and the
        gradient of gather, and a compiler fuses it with the softmax."""
        return torch.where(self.is_true, self.log_probabilities, 0).sum(1)

    @computed_once
    def pixel_weights(self) -> torch.Tensor:
        return pixel_weights(self.masks, self.class_weights)


def pixel_weights(masks: torch.Tensor, class_weights: torch.Tensor) -> torch.Tensor:
    """N,H,W ids → the weight of each pixel; 0 where ignored."""
    return F.pad(class_weights, (0, 1))[masks.long().clamp(max=len(class_weights))]


class Term(NamedTuple):
    """One loss: sums over the pixels of a target, and the loss that such sums amount to."""

    sums: Callable[[Target], torch.Tensor]  # → S
    value: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # S, class weights, first class → scalar
    is_pixel_mean: bool = False  # exact for a batch that is computed in parts
    has_class_sums: bool = False  # three sums for each class; else two in all
    eval_sums: Callable[[Target], torch.Tensor] | None = None  # where validation needs others


def _cross_entropy_sums(target: Target) -> torch.Tensor:
    return _pixel_sums(-target.log_true, target)


def _focal_sums(target: Target) -> torch.Tensor:
    """Cross-entropy in which easy pixels weigh less."""
    return _pixel_sums(-((1 - target.log_true.exp()) ** FOCAL_GAMMA) * target.log_true, target)


def _pixel_sums(per_pixel: torch.Tensor, target: Target) -> torch.Tensor:
    return torch.stack([(per_pixel * target.pixel_weights).sum(), target.pixel_weights.sum()])


def _mean(sums: torch.Tensor, class_weights: torch.Tensor, first_class: int) -> torch.Tensor:
    return sums[0] / sums[1].clamp_min(1e-6)


def _overlap_sums(target: Target) -> torch.Tensor:
    """3,K: probability on true pixels, true pixels, probability on all pixels; of each class, over known pixels."""
    hits = torch.where(target.is_true, target.probabilities, 0).sum((0, 2, 3))
    predicted = torch.where(target.is_known.unsqueeze(1), target.probabilities, 0).sum((0, 2, 3))
    true = target.is_true.sum(3).sum((0, 2))  # rows first: else a compiler lets one block of threads sum up a class
    return torch.stack([hits, true.to(hits.dtype), predicted])


def _overlap(missed: float, false: float) -> Term:
    """1 - hits / (hits + missed · missed pixels + false · false ones), per class, then the weighted mean."""

    def value(sums: torch.Tensor, class_weights: torch.Tensor, first_class: int) -> torch.Tensor:
        hits, in_truth, predicted = sums.view(3, -1)
        ratio = (hits + SMOOTH) / (hits + missed * (in_truth - hits) + false * (predicted - hits) + SMOOTH)
        return _class_mean((1 - ratio)[first_class:], class_weights[first_class:])

    return Term(_overlap_sums, value, has_class_sums=True)


def _class_mean(per_class: torch.Tensor, class_weights: torch.Tensor) -> torch.Tensor:
    return (per_class * class_weights).sum() / class_weights.sum()


def _lovasz_sums(target: Target) -> torch.Tensor:
    """The loss and a count of 1: pixels are sorted over the whole batch, so there are no sums that add up."""
    loss = _lovasz(target, slice(None))
    return torch.stack([loss, torch.ones_like(loss)])


def _lovasz_eval_sums(target: Target) -> torch.Tensor:
    """The sum over images and their number, so that validation does not depend on the batch."""
    return _image_sums(target, lambda image: _lovasz(target, image))


def _image_sums(target: Target, loss: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    is_counted = target.is_known.any(2).any(1)  # ignored images do not count: their loss may be NaN
    losses = torch.stack([loss(slice(index, index + 1)) for index in range(len(is_counted))])
    return torch.stack([torch.where(is_counted, losses, 0).sum(), is_counted.float().sum()])


def custom_term(loss: CustomLoss) -> Term:
    """A loss that the caller passes. Images without a pixel that counts get a mask of zeros: it may not know of ignored
    pixels."""

    def sums(target: Target) -> torch.Tensor:
        value = loss(target.logits, target.masks.long()).reshape(())
        return torch.stack([value, torch.ones_like(value)])

    def eval_sums(target: Target) -> torch.Tensor:
        has_pixels = target.is_known.any(2).any(1)
        masks = torch.where(has_pixels.view(-1, 1, 1), target.masks.long(), 0)
        return _image_sums(target, lambda image: loss(target.logits[image], masks[image]).reshape(()))

    return Term(sums, _mean, eval_sums=eval_sums)


def _lovasz(target: Target, images: slice) -> torch.Tensor:
    """Lovász extension of IoU. Ignored pixels have error 0, sort last and add nothing. The Jaccard loss
    1 - missed / union grows with each pixel, from the largest error on, by 1 / union if it is true and by missed /
    (union · (union - 1)) if not: a difference of two values near 1 would be lost to rounding."""
    losses = []
    for class_id in range(target.first_class, target.logits.shape[1]):
        truth = (target.masks[images] == class_id).reshape(-1)
        errors = (truth.float() - target.probabilities[images, class_id].reshape(-1)).abs()
        ordered, order = torch.where(target.is_known[images].reshape(-1), errors, 0).sort(descending=True)
        is_true = truth[order]
        missed = is_true.sum() - is_true.cumsum(0)
        # all that are true, and false ones so far
        union = missed + torch.arange(1, len(order) + 1, device=order.device)
        # Without a true pixel the first false one makes the union 1 and the loss 1.
        gain = torch.where(is_true | (union == 1), 1 / union, missed / union / (union - 1))
        losses.append((ordered * gain).sum())
    return _class_mean(torch.stack(losses), target.class_weights[target.first_class :])


_CROSS_ENTROPY = Term(_cross_entropy_sums, _mean, is_pixel_mean=True)
TERMS: dict[str, Term] = {
    "dice": _overlap(missed=0.5, false=0.5),
    "iou": _overlap(missed=1.0, false=1.0),
    "cross_entropy": _CROSS_ENTROPY,
    "bce": _CROSS_ENTROPY,  # with one class they are the same
    "focal": Term(_focal_sums, _mean, is_pixel_mean=True),
    "tversky": _overlap(missed=0.7, false=0.3),  # a missed pixel costs more than a false one
    "lovasz": Term(_lovasz_sums, _mean, eval_sums=_lovasz_eval_sums),
}


class WeightedLoss(torch.nn.Module):
    """Weighted sum of the named terms."""

    class_weights: torch.Tensor

    def __init__(
        self,
        weights: Mapping[str, float],
        num_classes: int,
        class_weights: Sequence[float] | None,
        custom: CustomLoss | None = None,
    ) -> None:
        """`custom`: the term that `weights` call own."""
        super().__init__()
        self.weights = dict(weights)
        self.terms = {name: TERMS[name] for name in weights if name != OWN}
        if OWN in weights:
            self.custom = build_custom_loss(custom, max(2, num_classes))  # a module moves to the device with this one
            self.terms[OWN] = custom_term(self.custom)
        self.first_class = 1 if num_classes == 1 else 0  # of those that overlap losses average
        per_id = [1.0] * max(2, num_classes) if class_weights is None else list(class_weights)
        per_id = [1.0, *per_id] if len(per_id) == 1 else per_id
        self.register_buffer("class_weights", torch.tensor(per_id), persistent=False)
        self.host_class_weights = tuple(per_id)  # for sums on the host: reading the buffer would wait for the device
        self.sum_lengths = [3 * len(per_id) if self.terms[name].has_class_sums else 2 for name in self.weights]

    def forward(
        self, logits: torch.Tensor, masks: torch.Tensor, batch_masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """N,K,H,W float32 logits of every class id and N,H,W ids → scalar. `batch_masks`: the images are part of a
        batch with these masks. The losses of its parts add up to that of the batch: exactly for means over pixels, and
        for overlap losses as the mean of the parts' own."""
        target = self.target(logits, masks)
        values = {name: self.value(name, self.terms[name].sums(target)) for name in self.weights}
        if batch_masks is not None:
            share = len(masks) / len(batch_masks)
            of_batch = pixel_weights(batch_masks, self.class_weights)
            pixel_share = target.pixel_weights.sum() / of_batch.sum().clamp_min(1e-6)
            for name, term in self.terms.items():
                values[name] = values[name] * (pixel_share if term.is_pixel_mean else share)
        return torch.stack([weight * values[name] for name, weight in self.weights.items()]).sum()

    def target(self, logits: torch.Tensor, masks: torch.Tensor) -> Target:
        return Target(logits, masks, self.class_weights, self.first_class)

    def value(self, name: str, sums: torch.Tensor) -> torch.Tensor:
        return self.terms[name].value(sums, self.class_weights, self.first_class)

    def eval_sums(self, logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """One row of sums for all terms; the rows of several batches add up to that of the set."""
        target, terms = self.target(logits, masks), [self.terms[name] for name in self.weights]
        return torch.cat([(term.eval_sums or term.sums)(target).reshape(-1) for term in terms])

    def from_sums(self, sums: torch.Tensor) -> float:
        """The loss of a set, from its summed row on the host."""
        class_weights = torch.tensor(self.host_class_weights, dtype=sums.dtype)
        loss = 0.0
        for (name, weight), part in zip(self.weights.items(), sums.split(self.sum_lengths), strict=True):
            loss += weight * float(self.terms[name].value(part, class_weights, self.first_class))
        return loss
