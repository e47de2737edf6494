"""python train_unet.py evaluate, on small trained runs."""

import json
import re
import shutil

import pytest

from helpers.evaluated_models import train_tiny, write_cells
from train_unet import main
from unet_trainer.training.checkpoint import read_checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """data/ with train and val; runs: one (resize, averaged weights), and two, which has other weights. Read-only by agreement."""
    folder = tmp_path_factory.mktemp("evaluate")
    train_tiny(write_cells(folder / "data"), folder / "runs", "one", ema_decay=0.5)
    best = shutil.copytree(folder / "runs/one", folder / "runs/two") / "best.pt"
    content = read_checkpoint(best)
    for weight in content["model"].values():
        weight.copy_(weight * 1.05)
    write_checkpoint(best, content)
    return folder


@pytest.fixture
def runs(place, tmp_path):
    """A copy of the runs, for a test to write into."""
    shutil.copytree(place / "runs", tmp_path / "runs")
    return tmp_path / "runs"


def evaluate(*words):
    return main(["evaluate", *map(str, words)])


def written(folder):
    return json.loads((folder / "evaluation.json").read_text())


def iou_of(folder):
    return written(folder)["mean"]["dataset"]["iou"]["value"]


def test_a_run_is_evaluated_on_its_own_validation_images(runs, capsys):
    assert evaluate(runs / "one") == 0
    said = capsys.readouterr().out
    content = written(runs / "one/evaluation")
    result = json.loads((runs / "one/run.json").read_text())["result"]
    assert iou_of(runs / "one/evaluation") == result["best_val_iou"] == content["model"]["val_iou"]
    assert content["num_images"] == 5
    assert content["data"]["split"] == "val"
    assert f": val, by {runs / 'one/split.csv'}\n" in said
    iou = f"{result['best_val_iou']:.4f}"
    assert f"Training's own validation of this model: IoU {iou}; here {iou}\n" in said
    assert "5 images: intervals from so few are rough" in said
    assert len(list((runs / "one/evaluation/worst").iterdir())) == 5
    assert (runs / "one/evaluation/evaluation.csv").read_text().count("\n") == 6
    assert "was trained on" not in said


def test_images_without_a_mask_are_left_out_where_that_is_set(runs, place, tmp_path):
    shutil.copytree(place / "data", data := tmp_path / "data")
    min((data / "val/masks").iterdir()).unlink()
    given = runs / "one/best.pt", f"data_dir={data}", "--split", "all", "--out", tmp_path / "out"
    assert evaluate(*given) == 2
    assert evaluate(*given, "unpaired=skip") == 0
    assert written(tmp_path / "out")["num_images"] == len(list(data.glob("*/masks/*")))


def test_training_images_are_said_to_be_such_and_a_file_alone_writes_where_it_is_told(place, tmp_path, capsys):
    assert evaluate(place / "runs/one", "--split", "all", "--out", tmp_path / "a/b") == 0
    expected = r"Warning: .*one/best\.pt was trained on 3 of these images, such as .*: its scores are too good"
    assert re.search(expected, capsys.readouterr().out)
    assert written(tmp_path / "a/b")["num_images"] == 8
    shutil.copy(place / "runs/one/best.pt", tmp_path / "model.pt")
    assert evaluate(tmp_path / "model.pt", f"data_dir={place / 'data'}", "--split", "all") == 0
    said = capsys.readouterr().out
    assert "nothing was written" in said
    assert "whether it was trained on these images cannot be told" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "model.pt"]


def test_two_runs_are_compared_on_the_same_images(runs, capsys):
    assert evaluate(runs / "one", "--compare", runs / "two") == 0
    said = capsys.readouterr().out
    assert f"Whole set against {runs / 'two/best.pt'}, on the same 5 images (paired bootstrap):" in said
    assert "\n  foreground: IoU " in said
    content = written(runs / "one/evaluation")
    difference = content["comparison"]["mean"]["dataset"]["iou"]
    evaluate(runs / "two")
    assert difference["other"] == iou_of(runs / "two/evaluation")
    assert difference["difference"] == pytest.approx(difference["this"] - difference["other"])
    assert content["compared_with"] == str(runs / "two/best.pt")
    evaluate(runs / "one", "--compare", runs / "one")
    assert "The interval holds 0: these images do not tell" in capsys.readouterr().out


def test_options_change_what_they_say(runs, capsys):
    evaluate(runs / "one")
    plain = written(runs / "one/evaluation")
    options = "--tta", "--cldice", "--threshold", "0.1", "--raw", "--device", "cpu", "--precision", "float32"
    evaluate(runs / "one", *options)
    said = capsys.readouterr().out
    content = written(runs / "one/evaluation")
    assert "mean of 4 views" in said  # both flips of TINY_MODEL, and together
    assert "from a probability of 0.1 on" in said
    settings = {"threshold": 0.1, "tta": True, "raw": True, "fit": "resize", "tile": None}
    assert content["settings"] == {"engine": "cpu, float32, mean of 4 views", **settings}
    assert content["model"]["file"].endswith("last.pt")
    assert "cldice" in content["mean"]["dataset"]
    assert "cldice" not in plain["mean"]["dataset"]
    assert content["confusion"] != plain["confusion"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"evaluate takes one model, got none"),
        (["a", "b"], r"evaluate takes one model, got a, b"),
        (["one", "batch_size=4"], r"batch_size=4: of settings evaluate takes data_dir, image_dir, .*alone, once each$"),
        (["one", "data_dirr=x"], r"data_dirr=x: .*; did you mean data_dir\?"),
        (["one", "--threshold", "2"], r"--threshold: got 2; need a probability between 0 and 1"),
        (["one", "--device", "gpu"], r"device: got 'gpu'"),
        (["one", "--compare", "nowhere"], r"no run nowhere"),
        (["one", "data_dir=nowhere"], r"data_dir: nowhere does not exist"),
        (["one", "--split", "test"], r"--split: .* has no test images with masks"),
    ],
)
def test_what_cannot_be_done_is_one_message(place, words, message, capsys):
    assert evaluate(*words, f"checkpoint_dir={place / 'runs'}") == 2
    shown = capsys.readouterr().err
    assert re.match(f"Error: (1 problem in the config:\n  )?({message})", shown.rstrip("\n")), shown
    assert "Traceback" not in shown
