"""python train_unet.py try: finds the model and its images, serves them to this machine alone, ends with Ctrl-C."""

import json
import re
import shutil
import webbrowser
from pathlib import Path

import pytest

from train_unet import main
from unet_trainer.system.local_server import LocalServer


@pytest.fixture(scope="module")
def place(tiny_data, trained_run, tmp_path_factory):
    """A folder with checkpoints/tiny, a real run."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(trained_run, folder / "checkpoints/tiny")
    return folder


@pytest.fixture
def served(place, monkeypatch):
    """The servers that `try` would have run."""
    monkeypatch.chdir(place)
    servers = []
    monkeypatch.setattr(LocalServer, "serve_forever", lambda server: servers.append(server))
    monkeypatch.setattr(webbrowser, "get", lambda: pytest.fail("a browser was opened"))
    return servers


def refused(capsys, *arguments):
    assert main(["try", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_run_is_served_to_this_machine_with_its_validation_images(served, capsys):
    assert main(["try", "tiny"]) == 0
    (server,) = served
    said = capsys.readouterr().out
    assert server.server_address[0] == "127.0.0.1"
    assert re.search(r"^Model: tiny, epoch 1, val IoU 0\.\d{4}, on cpu, float32$", said, re.MULTILINE)
    assert "Validation images: 2\n" in said
    assert f"Open http://127.0.0.1:{server.server_port}/{server.key}/\n" in said
    assert "Warning" not in said
    rows = [line.split(",") for line in Path("checkpoints/tiny/split.csv").read_text().splitlines()]
    assert [pair.name for pair in server.pairs] == [row[4] for row in rows if row[2] == "val"]


def test_a_model_without_its_data_is_served_and_the_page_says_why_there_are_no_images(served, capsys, tmp_path):
    (tmp_path / "best.pt").write_bytes(Path("checkpoints/tiny/best.pt").read_bytes())
    assert main(["try", str(tmp_path / "best.pt")]) == 0
    reason = f"{tmp_path} does not hold both split.csv and config.yaml, which name them"
    assert f"Note: there are no validation images to choose from: {reason}\n" in capsys.readouterr().out
    assert json.loads(served[0].facts)["note"] == reason


def test_data_that_moved_can_be_named_and_must_then_be_there(served, capsys, tiny_data):
    assert main(["try", "tiny", f"data_dir={tiny_data}"]) == 0
    assert served[0].pairs[0].image.parent == tiny_data / "images"
    capsys.readouterr()
    assert refused(capsys, "tiny", "data_dir=nowhere").startswith("Error: data_dir: nowhere does not exist here")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "Error: no run nothing; checkpoints holds tiny\n"),
        (["tiny", "other"], "Error: got 2 models (tiny, other); need one run or file\n"),
        (["tiny", "batch_size=4"], "Error: batch_size=4: of settings try takes data_dir alone, once each\n"),
        (["tiny", "--device", "gpu"], "Error: 1 problem in the config:\n  device: got 'gpu'"),
        (["tiny/../.."], "Error: "),
    ],
)
def test_what_cannot_be_served_is_one_message(served, capsys, arguments, message):
    assert refused(capsys, *arguments).startswith(message)
    assert served == []
