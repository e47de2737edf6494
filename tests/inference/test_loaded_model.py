"""load(): a run or a file becomes a function from an image to class ids; what the model does not know is refused by name."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unet_trainer
from helpers.checkpoints import FOUR_FLOATS, GREY_16BIT, random_image, save_model, small_segmenter, small_spec
from helpers.project import ROOT
from helpers.steps import SmallNetwork
from unet_trainer import load
from unet_trainer.config.errors import UserError
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import read_image

TILE = (64, 64)  # most images here are smaller
SPECS = {
    "RGB": small_spec(num_classes=3, tile=TILE),
    "16-bit grey": small_spec(GREY_16BIT, tile=TILE),
    "four floats": small_spec(FOUR_FLOATS, tile=TILE),
}


@pytest.fixture(autouse=True)
def small_networks(monkeypatch):
    build = "unet_trainer.inference.engine.build_network"
    monkeypatch.setattr(build, lambda spec, encoder_weights: SmallNetwork(spec.image.channels, spec.num_classes))


@pytest.fixture
def make_model(tmp_path):
    def make(kind, **options):
        return load(save_model(tmp_path / "run/best.pt", small_segmenter(SPECS[kind])).parent, **options)

    return make


@pytest.mark.parametrize("kind", SPECS)
def test_a_model_gives_ids_and_probabilities_at_the_size_of_the_image(kind, make_model):
    spec, model = SPECS[kind], make_model(kind)
    image = random_image(spec, 37, 53)
    logits = small_segmenter(spec)(torch.from_numpy(spec.image.to_batch(image))[None])[0]
    ids, probabilities = model(image), model.probabilities(image)
    assert (ids.shape, ids.dtype) == ((37, 53), np.uint8)
    assert np.array_equal(ids, logits.argmax(0).numpy())
    assert (probabilities.shape, probabilities.dtype) == ((37, 53, spec.num_ids), np.float32)
    assert np.allclose(probabilities, logits.softmax(0).permute(1, 2, 0), atol=1e-6)
    assert len(np.unique(ids)) > 1


def test_a_threshold_is_the_least_probability_of_the_foreground(make_model):
    model = make_model("16-bit grey")
    image = random_image(SPECS["16-bit grey"], 32, 32)
    foreground = model.probabilities(image)[..., 1]
    middle = float(np.median(foreground))
    assert np.array_equal(model(image, threshold=middle), foreground > middle)
    with pytest.raises(
        ValueError, match=r"threshold: got 0\.5; need a number between 0 and 1, and a model of two class"
    ):
        make_model("RGB")(random_image(SPECS["RGB"], 32, 32), threshold=0.5)
    for wrong in (0, 1, 2, float("nan")):
        with pytest.raises(ValueError, match=f"threshold: got {wrong}; need a number between 0 and 1"):
            model(image, threshold=wrong)


@pytest.mark.parametrize(
    ("kind", "image", "message"),
    [
        ("RGB", np.zeros((8, 8, 3), np.uint16), "16-bit values; the model was trained on 8-bit images"),
        ("RGB", np.zeros((8, 8, 5), np.uint8), "5 channels; the model was trained on images of 3"),
        ("RGB", np.zeros((1, 8, 8, 3), np.uint8), r"an array of shape \(1, 8, 8, 3\); need height, width and 3"),
        ("RGB", np.zeros((0, 8, 3), np.uint8), r"an array of shape \(0, 8, 3\)"),
        ("four floats", np.zeros((8, 8, 4), np.uint8), "8-bit values; the model was trained on float images"),
        ("RGB", Image.new("P", (8, 8)), r"an image of PIL with mode P, .*; give image.convert\('RGB'\)"),
        ("RGB", Path("a.png"), r"^got the path a\.png; need its pixels: model\(PIL\.Image\.open\('a\.png'\)\)$"),
    ],
)
def test_images_of_another_kind_are_refused_by_name(kind, image, message, make_model):
    with pytest.raises(DataError, match=message):
        make_model(kind)(image)


@pytest.mark.parametrize("height", [37, 150], ids=["whole", "in strips"])
def test_an_rgb_image_without_colour_is_grey_for_a_grey_model_and_another_has_a_way_out(height, make_model):
    model = make_model("16-bit grey")
    model.predictor.whole = 100 * 60  # larger images are computed in strips
    grey = random_image(SPECS["16-bit grey"], height, 60)
    rgb = np.repeat(grey, 3, axis=2)
    assert np.array_equal(model(rgb), model(grey))
    rgb[-1, -1, 0] += 1
    with pytest.raises(DataError, match=r"^RGB in colour; the model was trained on grey images: convert them \(image"):
        model(rgb)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_an_alpha_channel_is_dropped_as_predict_drops_it(mode, make_model, tmp_path):
    model = make_model("RGB")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 40, len(mode)), np.uint8)
    picture = Image.fromarray(pixels, mode)
    picture.save(tmp_path / "alpha.png")
    expected = model(np.ascontiguousarray(pixels[:, :, :-1]))
    for image in (read_image(tmp_path / "alpha.png"), picture, pixels):  # the first: what predict gives the model
        assert np.array_equal(model(image), expected)


def test_threads_give_what_one_thread_gives(make_model):
    model = make_model("RGB")
    images = [random_image(SPECS["RGB"], 40 + index % 3, 64, index) for index in range(12)]
    expected = [model(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(map(np.array_equal, pool.map(model, images), expected))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("best.pt", {"device": "gpu"}, "device: got 'gpu'; need auto, cpu, cuda, cuda:N or mps"),
        ("best.pt", {"precision": "bf16"}, "precision: got 'bf16'; need auto, float32, bfloat16, float16"),
        ("model.onnx", {"raw": True}, "raw: got True; .*model.onnx holds the weights of its export, in float32"),
        (
            "model.onnx",
            {"precision": "bfloat16"},
            "precision: got bfloat16; .*model.onnx holds the weights of its export, in float32",
        ),
    ],
)
def test_what_a_file_cannot_be_is_refused(name, options, message, tmp_path):
    save_model(tmp_path / name, small_segmenter(SPECS["RGB"]))
    with pytest.raises(UserError, match=message):
        load(tmp_path / name, **options)


def test_the_package_has_load_and_needs_no_torch_for_anything_else():
    script = "import sys, unet_trainer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)
    assert unet_trainer.load is load
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        unet_trainer.lode  # noqa: B018
