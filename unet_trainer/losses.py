"""Name → loss, and their weighted sum, all in float32 and with shapes that depend on no value.

Written here and not taken from segmentation-models-pytorch because its Dice and Jaccard drop a class that is absent from the
batch (a false positive on an empty mask costs nothing), its BCE divides by ignored pixels too, and its focal and Lovász
losses index by mask, which a CUDA graph cannot hold.

One class and many are one case here: a lone foreground logit z stands for the two-class logits (0, z), whose softmax is
the sigmoid. `class_logits` is the only place that knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

SMOOTH = 1.0  # pixels added to both sides of an overlap ratio: an absent class that is not predicted costs nothing
FOCAL_GAMMA = 2.0
TVERSKY_MISSED, TVERSKY_FALSE = 0.7, 0.3  # a missed pixel costs more than a false one


def class_logits(logits: torch.Tensor) -> torch.Tensor:
    """N,C,H,W of the model → N,K,H,W float32 with a logit for every class id; one channel becomes background and foreground."""
    logits = logits.float()
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


class Target:
    """What the losses compare with, computed once for all terms."""

    def __init__(self, logits: torch.Tensor, masks: torch.Tensor, class_weights: torch.Tensor, first_class: int) -> None:
        ids = torch.arange(logits.shape[1], device=masks.device).view(1, -1, 1, 1)
        self.one_hot = (masks.unsqueeze(1) == ids).float()  # N,K,H,W; all zero where ignored
        self.valid = self.one_hot.sum(1)  # N,H,W: 1 where a class is known
        self.logits = logits
        self.log_probabilities = F.log_softmax(logits, 1)
        self.probabilities = self.log_probabilities.exp()
        self.pixel_weights = (self.one_hot * class_weights.view(1, -1, 1, 1)).sum(1)  # N,H,W
        self.class_weights = class_weights[first_class:]
        self.first_class = first_class  # of those that overlap losses average: background is none with one class


def cross_entropy(target: Target) -> torch.Tensor:
    """Mean over known pixels. A sum over one-hot: CUDA's own kernel (NLLLoss2d) has no deterministic form."""
    per_pixel = -(target.one_hot * target.log_probabilities).sum(1)
    return _pixel_mean(per_pixel, target)


def focal(target: Target) -> torch.Tensor:
    """Cross-entropy with easy pixels turned down."""
    log_true = (target.one_hot * target.log_probabilities).sum(1)
    return _pixel_mean(-((1 - log_true.exp()) ** FOCAL_GAMMA) * log_true, target)


def dice(target: Target) -> torch.Tensor:
    return _overlap_loss(target, missed=0.5, false=0.5)


def iou(target: Target) -> torch.Tensor:
    return _overlap_loss(target, missed=1.0, false=1.0)


def tversky(target: Target) -> torch.Tensor:
    return _overlap_loss(target, missed=TVERSKY_MISSED, false=TVERSKY_FALSE)


def lovasz(target: Target) -> torch.Tensor:
    """Lovász extension of IoU, per class over the batch. Ignored pixels have error 0, sort last and add nothing."""
    losses = []
    for class_id in range(target.first_class, target.one_hot.shape[1]):
        truth = target.one_hot[:, class_id].reshape(-1)
        errors = ((truth - target.probabilities[:, class_id].reshape(-1)) * target.valid.reshape(-1)).abs()
        ordered, order = errors.sort(descending=True)
        truth = truth[order]
        missed = truth.sum() - truth.cumsum(0)
        union = truth.sum() + (1 - truth).cumsum(0)
        jaccard = 1 - missed / union
        gain = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
        losses.append((ordered * gain).sum())
    return _class_mean(torch.stack(losses), target)


def _overlap_loss(target: Target, missed: float, false: float) -> torch.Tensor:
    """1 - hits / (hits + missed · missed pixels + false · false ones), per class over the batch, then the weighted mean."""
    probabilities = target.probabilities * target.valid.unsqueeze(1)
    hits = (probabilities * target.one_hot).sum((0, 2, 3))
    num_missed = target.one_hot.sum((0, 2, 3)) - hits
    num_false = probabilities.sum((0, 2, 3)) - hits
    ratio = (hits + SMOOTH) / (hits + missed * num_missed + false * num_false + SMOOTH)
    return _class_mean((1 - ratio)[target.first_class :], target)


def _pixel_mean(per_pixel: torch.Tensor, target: Target) -> torch.Tensor:
    return (per_pixel * target.pixel_weights).sum() / target.pixel_weights.sum().clamp_min(1e-6)


def _class_mean(per_class: torch.Tensor, target: Target) -> torch.Tensor:
    return (per_class * target.class_weights).sum() / target.class_weights.sum()


TERMS: dict[str, Callable[[Target], torch.Tensor]] = {
    "dice": dice,
    "iou": iou,
    "cross_entropy": cross_entropy,
    "bce": cross_entropy,  # with one class they are the same
    "focal": focal,
    "tversky": tversky,
    "lovasz": lovasz,
}


class WeightedLoss(torch.nn.Module):
    """Weighted sum of the named terms."""

    class_weights: torch.Tensor

    def __init__(self, weights: Mapping[str, float], num_classes: int, class_weights: Sequence[float] | None) -> None:
        super().__init__()
        self.weights = dict(weights)
        self.first_class = 1 if num_classes == 1 else 0
        per_id = [1.0] * max(2, num_classes) if class_weights is None else list(class_weights)
        per_id = [1.0, *per_id] if len(per_id) == 1 else per_id
        self.register_buffer("class_weights", torch.tensor(per_id), persistent=False)

    def forward(self, logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """N,K,H,W float32 of `class_logits` and N,H,W ids → scalar."""
        target = Target(logits, masks, self.class_weights, self.first_class)
        return torch.stack([weight * TERMS[name](target) for name, weight in self.weights.items()]).sum()
