"""Images in their own units → logits of every class at the images' own size; a spec that survives a checkpoint."""

import dataclasses
import io

import numpy as np
import pytest
import torch

from helpers.steps import make_spec
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.model.segmenter import Segmenter, SegmenterSpec

DEEP = ImageSpec(2, "uint16", (33000.0, 500.0), (200.0, 40.0), 32000.0, 35000.0)
SPECS = {
    "one class": make_spec(),
    "16 bit, three classes": make_spec(
        DEEP, num_classes=3, fit="crop", image_size=(64, 96), decoder_channels=(8, 8, 8, 8, 8)
    ),
    "colours, void and a threshold": dataclasses.replace(
        make_spec(), coding=MaskCoding(None, 127, 255), id_colours=((0, 0, 0), (255, 128, 0)), id_names=("sky", "cat")
    ),
}


class Spy(torch.nn.Module):
    """A convolution that keeps what it was given."""

    def __init__(self, channels=3, classes=1):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(channels, classes, 3, padding=1)
        self.given = None

    def forward(self, images):
        self.given = images
        return self.conv(images)


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_is_the_same_after_it_was_saved_and_loaded(name):
    file = io.BytesIO()
    torch.save(SPECS[name].to_dict(), file)
    file.seek(0)
    assert SegmenterSpec.from_dict(torch.load(file, weights_only=True)) == SPECS[name]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("image channels", 0, "image of its spec"),
        ("image mean", [1.0, 2.0, float("nan")], "image: mean: "),
        ("image mean", [1.0, 2.0], "image of its spec"),
        ("image std", [1.0, 2.0, 0.0], "image of its spec"),
        ("image depth", None, "image: depth: "),
        ("image nodata", ["a"], "image: nodata: "),
        ("coding values", [0, 1, 2], "coding of its spec"),
        ("id_names", ["one"], "id_names or id_colours of its spec"),
        ("id_colours", [[0, 0, 0], [0, 0, 256]], "id_colours: "),
        ("image_size", [32, 10**6], "image_size: "),
        ("architecture", 7, "architecture: "),
        ("decoder_channels", [8, 8, 8, 8, 10**7], "decoder_channels: "),
    ],
)
def test_a_spec_with_a_value_that_no_run_can_have_is_an_error_that_names_it(path, value, named):
    content = SPECS["one class"].to_dict()
    *outer, name = path.split()
    place = content[outer[0]] if outer else content
    assert name in place
    place[name] = value
    with pytest.raises(ValueError, match=f"^{named}"):
        SegmenterSpec.from_dict(content)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("height", "width"), [(64, 32), (40, 50), (1, 97)])
def test_the_logits_are_those_of_the_network_on_normalised_and_padded_images(height, width, channels_last):
    network = Spy()
    images = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    logits = Segmenter(make_spec(), network, channels_last)(images)

    normalised = (images.numpy().astype(np.float64) - RGB_8BIT.mean) / RGB_8BIT.std
    padding = ((0, 0), (0, -height % 32), (0, -width % 32), (0, 0))
    padded = torch.from_numpy(np.pad(normalised, padding, mode="edge")).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(network.given, padded)
    expected = network.conv(padded)[:, :, :height, :width]
    torch.testing.assert_close(logits, torch.cat([torch.zeros_like(expected), expected], 1))
    assert logits.shape == (2, 2, height, width)
    assert logits.dtype == torch.float32


def test_images_that_differ_in_light_alone_are_one_image_to_a_network_that_normalises_each():
    network = Spy()
    pixels = torch.rand(1, 64, 32, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor(RGB_8BIT.std)
    image = pixels + torch.tensor(RGB_8BIT.mean)
    flat = torch.tensor(RGB_8BIT.mean) + pixels / 100
    Segmenter(make_spec(normalize="image"), network, False)(torch.cat([image, image + 3 * pixels, flat]))
    given = network.given
    torch.testing.assert_close(
        given[0], given[1], rtol=0.2, atol=0.01
    )  # but for what keeps flat ones from being amplified
    torch.testing.assert_close(given.mean((1, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    assert given.std((1, 2, 3)).tolist() == pytest.approx([0.85, 0.96, 0.05], abs=0.02)
