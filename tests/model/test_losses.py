"""Each loss: by hand, against torch, and in the cases that are easily wrong."""

import math

import pytest
import torch
import torch.nn.functional as F

from unet_trainer.config.schema import LOSSES as NAMES
from unet_trainer.config.schema import OWN
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.model.losses import TERMS, WeightedLoss
from unet_trainer.model.segmenter import class_logits

# One class: the probability of foreground at each of 2×2 pixels, and the truth.
ONE = torch.logit(torch.tensor([[[[0.9, 0.2], [0.6, 0.1]]]])), torch.tensor([[[1, 0], [1, 0]]])
# Three classes: the probabilities of each at 2×2 pixels, and the truth.
PROBABILITIES = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]], [[0.3, 0.3, 0.4], [0.2, 0.5, 0.3]]])
THREE = PROBABILITIES.log().permute(2, 0, 1).unsqueeze(0), torch.tensor([[[0, 1], [2, 1]]])

LOSSES = list(TERMS)
EACH_TERM_AND_CLASSES = [(name, 1) for name in LOSSES] + [(name, 3) for name in LOSSES if name != "bce"]


def test_a_config_may_name_each_term():
    assert (*TERMS, OWN) == NAMES


def loss_of(name, logits, masks, num_classes=1, class_weights=None):
    return WeightedLoss({name: 1.0}, num_classes, class_weights)(class_logits(logits), masks)


def loss_and_gradient(name, logits, masks, num_classes=1):
    logits = logits.detach().clone().requires_grad_()
    loss = loss_of(name, logits, masks, num_classes)
    loss.backward()
    return loss.detach(), logits.grad


def random_case(num_classes):
    """Logits 2,K,4,5 and masks with every class and about a third of the pixels ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, num_classes, 4, 5, generator=generator) * 2
    masks = torch.randint(0, max(2, num_classes), (2, 4, 5), generator=generator)
    masks[torch.rand(2, 4, 5, generator=generator) < 0.33] = IGNORED
    return logits, masks


def focal(*probabilities):
    """Of the right class at each pixel."""
    return -sum((1 - p) ** 2 * math.log(p) for p in probabilities) / len(probabilities)


@pytest.mark.parametrize(
    ("name", "case", "num_classes", "expected"),
    [
        ("bce", ONE, 1, -(math.log(0.9) + math.log(0.8) + math.log(0.6) + math.log(0.9)) / 4),
        ("cross_entropy", ONE, 1, -(math.log(0.9) + math.log(0.8) + math.log(0.6) + math.log(0.9)) / 4),
        ("focal", ONE, 1, focal(0.9, 0.8, 0.6, 0.9)),
        ("focal", THREE, 3, focal(0.7, 0.8, 0.4, 0.5)),
        # 1.5 pixels hit, 0.5 missed, 0.3 false, and 1 pixel of smoothing on both sides
        ("dice", ONE, 1, 1 - (1.5 + 1) / (1.5 + 0.5 * 0.5 + 0.5 * 0.3 + 1)),
        ("iou", ONE, 1, 1 - (1.5 + 1) / (1.5 + 0.5 + 0.3 + 1)),
        ("tversky", ONE, 1, 1 - (1.5 + 1) / (1.5 + 0.7 * 0.5 + 0.3 * 0.3 + 1)),
        # errors 0.4 (true), 0.2 (false), 0.1 and 0.1; the Jaccard loss grows by 1/2, 1/6, 1/3 and 0
        ("lovasz", ONE, 1, 0.4 / 2 + 0.2 / 6 + 0.1 / 3),
    ],
)
def test_a_term_equals_the_hand_computed_value(name, case, num_classes, expected):
    assert loss_of(name, *case, num_classes).item() == pytest.approx(expected, rel=1e-5)


def test_class_weights_multiply_pixels_of_cross_entropy_and_classes_of_dice():
    weights = [1.0, 2.0, 1.0]
    entropy = -(math.log(0.7) + 2 * math.log(0.8) + math.log(0.4) + 2 * math.log(0.5)) / (1 + 2 + 1 + 2)
    overlap = (0.45 / 2.15 + 2 * 0.6 / 2.9 + 0.55 / 1.95) / (1 + 2 + 1)
    assert loss_of("cross_entropy", *THREE, 3, weights).item() == pytest.approx(entropy, rel=1e-5)
    assert loss_of("dice", *THREE, 3, weights).item() == pytest.approx(overlap, rel=1e-5)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 3.0]])
def test_cross_entropy_equals_torchs_with_weights_and_ignored_pixels(weights):
    logits, masks = random_case(3)
    per_class = None if weights is None else torch.tensor(weights)
    expected = F.cross_entropy(logits, masks, weight=per_class, ignore_index=IGNORED)
    torch.testing.assert_close(loss_of("cross_entropy", logits, masks, 3, weights), expected)


@pytest.mark.parametrize("num_classes", [1, 3])
def test_lovasz_equals_the_integral_of_the_jaccard_loss_over_thresholds(num_classes):
    """The Lovász extension is ∫ Δ({errors ≥ t}) dt; Δ(wrong) = |wrong| / |truth ∪ wrong|."""
    logits, masks = random_case(num_classes)
    counts = masks != IGNORED
    probabilities = class_logits(logits).softmax(1)
    per_class = []
    for class_id in range(1, 2) if num_classes == 1 else range(num_classes):
        truth = (masks == class_id)[counts].tolist()
        errors = [abs(t - q) for t, q in zip(truth, probabilities[:, class_id][counts].tolist(), strict=True)]
        total, below = 0.0, 0.0
        for threshold in sorted(set(errors)):
            wrong = [error >= threshold for error in errors]
            union = sum(t or w for t, w in zip(truth, wrong, strict=True))
            total += (threshold - below) * sum(wrong) / union
            below = threshold
        per_class.append(total)
    expected = sum(per_class) / len(per_class)
    assert loss_of("lovasz", logits, masks, num_classes).item() == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_lovasz_over_a_million_pixels_equals_that_in_float64():
    """From pixel to pixel the Jaccard loss grows by hardly more than float32 resolves near 1."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 1, 512, 512, generator=generator)
    masks = (torch.rand(4, 512, 512, generator=generator) < 0.3).long()
    _, gradient = loss_and_gradient("lovasz", logits, masks)
    double = logits.double().requires_grad_()
    errors, order = (masks.flatten() - double.flatten().sigmoid()).abs().sort(descending=True)
    truth = masks.flatten()[order].double()
    jaccard = 1 - (truth.sum() - truth.cumsum(0)) / (truth.sum() + (1 - truth).cumsum(0))
    (errors * torch.diff(jaccard, prepend=torch.zeros(1))).sum().backward()
    assert (gradient - double.grad).norm() < 1e-3 * double.grad.norm()
    assert gradient.count_nonzero() == double.grad.count_nonzero()


@pytest.mark.parametrize(("name", "num_classes"), EACH_TERM_AND_CLASSES)
def test_ignored_pixels_change_neither_loss_nor_gradient(name, num_classes):
    logits, masks = random_case(num_classes)
    counts = masks != IGNORED
    assert 0 < counts.sum() < counts.numel()
    loss, gradient = loss_and_gradient(name, logits, masks, num_classes)
    alone = logits.permute(0, 2, 3, 1)[counts].T.reshape(1, -1, 1, int(counts.sum()))
    loss_alone, gradient_alone = loss_and_gradient(name, alone, masks[counts].view(1, 1, -1), num_classes)
    torch.testing.assert_close(loss, loss_alone)
    gradient = gradient.permute(0, 2, 3, 1)
    torch.testing.assert_close(gradient[counts].T.reshape(alone.shape), gradient_alone)
    assert gradient[~counts].eq(0).all()
    other = torch.where(counts.unsqueeze(1), logits, 50.0)
    assert torch.equal(loss_of(name, other, masks, num_classes), loss)


@pytest.mark.parametrize("name", LOSSES)
def test_a_false_positive_on_an_empty_mask_costs_something(name):
    empty = torch.zeros(1, 4, 4, dtype=torch.long)
    wrong, gradient = loss_and_gradient(name, torch.full((1, 1, 4, 4), 2.0), empty)
    assert wrong > 0.5
    assert gradient.sum() > 0  # a step against it lowers the logits
    assert loss_of(name, torch.full((1, 1, 4, 4), -8.0), empty) < 0.01


@pytest.mark.parametrize("name", ["dice", "iou", "tversky", "lovasz"])
def test_a_class_absent_from_the_batch_costs_when_it_is_predicted(name):
    masks = torch.tensor([[[0, 1], [0, 1]]])
    quiet = torch.tensor([9.0, 9.0, -9.0]).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    loud = torch.tensor([9.0, 9.0, 12.0]).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    assert loss_of(name, loud, masks, 3) > loss_of(name, quiet, masks, 3) + 0.1


@pytest.mark.parametrize(
    ("name", "dtype"), [("dice", torch.float16), ("lovasz", torch.bfloat16), ("bce", torch.float16)]
)
def test_16_bit_logits_are_summed_in_float32(name, dtype):
    assert torch.ones(512, 512, dtype=torch.float16).sum().isinf()  # the sum that must not happen in float16
    masks = torch.zeros(1, 512, 512, dtype=torch.uint8)
    masks[:, :, 256:] = 1
    exact = torch.where(masks.unsqueeze(1) == 1, 1.5, -0.5)  # numbers that both formats hold
    loss, gradient = loss_and_gradient(name, exact.to(dtype), masks)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, loss_of(name, exact, masks))
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("name", "num_classes"), EACH_TERM_AND_CLASSES)
def test_extreme_logits_have_finite_losses_and_gradients(name, num_classes):
    masks = torch.tensor([[[0, 1], [1, IGNORED]]])
    for size in (1e4, -1e4):
        logits = torch.zeros(1, num_classes, 2, 2)
        logits[:, -1] = size
        loss, gradient = loss_and_gradient(name, logits, masks, num_classes)
        assert loss.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("weights", "most"),
    [({"cross_entropy": 1.0}, 1.4), ({"focal": 1.0}, 1.4), ({"dice": 1.0, "cross_entropy": 1.0}, 2.4)],
)
def test_a_loss_keeps_no_more_for_its_gradient_than_its_terms_need(weights, most):
    """In tensors of N,K,H,W float32: cross entropy keeps log-probabilities, and a boolean each; Dice probabilities too."""
    logits = torch.randn(2, 64, 16, 16, requires_grad=True)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = WeightedLoss(weights, 64, None)(logits, torch.zeros(2, 16, 16, dtype=torch.uint8))
    assert loss.requires_grad
    assert sum(kept.values()) < most * logits.untyped_storage().nbytes()


# Parts of a batch: gradients are summed over parts that fit into memory


def uneven_case(num_classes, num_images=6):
    """Logits N,K,4,5 and masks of which one image is all ignored, one has no ignored pixel and the others have ever more."""
    generator = torch.Generator().manual_seed(num_classes)
    logits = torch.randn(num_images, num_classes, 4, 5, generator=generator) * 2
    masks = torch.randint(0, max(2, num_classes), (num_images, 4, 5), generator=generator)
    order = torch.rand(num_images, 4, 5, generator=generator)
    masks[order < torch.linspace(0, 0.8, num_images).view(-1, 1, 1)] = IGNORED
    masks[1] = IGNORED
    assert (masks[0] != IGNORED).all()
    return logits, masks


def cut(lengths):
    """Slices of these lengths, one after the other."""
    return [slice(sum(lengths[:index]), sum(lengths[: index + 1])) for index in range(len(lengths))]


WEIGHTED = [(name, 1, [3.0]) for name in LOSSES] + [(name, 3, [0.2, 5.0, 1.0]) for name in LOSSES if name != "bce"]
PIXEL_MEANS = [case for case in WEIGHTED if case[0] in ("cross_entropy", "bce", "focal")]


@pytest.mark.parametrize(("name", "num_classes", "class_weights"), PIXEL_MEANS)
def test_means_over_pixels_of_the_parts_of_a_batch_add_up_to_that_of_the_batch(name, num_classes, class_weights):
    logits, masks = uneven_case(num_classes)
    loss = WeightedLoss({name: 1.0}, num_classes, class_weights)
    whole_logits, part_logits = (logits.clone().requires_grad_() for _ in range(2))
    whole = loss(class_logits(whole_logits), masks)
    whole.backward()
    parts = [loss(class_logits(part_logits[part]), masks[part], masks) for part in cut((3, 2, 1))]
    torch.stack(parts).sum().backward()
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    torch.testing.assert_close(part_logits.grad, whole_logits.grad)


@pytest.mark.parametrize("name", ["dice", "iou", "tversky", "lovasz"])
def test_other_losses_of_the_parts_add_up_to_the_mean_of_the_parts_own(name):
    logits, masks = uneven_case(3)
    loss = WeightedLoss({name: 1.0}, 3, None)
    own = [loss(logits[part], masks[part]) for part in cut((2, 2, 2))]
    found = [loss(logits[part], masks[part], masks) for part in cut((2, 2, 2))]
    torch.testing.assert_close(torch.stack(found).sum(), torch.stack(own).mean())


# Validation: the loss of a whole set, from sums over its batches


EVERY_LOSS = [({name: 1.0}, num_classes, class_weights) for name, num_classes, class_weights in WEIGHTED]
EVERY_LOSS += [
    ({"dice": 1.0, "bce": 0.5}, 1, [3.0]),
    ({"lovasz": 0.7, "focal": 2.0, "tversky": 1.0, "cross_entropy": 0.1}, 3, [0.2, 5.0, 1.0]),
]


def set_loss(loss, logits, masks, lengths):
    """As an evaluation computes it: the rows of the batches are summed in float64 and read on the host."""
    rows = [loss.eval_sums(class_logits(logits[part]), masks[part]) for part in cut(lengths)]
    return loss.from_sums(torch.stack(rows).double().sum(0))


@pytest.mark.parametrize(("weights", "num_classes", "class_weights"), EVERY_LOSS)
def test_the_loss_of_a_set_does_not_depend_on_its_batches(weights, num_classes, class_weights):
    logits, masks = uneven_case(num_classes)
    loss = WeightedLoss(weights, num_classes, class_weights)
    whole = set_loss(loss, logits, masks, (6,))
    assert math.isfinite(whole)
    assert whole > 0
    for lengths in ((1,) * 6, (2, 2, 2), (4, 2), (5, 1)):
        assert set_loss(loss, logits, masks, lengths) == pytest.approx(whole, rel=1e-6)
    # The last batch is filled with ignored images.
    padding = torch.full_like(logits[:2], 9.0), torch.full_like(masks[:2], IGNORED)
    padded = torch.cat([logits, padding[0]]), torch.cat([masks, padding[1]])
    assert set_loss(loss, *padded, (4, 4)) == pytest.approx(whole, rel=1e-6)
    if "lovasz" not in weights:
        assert whole == pytest.approx(loss(class_logits(logits), masks).item(), rel=1e-5)  # as in training


@pytest.mark.parametrize(("num_classes", "class_weights"), [(1, None), (3, None), (3, [0.2, 5.0, 1.0])])
def test_the_lovasz_loss_of_a_set_is_the_mean_over_its_images(num_classes, class_weights):
    """Pixels are sorted over the batch, so there are no sums over batches. An image that is all ignored does not count."""
    logits, masks = uneven_case(num_classes)
    loss = WeightedLoss({"lovasz": 1.0}, num_classes, class_weights)
    images = [index for index in range(6) if (masks[index] != IGNORED).any()]
    assert len(images) == 5
    own = [loss(class_logits(logits[index : index + 1]), masks[index : index + 1]).item() for index in images]
    assert set_loss(loss, logits, masks, (3, 3)) == pytest.approx(sum(own) / 5, rel=1e-5)
