"""A loss, a network, data and callbacks of the caller's own, and a run that is followed: docs/extending.md."""

import errno
import re
import shutil

import numpy as np
import pytest
import torch

import train_unet
from helpers.custom_parts import SETTINGS, Small, custom_loss, saved
from helpers.project import ROOT
from train_unet import follow, train
from unet_trainer import Callback, load
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.data.formats.given import write_given
from unet_trainer.runs.folder import resume_command


@pytest.fixture
def config(tiny_data, tmp_path):
    return {**SETTINGS, "data_dir": str(tiny_data), "checkpoint_dir": str(tmp_path / "runs"), "run_name": "run"}


@pytest.mark.usefixtures("small_network")
def test_the_examples_of_the_page_run(tiny_data, tmp_path, monkeypatch):
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine").symlink_to(tiny_data)
    imports, *examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(imports, names)
    names["train"] = lambda config, **given: train(config, **{**SETTINGS, **given})
    names["follow"] = lambda config, **given: follow(config, **{**SETTINGS, **given})
    assert len(examples) == 4
    for example in examples:
        exec(example, names)
    assert names["model"](np.zeros((40, 50, 3), np.uint8)).shape == (40, 50)
    assert names["row"]["epoch"] == 2


def test_a_run_with_parts_of_its_own_resumes_to_the_same_bits(config, capsys):
    torch.manual_seed(1)
    parts = {"loss": custom_loss, "model": Small()}
    whole = train(config, **parts, run_name="whole").run_dir
    for row in follow(config, **parts):
        if row["epoch"] == 1:
            break
    expected = "Cancelled; to go on where the state was saved: train(..., loss=..., model=..., resume='"
    assert expected in capsys.readouterr().out
    for missing, setting in (("loss", {"loss": {"own": 1}}), ("model", {"architecture": "own"})):
        given = {name: part for name, part in parts.items() if name != missing}
        with pytest.raises(UserError, match=f"^{missing}: the run has a custom {missing}, .* pass it from Python"):
            train(config, **given, **setting, resume="auto")
    compiled = {**parts, "model": torch.compile(parts["model"])}  # its names have a prefix, the checkpoint has not
    result = train(config, **compiled, resume="auto")
    assert result.epochs == 3
    first, second = (saved(folder / "last.pt")["model"] for folder in (whole, result.run_dir))
    assert list(first) == list(Small().state_dict())
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(UserError, match="pass it from Python"):
        load(result.run_dir)
    assert load(result.run_dir, model=Small())(np.zeros((40, 50, 3), np.uint8)).shape == (40, 50)
    with pytest.raises(UserError, match=r"^model: the weights of .*best\.pt do not fit it \(.*Missing key.*weight"):
        load(result.run_dir, model=torch.nn.Conv2d(3, 1, 1))
    for words in (
        ["--resume", result.run_dir, "num_epochs=9"],
        ["predict", result.run_dir, config["data_dir"], "--out", "x"],
    ):
        assert train_unet.main([str(word) for word in words]) == 2
        assert "pass it from Python" in capsys.readouterr().err


class Pair(Small):
    def forward(self, images):
        return {"out": images}


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("model", lambda spec: "unet", "got str"),
        ("model", "unet", "TypeError: 'str' object is not callable; need a torch.nn.Module, or a function that"),
        ("model", lambda: Small(), "TypeError: .* takes 0 positional arguments"),
        ("model", Pair(), "it returns dict"),
        ("model", Small(channels=5), "it does not take images of shape"),
        ("model", Small().requires_grad_(False), "it has no parameters to train"),
        ("model", Small(num_classes=3), "it returns"),
        ("model", torch.nn.Conv2d(3, 1, 3, stride=2, padding=1), "it returns"),
        ("loss", torch.nn.CrossEntropyLoss(), "masks with 255 where pixels are ignored: IndexError"),
        ("loss", lambda logits, masks: logits.mean((1, 2, 3)), "need one number"),
        ("loss", lambda logits, masks: 3.0, "need one number"),
        ("loss", torch.nn.Sequential(torch.nn.Linear(1, 1)), "it has parameters"),
    ],
)
def test_a_network_or_a_loss_that_does_not_fit_is_refused_before_the_run_begins(config, tmp_path, name, part, message):
    with pytest.raises(UserError, match=f"^{name}: .*{message}") as caught:
        train(config, **{"model": Small(), name: part})
    assert not (tmp_path / "runs" / "run").exists()
    if "does not take images" in message:  # an error in the forward pass keeps its traceback
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_overrides_and_a_loss_by_name_beside_a_config_instance_are_taken(config, tmp_path):
    assert len(list(follow(load_config(config), loss="dice", model=Small(), num_epochs=1, run_name="other"))) == 1
    assert saved(tmp_path / "runs/other/last.pt")["config"]["loss"] == {"dice": 1.0}


def test_the_validation_loss_is_the_mean_over_images_whatever_pads_the_last_batch(config):
    """3 of 12 images validate: the second batch of 2 is filled up."""
    module = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]), ignore_index=255)
    for name, loss in {"module": module, "vector": lambda *given: custom_loss(*given)[None]}.items():
        result = train(config, model=Small(), loss=loss, run_name=name, val_fraction=0.25, num_epochs=1)
        assert 0.1 < result.history[-1]["val_loss"] < 2


def test_without_a_config_nothing_of_the_demo_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = [(np.full((32, 32, 3), index, np.uint8), np.eye(32, dtype=np.uint8)) for index in range(6)]
    result = train(model=Small(), train_data=pairs, **{**SETTINGS, "encoder": "auto"})
    assert result.epochs == 3
    assert "\nencoder: resnet34" in (tmp_path / result.run_dir / "config.yaml").read_text()


def test_parameters_that_the_caller_froze_are_not_trained(config):
    network = Small()
    network.inner.requires_grad_(False)
    weights = saved(train(config, model=network).run_dir / "last.pt")["model"]
    assert torch.equal(weights["inner.weight"], network.inner.weight)
    assert not torch.equal(weights["head.weight"], network.head.weight)


def test_callbacks_are_called_at_their_moments_and_may_stop_the_run(config):
    moments = []

    class Recorder(Callback):
        def on_start(self, run_dir, settings):
            moments.append(("start", run_dir.name, settings.batch_size))

        def on_epoch(self, row):
            moments.append(("epoch", row["epoch"]))
            return row["epoch"] == 2

        def on_checkpoint(self, path):
            moments.append(("checkpoint", load(path, model=Small()).engine.card.spec.architecture == "own"))

        def on_end(self, result):
            moments.append(("end", result.epochs))

    train(config, model=Small(), callbacks=Recorder())  # a single one needs no list
    others = [moment for moment in moments if moment[0] != "checkpoint"]
    assert others == [("start", "run", 2), ("epoch", 1), ("epoch", 2), ("end", 2)]
    assert moments[1] == ("checkpoint", True)


def test_any_true_answer_of_on_epoch_stops_the_run(config, tmp_path):
    train(config, lambda row: torch.tensor(True), model=Small())
    assert saved(tmp_path / "runs" / "run" / "last.pt")["epoch"] == 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"callbacks": [Callback(), print]}, r"callbacks\[1\]: got <built-in function print>; need an instance of a "),
        ({"callbacks": [Callback]}, r"callbacks\[0\]: got <class '.*Callback'>; need an instance of a subclass of"),
        ({"callbacks": print}, r"callbacks\[0\]: got <built-in function print>; .* a function goes to on_epoch$"),
        ({"on_epoch": {"num_epochs": 3}}, "on_epoch: got {'num_epochs': 3}; need a function of an epoch's row$"),
        ({"train_data": iter([])}, "train_data: got list_iterator; need a list, or an object with a length that gives"),
    ],
)
def test_what_is_no_callback_and_no_data_is_refused_in_one_sentence(parts, message):
    with pytest.raises(UserError, match=f"^{message}"):
        train(**parts)


def test_the_way_to_train_on_with_custom_parts_is_a_call(config, capsys):
    def called_with(*parts, setting):
        resume = f"resume='{config['checkpoint_dir']}/run', {setting}) in Python"
        return f"train(..., {'=..., '.join(parts)}=..., {resume}"

    train(config, model=Small(), num_epochs=1)
    said = capsys.readouterr().out
    assert f"Next: load('{config['checkpoint_dir']}/run', model=...) in Python, see docs/extending.md\n" in said
    assert f"      {called_with('model', setting='num_epochs=2')}   (trains on)\n" in said
    train(config, model=Small(), num_epochs=1, resume="auto")
    assert f"to train on: {called_with('model', setting='num_epochs=2')}\n" in capsys.readouterr().out

    config["run_name"] = "timed"
    timed = train(config, model=Small(), loss=custom_loss, num_epochs="auto", time_budget="1s").run_dir
    assert resume_command(timed, "time_budget=2m") == (
        f"train(..., loss=..., model=..., resume='{timed}', time_budget='2m') in Python"
    )


def test_what_a_callback_raises_ends_the_run_and_its_state_is_saved(config, tmp_path):
    def fail(row):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        train(config, fail, model=Small())
    assert saved(tmp_path / "runs" / "run" / "last.pt")["epoch"] == 1


def test_data_are_written_once_whatever_their_form(tmp_path):
    image, mask = np.arange(60, dtype=np.uint8).reshape(4, 5, 3), np.eye(4, 5, dtype=bool)
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    forms = (image, mask), (tensor, torch.from_numpy(mask)[None]), (image.tolist(), mask.astype(np.uint8))
    folders = {write_given({"train": [pair], "val": None}, tmp_path) for pair in forms}
    assert len(folders) == 2  # a list of numbers is int64
    folder = write_given({"train": [(image, mask)], "val": None}, tmp_path)
    assert np.array_equal(np.load(folder / "images/000000.npy"), image)
    assert np.array_equal(np.load(folder / "masks/000000.npy"), mask)
    assert not list(tmp_path.glob(".draft*"))


def given_pairs():
    return [(np.full((4, 5, 3), index, np.uint8), np.eye(4, 5, dtype=np.uint8)) for index in range(3)]


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def invert(folder):
    np.save(folder / "masks/000001.npy", 1 - np.load(folder / "masks/000001.npy"))


def replace_by_link(folder):
    (folder / "masks/000000.npy").unlink()
    (folder / "masks/000000.npy").symlink_to(folder.parent.parent / "mine.npy")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "images/000002.npy").write_bytes(b"\x93NUMPY"),
        invert,
        lambda folder: shutil.rmtree(folder / "masks"),
        lambda folder: shutil.copy(folder / "images/000000.npy", folder / "images/000003.npy"),
        replace_by_link,
    ],
    ids=["truncated", "inverted", "no masks", "one more", "a link"],
)
def test_data_that_were_damaged_since_they_were_written_are_written_anew(tmp_path, damage):
    (tmp_path / "mine.npy").write_bytes(b"mine")
    folder = write_given({"train": given_pairs(), "val": given_pairs()[:1]}, tmp_path) / "train"
    before = contents(folder)
    damage(folder)
    assert contents(folder) != before
    assert write_given({"train": given_pairs(), "val": given_pairs()[:1]}, tmp_path) == folder.parent
    assert contents(folder) == before
    assert (tmp_path / "mine.npy").read_bytes() == b"mine"


@pytest.mark.parametrize("item", [(np.zeros((4, 4)), "mask"), np.zeros(3), None, (np.zeros((0, 4)), np.zeros((0, 4)))])
def test_data_that_are_no_pairs_are_named(tmp_path, item):
    pair = np.zeros((4, 4)), np.zeros((4, 4))
    with pytest.raises(UserError, match=r"^val_data\[1\]: .*need \(image, mask\)"):
        write_given({"train": [pair], "val": [pair, item]}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_item_whose_reading_fails_is_named(tmp_path):
    class Broken(list):
        def __getitem__(self, index):
            raise KeyError("mask")

    with pytest.raises(UserError, match=r"^train_data\[0\]: KeyError: 'mask'; need \(image, mask\)") as caught:
        write_given({"train": Broken([1]), "val": None}, tmp_path)
    assert isinstance(caught.value.__cause__, KeyError)


def test_no_data_and_a_full_disk_get_a_sentence_and_leave_nothing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"^train_data: it is empty"):
        write_given({"train": [], "val": None}, tmp_path)

    def full(path, *_, **__):
        path.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match=r"^checkpoint_dir: .* cannot take the data .*make room"):
        write_given({"train": [(np.zeros((4, 4)), np.zeros((4, 4)))], "val": None}, tmp_path)
    assert not list(tmp_path.iterdir())
