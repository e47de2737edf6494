"""python train_unet.py try: finds the model and its images, answers with overlay, mask and shares, serves this machine alone."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.brightness_engine import bright_predictor
from helpers.browser import Page, browsing, requested_hosts
from helpers.image_bytes import cv2_bytes, grey_png, npy_bytes
from helpers.project import ROOT
from train_unet import main
from unet_trainer.commands import try_model
from unet_trainer.commands.try_model import answer
from unet_trainer.images.image_spec import ImageSpec

GREEN, BLACK = (0, 200, 120), (0, 0, 0)


@pytest.fixture(scope="module")
def place(trained_run, tmp_path_factory):
    """A folder with checkpoints/tiny, a real run."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(trained_run, folder / "checkpoints/tiny")
    return folder


@pytest.fixture
def served(place, monkeypatch):
    """What `try` would have served: the predictor, the validation images, and whether a browser is opened."""
    monkeypatch.chdir(place)
    calls = []
    monkeypatch.setattr(try_model, "find_spec", lambda name: name)
    monkeypatch.setattr(try_model, "serve", lambda *given: calls.append(given))
    return calls


def test_without_gradio_the_command_to_install_it_is_named_before_torch_is_loaded():
    code = (
        "import sys, train_unet\n"
        "sys.modules['gradio'] = None\n"
        "assert train_unet.main(['try']) == 2\n"
        "assert not {'torch', 'numpy', 'cv2'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "Error: try needs gradio: python -m pip install -r requirements-try.txt\n"
    assert done.returncode == 0
    assert "\ngradio" in (ROOT / "requirements-try.txt").read_text()


def test_a_run_is_served_with_its_validation_images_and_a_file_alone_without(served, tiny_data, tmp_path):
    shutil.copy("checkpoints/tiny/best.pt", tmp_path)
    for words in (["tiny"], ["tiny", f"data_dir={tiny_data}", "--no-browser"], [str(tmp_path / "best.pt")]):
        assert main(["try", *words]) == 0
    (predictor, images, opens_browser), (_, same_images, opens_none), (_, no_images, _) = served
    rows = [line.split(",") for line in Path("checkpoints/tiny/split.csv").read_text().splitlines()]
    assert [name for name, _ in images] == [row[4] for row in rows if row[2] == "val"]
    assert [Path(path).parent for _, path in images] == [tiny_data / "images"] * 2
    assert (predictor.engine.card.run_name, same_images) == ("tiny", images)
    assert (opens_browser, opens_none, no_images) == (True, False, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "other"], "no run tiny other; checkpoints holds tiny\n"),
        (["tiny", "batch_size=4"], "batch_size=4: of settings try takes data_dir alone, once each\n"),
        (["tiny", "data_dir=nowhere"], "data_dir: nowhere does not exist here"),
        (["tiny", "--device", "gpu"], "1 problem in the config:\n  device: got 'gpu'"),
        (["tiny", "--host", "0.0.0.0"], "try --host was removed: the page is for this machine alone"),
    ],
)
def test_what_cannot_be_served_is_one_message(served, capsys, arguments, message):
    assert main(["try", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"Error: {message}")
    assert served == []


# The answer to an image. The model finds the pixels whose first channel is above 128.

LEVELS = np.tile([[0, 255, 130, 120], [10, 20, 250, 129]], (3, 2))
IDS = [[0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 1, 1]] * 3


@pytest.fixture
def gradio():
    return pytest.importorskip("gradio", reason="needs requirements-try.txt")


@pytest.mark.parametrize(
    ("channels", "depth", "name", "data"),
    [
        (3, "uint8", "a.png", cv2_bytes(".png", np.repeat(LEVELS[:, :, None], 3, 2).astype(np.uint8))),
        (5, "float", "a.npy", npy_bytes(np.repeat(LEVELS[:, :, None], 5, 2).astype(np.float32))),
    ],
)
def test_images_of_any_depth_and_channels_are_answered(gradio, tmp_path, channels, depth, name, data):
    (tmp_path / name).write_bytes(data)
    spec = ImageSpec(channels, depth, (0.0,) * channels, (1.0,) * channels, 0.0, 255.0)
    upload, about, shares, drawn, mask = answer(bright_predictor(image=spec), str(tmp_path / name))
    assert re.fullmatch(rf"{name}: 8×6 pixels, \d+\.\d\d s", about)
    assert shares == [("50.00%", "background"), ("50.00%", "foreground")]
    assert np.asarray(mask).tolist() == IDS
    assert [mask.convert("RGB").getpixel(place) for place in ((0, 0), (1, 0))] == [BLACK, GREEN]
    assert upload is None  # the field is free for the next one
    assert (drawn.mode, drawn.size) == ("RGB", (8, 6))


def test_the_overlay_of_a_large_image_is_made_smaller_and_its_mask_is_not(gradio, tmp_path):
    (tmp_path / "a.png").write_bytes(cv2_bytes(".png", np.zeros((10, 2000, 3), np.uint8)))
    _, _, shares, drawn, mask = answer(bright_predictor(), str(tmp_path / "a.png"))
    assert (drawn.size, mask.size) == ((1600, 8), (2000, 10))
    assert shares == [("100.00%", "background"), ("0.00%", "foreground")]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"not an image", "not an image that can be decoded"),
        (npy_bytes(np.array([{}]), allow_pickle=True), "cannot be decoded (it holds Python objects)"),
        (
            grey_png(40_000, 40_000, 1, b""),
            "too large for a page; python train_unet.py predict takes images of any size",
        ),
    ],
)
def test_what_the_model_cannot_take_is_refused_in_a_sentence(gradio, tmp_path, data, sentence):
    (tmp_path / "<b>.png").write_bytes(data)
    with pytest.raises(gradio.Error) as refusal:
        answer(bright_predictor(), str(tmp_path / "<b>.png"))
    assert refusal.value.message == f"&lt;b&gt;.png: {sentence}"


# The page


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("downloads")) as browser:
        yield browser


@pytest.fixture
def address(place, tmp_path):
    """Of the command, which a signal ends without an error and without leaving an upload behind."""
    pytest.importorskip("gradio", reason="needs requirements-try.txt")
    command = [sys.executable, str(ROOT / "train_unet.py"), "try", "tiny", "--device", "cpu"]
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    environment = {**os.environ, "TMPDIR": str(uploads)}
    with subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            first, second = process.stdout.readline(), process.stdout.readline()
            assert second == "Ctrl-C ends it.\n", process.stderr.read()
            assert re.fullmatch(r"Open http://127\.0\.0\.1:\d+/[0-9a-f]{32}/\n", first)
            yield first.split()[1]
            assert list(uploads.glob("tmp*")) != []
            process.send_signal(signal.SIGTERM)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out.strip(), errors) == (0, "", "")
    assert list(uploads.glob("tmp*")) == []


@pytest.mark.browser
def test_an_image_is_dropped_on_the_page_and_its_mask_is_seen_and_nothing_is_asked_for_elsewhere(driver, address):
    requested_hosts(driver)
    page = Page(driver, address).open()
    page.wait_until(lambda: "64×64 pixels" in sentence(page))  # the first validation image
    drop(page, "mine.png", cv2_bytes(".png", np.zeros((40, 60, 3), np.uint8)))
    page.wait_until(lambda: sentence(page).startswith("mine.png: 60×40 pixels, "))
    sizes = "return [...document.images].map(each => [each.naturalWidth, each.naturalHeight])"
    page.wait_until(lambda: page.run(sizes) == [[60, 40]] * 2)  # overlay and mask
    _, link = [each.get_attribute("href") for each in page.all("a[download]")]
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with without_proxy.open(link) as response, Image.open(io.BytesIO(response.read())) as mask:
        assert (mask.mode, mask.getpalette()[:6]) == ("P", [*BLACK, *GREEN])  # its values are class ids
    drop(page, "note.txt", b"hello")
    page.wait_until(lambda: "note.txt: not an image that can be decoded" in page.find("body").text)
    assert requested_hosts(driver) <= {"127.0.0.1", "data", "blob"}


def sentence(page):
    return " ".join(each.get_attribute("value") for each in page.all("textarea"))


def drop(page, name, data):
    """A file on the field for uploads."""
    script = """
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(arguments[2])], arguments[1]));
        arguments[0].dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
    """
    page.run(script, page.find("input[type=file]").find_element("xpath", ".."), name, list(data))
