"""Ways in which the numbers of a step go bad."""

import torch


def spoil_input(components, batch, value):
    images = batch.images.float()
    images[0, 3, 4, 1] = value
    return batch._replace(images=images)


def spoil_loss(components, batch, value):
    """Of the next batch only."""
    step = components.train_step
    criterion = step.criterion

    def spoiled(logits, masks, batch_masks):
        step.criterion = criterion
        loss, counts = criterion(logits, masks, batch_masks)
        return loss * value, counts

    step.criterion = spoiled
    return batch


def spoil_gradient(components, batch, value):
    parameter = components.train_step.parameters[-1]
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * value)[1])
    return batch


def spoil_statistics(components, batch, value):
    network = components.state.segmenter.network
    norm = next(module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d))
    handle = norm.register_forward_hook(
        lambda module, *_: (handle.remove(), module.running_var.data.fill_(value), None)[2]
    )
    return batch


SPOILERS = {"input": spoil_input, "loss": spoil_loss, "gradient": spoil_gradient, "statistics": spoil_statistics}
