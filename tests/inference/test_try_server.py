"""The server of `try`: what it answers, and all that it refuses."""

import http.client
import io
import json
import os
import re
import socket
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from helpers.brightness_engine import bright_predictor
from helpers.image_bytes import cv2_bytes, grey_png, npy_bytes, tiff_bytes
from helpers.killed_runs import wait_until
from helpers.try_page import ask, parse_result, refusal, serving
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import write_image
from unet_trainer.inference import try_server
from unet_trainer.inference.try_server import MAX_UPLOAD, MAX_WAITING, PAGE, decode_for_page, predict_for_page

LEVELS = np.array([[0, 255, 255, 255], [0, 0, 255, 255]], np.uint8)
PNG = cv2_bytes(".png", np.repeat(LEVELS[:, :, None], 3, axis=2))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two validation images; the mask of the first has a pixel less than the model finds, that of the second is broken."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("a", "b"):
        (folder / f"{name}.png").write_bytes(PNG)
    mask = (LEVELS > 0).astype(np.uint8)
    mask[0, 3] = 0
    write_image(folder / "a_mask.png", mask)
    (folder / "b_mask.png").write_bytes(b"no mask")
    return [Pair(name, folder / f"{name}.png", folder / f"{name}_mask.png") for name in ("a", "b")]


@pytest.fixture(scope="module")
def server(pairs):
    with serving(bright_predictor(), pairs) as running:
        yield running


def connect(server):
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def test_the_page_comes_with_a_policy_that_allows_it_and_nothing_else(server):
    status, headers, content = ask(server, "GET", "")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert content == PAGE.read_bytes()
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert re.search(r"https?:|\*", policy) is None
    assert headers["Referrer-Policy"] == "no-referrer"  # else the key would leave the page
    assert (headers["Cache-Control"], headers["Cross-Origin-Resource-Policy"]) == ("no-store", "same-origin")


def test_the_facts_say_what_the_model_is(server):
    status, _, content = ask(server, "GET", "facts")
    facts = json.loads(content)
    assert status == 200
    assert (facts["run"], facts["epoch"], facts["val_iou"], facts["encoder"]) == (
        "bright",
        3,
        0.75,
        "tu-test_efficientnet",
    )
    assert [each["name"] for each in facts["classes"]] == ["background", "foreground"]
    assert (facts["image_size"], facts["fit"], facts["images"]) == ("32×32", "crop", "8-bit, 3 channels")
    assert (facts["validation"], facts["note"], facts["max_upload"]) == (["a", "b"], "", MAX_UPLOAD)


def test_a_validation_image_is_answered_with_its_truth_and_iou(server):
    _, _, content = ask(server, "POST", "validation/0", b"")
    header, parts = parse_result(content)
    assert parts["truth"] == bytes([0, 1, 1, 0, 0, 0, 1, 1])
    assert header["iou"] == pytest.approx(4 / 5)


def test_images_are_never_written_to_disk(server):
    written, is_watching = [], [True]

    def note(event, values):
        if (
            is_watching
            and event == "open"
            and isinstance(values[2], int)
            and values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            written.append(values[0])

    sys.addaudithook(note)  # stays, and notes nothing once the test is over
    try:
        assert ask(server, "POST", "predict", PNG)[0] == 200
        assert ask(server, "POST", "validation/0", b"")[0] == 200
    finally:
        is_watching.clear()
    assert written == []


@pytest.mark.parametrize("host", ["evil.example", "", "evil.example:80@localhost", "localhost#"])
def test_a_name_that_was_made_to_lead_here_is_refused(server, host):
    assert refusal(ask(server, "GET", "facts", Host=host)) == (421, f"Host: {host!r} is not the address of this page")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "../../etc/passwd"),
        ("POST", "validation/..%2f..%2fetc%2fpasswd"),
        ("GET", "validation/2"),
        ("POST", "validation/٣"),
    ],
)
def test_no_path_names_a_file(server, method, path):
    with connect(server) as connection:
        connection.sendall(
            f"{method} /{server.key}/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode()
        )
        answer = connection.makefile("rb").read()
    assert int(answer.split(b" ", 2)[1]) == 404
    assert answer.endswith(b'{"error": "nothing here"}')


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "the file is empty"),
        (b"not an image", "not an image that can be decoded"),
        (PNG[:-20], "the file is cut off"),
        (grey_png(40_000, 40_000, 1, b""), "5.7e-05 MB that decompress to 40000×40000 pixels: a decompression bomb"),
        (cv2_bytes(".png", np.zeros((4, 4, 3), np.uint16)), "16-bit values; the model was trained on 8-bit images"),
        (npy_bytes(np.array([{}]), allow_pickle=True), "cannot be decoded (it holds Python objects)"),
    ],
)
def test_what_the_model_cannot_take_is_refused_by_name(server, data, sentence):
    assert refusal(ask(server, "POST", "predict", data)) == (422, sentence)


def test_an_upload_that_is_too_large_is_refused_before_it_is_read(server):
    """The answer comes although no byte of it was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest("POST", f"/{server.key}/predict")
    connection.putheader("Content-Length", str(10**30))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"].endswith(
        " MiB; the page takes files of up to 64 MiB, and python train_unet.py predict takes larger ones"
    )
    connection.close()


def test_more_images_than_wait_are_refused_and_those_that_wait_are_done():
    predictor = bright_predictor()
    with serving(predictor) as running:
        predictor.engine.is_free.clear()
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(running, "POST", "predict", PNG)[0]))
            for _ in range(MAX_WAITING)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: running.places._value == 0 and running.is_busy)
        big = PNG + bytes(24 * 2**20)  # read to its end, so that the answer arrives
        assert refusal(ask(running, "POST", "predict", big)) == (
            503,
            "4 images are waiting already; try again in a moment",
        )
        assert running.is_busy
        assert ask(running, "GET", "facts")[0] == 200
        predictor.engine.is_free.set()
        for thread in threads:
            thread.join()
        assert answers == [200] * MAX_WAITING
        assert not running.is_busy
        assert ask(running, "POST", "predict", PNG)[0] == 200


def test_a_large_image_says_how_far_it_is_and_stops_when_its_browser_leaves():
    predictor = bright_predictor()
    predictor.whole, predictor.tile = 100, (16, 16)
    with serving(predictor) as running:
        assert json.loads(ask(running, "GET", "progress")[2]) == {"done": 0, "all": 0}
        rows = []
        logits = predictor.engine.logits

        def compute(images):
            rows.append(len(images))
            if len(rows) == 2:
                predictor.engine.is_free.clear()
            return logits(images)

        predictor.engine.logits = compute
        data, connection = (
            cv2_bytes(".png", np.zeros((64, 16, 3), np.uint8)),
            connect(running),
        )  # tiles start at 0, 8, ..., 48
        head = f"POST /{running.key}/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_until(lambda: not predictor.engine.is_free.is_set())  # the second tile has begun
        assert json.loads(ask(running, "GET", "progress")[2]) == {"done": 1, "all": 7}
        connection.close()
        predictor.engine.is_free.set()
        wait_until(lambda: running.places._value == MAX_WAITING)
        assert rows == [1, 1]  # two of seven
        assert running.progress == (0, 0)
        assert not running.is_busy


def test_the_page_is_one_file_and_names_no_other_address():
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"https?://|@import|<iframe|<base", page) == []
    assert re.findall(r"""\b(?:src|href)="([^"]*)""", page) == ["data:,"]
    assert page.count("<script") == page.count("<style") == 1
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|document\.write", page) == []


def test_a_link_on_another_site_opens_the_page_but_no_site_reads_an_image(server):
    """The address may be clicked in a terminal that is itself a page."""
    assert ask(server, "GET", "", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200
    assert ask(server, "GET", "validation/0", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})[0] == 403


def grey(levels):
    """Rows of levels → H,W,3 uint8."""
    return np.repeat(np.array(levels, np.uint8)[:, :, None], 3, axis=2)


def shown(parts, name, header):
    """An array of the message."""
    shape = header["probability_grid"] if name == "probabilities" else header["display"]
    return np.frombuffer(parts[name], np.uint8).reshape(shape)


def test_ids_shares_and_probabilities_are_those_of_the_model():
    image = grey([[0, 255, 130, 120], [10, 20, 250, 129]])
    header, parts = parse_result(predict_for_page(bright_predictor(), image))
    assert shown(parts, "ids", header).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert (header["height"], header["width"], header["shares"]) == (2, 4, [0.5, 0.5])
    # Level 130: logits 0 and 2, so the foreground has the probability 1 / (1 + exp(-2)) = 0.88080, which is 224.6 / 255.
    assert shown(parts, "probabilities", header)[:, 0, [2, 0]].tolist() == [[30, 255], [225, 0]]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(parts["image"]))), image)
    assert (header["iou"], header["device"], "truth" in parts) == (None, "cpu, float32", False)


def test_a_large_image_is_shown_small_and_its_mask_is_whole(monkeypatch):
    monkeypatch.setattr(try_server, "DISPLAY_PIXELS", 16)
    monkeypatch.setattr(try_server, "PROBABILITY_BYTES", 8)
    levels = np.zeros((8, 8), np.uint8)
    levels[:, 4:] = 255
    truth = (levels > 0).astype(np.uint8)
    truth[0] = 1  # four pixels of the first row are missed
    header, parts = parse_result(predict_for_page(bright_predictor(), grey(levels), truth))
    assert shown(parts, "ids", header).tolist() == [[0, 0, 1, 1]] * 4  # every second pixel
    assert shown(parts, "truth", header).tolist() == [[0, 0, 1, 1]] * 4  # rows 1, 3, 5, 7
    assert shown(parts, "probabilities", header).tolist() == [[[255, 0]] * 2, [[0, 255]] * 2]
    assert np.asarray(Image.open(io.BytesIO(parts["image"]))).shape == (4, 4, 3)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(parts["mask"]))), levels > 0)
    assert header["iou"] == pytest.approx(32 / 36)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(try_server, "MAX_PIXELS", 50_000_000)
    monkeypatch.setattr(try_server, "decode_image", lambda data, min_side: pytest.fail("decoded"))
    data = grey_png(8000, 8000, 1, b"")
    with pytest.raises(
        ReadError,
        match=r"^8000×8000 pixels; the page takes up to 50 megapixels, and python train_unet.py predict takes",
    ):
        decode_for_page(data)


def test_the_pages_of_a_tiff_count(monkeypatch):
    """Pillow tells the size of the first page only, and nothing of a kind that it does not know."""
    data = tiff_bytes(np.zeros((20, 50, 60), np.float64), compression="zlib", photometric="minisblack")
    assert len(data) < 20_000
    monkeypatch.setattr(try_server, "MAX_DECODED_BYTES", 20 * 50 * 60 * 8 - 1)
    with pytest.raises(ReadError, match=r"^a TIFF of 0\.0 GB; the page takes up to 0\.0 GB"):
        decode_for_page(data)
    monkeypatch.setattr(try_server, "MAX_DECODED_BYTES", 20 * 50 * 60 * 8)
    assert decode_for_page(data).shape == (50, 60, 20)
