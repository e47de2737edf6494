"""A new run begins with the weights of a model that there is: whatever file it lies in, as far as it fits."""

import dataclasses
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import segmentation_models_pytorch as smp
import torch
from safetensors.torch import save_file

from helpers.checkpoints import GREY_16BIT, make_card, random_segmenter, save_model
from helpers.hostile import Call
from helpers.project import ROOT, TINY_MODEL
from helpers.runs import stop_after, weights_digest
from helpers.steps import SmallNetwork, make_settings, make_spec, small_components
from train_unet import main, script_config, train
from unet_trainer.config.auto_training import choose_warmup
from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import OWN
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.inference.export import export_smp
from unet_trainer.model.network import build_network
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.reports.run_report import render_report
from unet_trainer.runs.record import read_run_summary
from unet_trainer.training.checkpoint import read_run, write_checkpoint
from unet_trainer.training.initial_model import InitialModel, match_classes, read_initial_model

SPEC = make_spec()
HEAD = "segmentation_head.0"


def network(num_classes=1, channels=3, seed=0):
    torch.manual_seed(seed)
    return SmallNetwork(channels, num_classes)


def model_of(weights, spec=SPEC, path=Path(__file__)):
    """`path`: any file, whose digest is recorded."""
    return InitialModel(path, "a run", weights, spec, {})


def named(*names, num_classes=None):
    """The spec of a model with these classes; black is the background's colour."""
    spec = make_spec(num_classes=num_classes or len(names))
    return dataclasses.replace(spec, id_names=names)


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def refusal(call, *arguments):
    with pytest.raises(UserError) as raised:
        call(*arguments)
    message = str(raised.value)
    assert "\n" not in message
    return message


# What fits


def test_a_network_of_the_same_kind_takes_every_tensor():
    old, new = network(seed=1), network()
    loaded = model_of(old.state_dict()).load_into(new, SPEC)
    assert same(new.state_dict(), old.state_dict())
    assert loaded.summary.startswith("16 of 16 tensors of a run, sha256 ")
    assert (loaded.remarks, loaded.is_complete) == ("", True)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.module."])
def test_prefixes_of_wrappers_are_left_out_however_they_nest(prefix):
    old, new = network(seed=1), network()
    weights = {prefix + name: tensor for name, tensor in old.state_dict().items()}
    assert model_of(weights).load_into(new, SPEC).is_complete
    inner = {name.replace("encoder.", "encoder._orig_mod."): tensor for name, tensor in old.state_dict().items()}
    assert model_of(inner).load_into(new, SPEC).is_complete
    assert same(new.state_dict(), old.state_dict())


CASES = [
    (named("background", "road"), named("background", "road", "tree"), [0, 1, None]),
    (named("Void", "car", "tree"), named("background", "tree", "Car"), [0, 2, 1]),  # id 0 is black in both
    (named("background", "nuclei", num_classes=1), named("background", "cells", num_classes=1), [0, 1]),
    (named("background", "road", num_classes=1), named("background", "tree", "road"), [0, None, 1]),
    (named("background", "tree", "road"), named("background", "road", num_classes=1), [0, 2]),
    (named("background", "tree", "road"), named("background", "car", num_classes=1), [None, None]),
    (named("class 0", "class 1", "class 2"), named("a", "b", "c"), [0, 1, 2]),
    (named("a", "b", "c"), named("class 0", "class 1"), [0, None]),
    (None, named("a", "b", "c"), [0, 1, 2]),
]


@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_classes_are_matched_by_name_and_the_background_by_its_colour(old, new, expected):
    assert match_classes(old, new) == expected


def test_classes_of_the_same_name_keep_their_rows_and_new_ones_are_initialised():
    """Without a class in common that is the whole last layer."""
    spec, other = named("background", "road", "tree"), named("background", "tree", "car")
    old, new = network(3, seed=1), network(3)
    fresh = new.state_dict()[f"{HEAD}.weight"].clone()
    loaded = model_of(old.state_dict(), spec).load_into(new, other)
    before, after = old.state_dict(), new.state_dict()
    assert torch.equal(after[f"{HEAD}.weight"][:2], before[f"{HEAD}.weight"][[0, 2]])
    assert torch.equal(after[f"{HEAD}.bias"][:2], before[f"{HEAD}.bias"][[0, 2]])
    assert torch.equal(after[f"{HEAD}.weight"][2], fresh[2])
    assert loaded.remarks == "new weights for the classes car in the last layer"
    assert not loaded.is_complete
    others = dataclasses.replace(named("c", "d"), id_colours=((9, 9, 9), (1, 1, 1)))
    loaded = model_of(network(2, seed=1).state_dict(), named("a", "b")).load_into(network(2), others)
    assert loaded.remarks == "new weights for the classes c, d in the last layer"
    assert loaded.summary.startswith("14 of 16 tensors")


@torch.no_grad()
def test_a_lone_foreground_becomes_one_of_several_classes_and_back_with_the_same_decision():
    """Its logit z stands for the logits (0, z)."""
    one, several = named("background", "road", num_classes=1), named("background", "tree", "road")
    lone, many = network(1, seed=1), network(3)
    model_of(lone.state_dict(), one).load_into(many, several)
    head = many.state_dict()
    assert not head[f"{HEAD}.weight"][0].any()
    assert not head[f"{HEAD}.bias"][0].any()
    assert torch.equal(head[f"{HEAD}.weight"][2], lone.state_dict()[f"{HEAD}.weight"][0])
    back = network(1)
    model_of(many.state_dict(), several).load_into(back, one)
    assert same(back.state_dict(), lone.state_dict())


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (3, 1, lambda weight: weight.sum(1, keepdim=True)),
        (1, 3, lambda weight: weight.repeat(1, 3, 1, 1) / 3),
        (3, 5, lambda weight: weight[:, [0, 1, 2, 0, 1]] * 3 / 5),
    ],
)
def test_other_channels_of_the_images_adapt_the_first_layer(before, now, expected):
    old, new = network(channels=before, seed=1), network(channels=now)
    loaded = model_of(old.state_dict()).load_into(new, SPEC)
    torch.testing.assert_close(new.encoder[0].weight, expected(old.encoder[0].weight))
    assert loaded.remarks == f"encoder.0.weight is adapted from {before} to {now} channels"
    assert loaded.is_complete


def test_a_layer_of_another_shape_is_initialised_and_is_listed():
    weights = network(seed=1).state_dict() | {"decoder.0.weight": torch.zeros(4, 9, 3, 3), "extra": torch.zeros(1)}
    loaded = model_of(weights).load_into(network(), SPEC)
    new, unused = loaded.remarks.split("; ")
    assert new == "new weights for decoder.0.weight (4, 4, 3, 3), (4, 9, 3, 3) in the file"
    assert unused == "1 tensor of the file not used, e.g. extra"


def test_a_file_of_which_nothing_fits_is_refused_with_the_reason(tmp_path):
    new = network()
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    other = {"layer.weight": torch.zeros(2), "layer.num_batches_tracked": torch.tensor(1)}
    assert refusal(model_of(other).load_into, new, SPEC) == (
        f"init_from: none of the 2 tensors of {__file__} fits the network (e.g. layer.weight, here encoder.0.weight); "
        "is it another network's? architecture, encoder and decoder_channels must be those of the model"
    )
    alone = network(seed=1).encoder.state_dict()
    assert refusal(model_of(alone).load_into, new, SPEC).endswith(f"; an encoder alone is encoder_weights={__file__}")
    assert same(new.state_dict(), before)


def test_numbers_that_are_not_finite_are_refused_by_name():
    weights = network().state_dict() | {"decoder.0.bias": torch.tensor([1.0, 2.0, float("nan"), 3.0])}
    message = refusal(model_of(weights).load_into, network(), SPEC)
    assert message == f"init_from: {__file__} holds NaN or infinite values, e.g. in decoder.0.bias"


# Files


@pytest.fixture(scope="module")
def trained():
    """A real U-Net for two classes beside the background."""
    return random_segmenter(dataclasses.replace(make_spec(GREY_16BIT, 3), normalize="image"), seed=1)


def read(path, checkpoint_dir="checkpoints"):
    return read_initial_model(str(path), Path(checkpoint_dir))


NETWORK = {"architecture": "unet", "encoder": TINY_MODEL["encoder"], "decoder_attention": "none"}
NETWORK["decoder_channels"] = tuple(TINY_MODEL["decoder_channels"])


@pytest.mark.parametrize("name", ["runs/a", "runs/a/best.pt", "a"])
def test_a_run_is_named_by_its_folder_its_file_or_its_name(trained, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "runs/a/best.pt", trained)
    model = read(name, "runs")
    assert model.title == "runs/a (epoch 3, val IoU 0.5000)"
    assert same(model.weights, trained.network.state_dict())
    assert (model.spec, model.network) == (trained.spec, NETWORK)


def test_the_averaged_weights_of_a_state_are_taken(tmp_path):
    state = small_components(settings=make_settings(ema_decay=0.9)).state
    with torch.no_grad():
        for parameter in state.segmenter.parameters():
            parameter.add_(1.0)
    about = {"spec": state.segmenter.spec.to_dict(), "config": {"ema_decay": 0.9}, "decisions": {}, "split": {}}
    write_checkpoint(tmp_path / "last.pt", {**about, **state.state_dict()})
    model = read(tmp_path)
    assert model.title == str(tmp_path)
    assert same(model.weights, state.ema.segmenter.network.state_dict())


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_an_export_for_smp_is_read_with_its_card(trained, tmp_path, name):
    export_smp(trained, make_card(trained.spec), tmp_path / "exported")
    model = read(tmp_path / "exported" / name)
    assert same(model.weights, trained.network.state_dict())
    assert (model.title, model.spec, model.network) == (str(tmp_path / "exported"), trained.spec, NETWORK)


def test_a_model_that_smp_itself_saved_says_what_network_it_is(tmp_path):
    made = smp.MAnet(TINY_MODEL["encoder"], encoder_weights=None, decoder_channels=(16, 8, 8, 8, 8), classes=2)
    made.save_pretrained(tmp_path / "smp")
    model = read(tmp_path / "smp")
    assert (model.spec, model.network) == (None, {**NETWORK, "architecture": "manet"})
    made = smp.FPN(TINY_MODEL["encoder"], encoder_weights=None)
    made.save_pretrained(tmp_path / "fpn")
    assert read(tmp_path / "fpn").network == {**NETWORK, "architecture": "fpn", "decoder_channels": None}


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.safetensors"])
def test_a_plain_state_dict_is_read(trained, tmp_path, name):
    weights = {name: tensor.clone() for name, tensor in trained.network.state_dict().items()}
    save_file(weights, tmp_path / name) if name.endswith("s") else torch.save({"state_dict": weights}, tmp_path / name)
    model = read(tmp_path / name)
    assert same(model.weights, weights)
    assert (model.title, model.spec, model.network) == (str(tmp_path / name), None, {})
    loaded = model.load_into(build_network(trained.spec, None), trained.spec)
    assert loaded.is_complete


def write_bomb(path):
    torch.save({"a": torch.zeros(10)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)


MORE = "it holds more than tensors, which could run when it is loaded; save its state_dict, best as .safetensors)"


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path, canary: torch.save({"state_dict": Call(Path.touch, canary)}, path), MORE),
        (lambda path, canary: path.write_bytes(pickle.dumps(Call(Path.touch, canary), 2)), MORE),
        (lambda path, canary: path.write_bytes(b"PK\x03\x04 and nothing"), "File is not a zip file"),
        (lambda path, canary: path.write_bytes(b""), "EOFError"),
    ],
    ids=["in a zip", "a pickle", "no zip", "empty"],
)
def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path, write, reason):
    path, canary = tmp_path / "weights.pt", tmp_path / "canary"
    write(path, canary)
    message = refusal(read, path)
    assert message.startswith(f"init_from: {path} is no file of plain tensors ({reason}")
    assert not canary.exists()


def test_a_checkpoint_that_is_damaged_or_describes_no_model_is_refused(trained, tmp_path):
    path = save_model(tmp_path / "a/best.pt", trained)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    assert refusal(read, tmp_path / "damaged.pt").startswith(f"init_from: {tmp_path / 'damaged.pt'} is damaged: the ")
    write_bomb(tmp_path / "bomb.pt")
    assert refusal(read, tmp_path / "bomb.pt").endswith("or is cut off or damaged (it unpacks to more than it is)")
    save_model(path, trained, spec={**trained.spec.to_dict(), "encoder": "no_such_encoder"})
    assert refusal(read, path).startswith(f"init_from: {path} is not a model that can be used (")
    save_model(path, trained, spec={"image": 3})
    assert refusal(read, path).startswith(f"init_from: {path} is not a model that can be used (")


@pytest.mark.parametrize("card", ["[]", "{", '{"_model_class": "Unet"}', '{"_model_class": [], "encoder_name": 3}'])
def test_what_lies_beside_exported_weights_is_checked(trained, tmp_path, card):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(card)
    if card == "[]":  # of another program
        assert read(tmp_path).network == {}
    else:
        assert refusal(read, tmp_path).startswith(f"init_from: {tmp_path}/model.safetensors is not a model that can be")


# Settings


def settings_of(model, *words):
    return model.settings(load_config({"data_dir": "data/mine"}, words))


def test_the_network_follows_from_the_model_where_it_is_not_set():
    model = dataclasses.replace(model_of({}), network={**NETWORK, "architecture": "manet"})
    values = {name: value for name, (value, _) in settings_of(model).items()}
    assert values.pop("encoder_weights") is None
    assert values == {name: value for name, value in model.network.items() if name != "decoder_attention"}
    assert settings_of(model)["encoder"][1] == f"as {__file__} has it"
    words = ("architecture=manet", f"encoder={TINY_MODEL['encoder']}", "encoder_weights=null")
    assert settings_of(model, *words).keys() == {"decoder_channels"}


def test_settings_that_contradict_the_model_are_refused_in_one_message_that_names_both():
    model = dataclasses.replace(model_of({}), network={**NETWORK, "decoder_channels": None})
    assert settings_of(model, "decoder_channels=[256, 128, 64, 32, 16]")
    assert refusal(settings_of, model, "encoder=resnet18", "decoder_channels=[64, 64, 64, 64, 64]") == (
        f"init_from: of a run, encoder is {TINY_MODEL['encoder']}, and resnet18 in the config; decoder_channels is null, "
        "and [64, 64, 64, 64, 64] in the config; leave these settings out to take the model's, or name another model"
    )


def test_a_network_of_the_users_own_has_to_be_given_again():
    model = dataclasses.replace(model_of({}), network={"architecture": OWN})
    assert "train(model=..., init_from=...)" in refusal(settings_of, model)
    assert settings_of(model, "architecture=own").keys() == {"encoder_weights"}


def test_images_are_normalised_as_the_model_knows_them_where_they_are_of_its_kind():
    spec = dataclasses.replace(make_spec(GREY_16BIT), normalize="image")
    model, config = model_of({}, spec), load_config({})
    others = dataclasses.replace(GREY_16BIT, mean=(9.0,), std=(8.0,))
    found = {name: value for name, (value, _) in model.normalisation(config, others).items()}
    assert found == {"image_mean": (3000.0,), "image_std": (700.0,), "normalize": "image"}
    config = load_config({"image_mean": [5.0], "normalize": "dataset"})
    assert model.normalisation(config, others).keys() == {"image_std"}
    assert model.normalisation(load_config({}), RGB_8BIT) == {}
    assert model.normalisation(load_config({}), dataclasses.replace(others, depth="uint8")) == {}


# Before and after


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere", "there is no model in nowhere; need a run, a .pt, .pth or .safetensors file, or a folder with "),
        ("images", "there is no model in images; need a run, "),
        ("a/model.onnx", "a/model.onnx is an export for other programs; name its run"),
        ("x" * 300, "there is no model in xxx"),
    ],
)
def test_a_model_that_is_not_there_is_told_before_anything_else(name, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    monkeypatch.setattr("unet_trainer.training.session.Session.connect", lambda self: pytest.fail("imports torch"))
    for command in ((), ("check",), ("doctor",), ("bench",)):
        config = str(ROOT / "configs/demo.yaml")
        assert main([*command, config, f"init_from={name}", f"checkpoint_dir={tmp_path}"]) == 2
        assert f"Error: init_from: {problem}" in capsys.readouterr().err


def test_encoder_weights_beside_a_model_are_refused():
    with pytest.raises(UserError, match="encoder_weights: imagenet is set, and init_from: a has an encoder; leave one"):
        load_config({"init_from": "a", "encoder_weights": "imagenet"})
    for value in ("auto", None):
        load_config({"init_from": "a", "encoder_weights": value})


@pytest.mark.parametrize(("num_epochs", "expected"), [(500, 15.0), (8, 1.0), (2, 0.5)])
def test_the_learning_rate_of_a_trained_model_rises_for_an_epoch_at_least(num_epochs, expected):
    assert choose_warmup(num_epochs, is_trained=True)[0] == expected


def test_the_recipe_of_the_demo_for_random_weights_gives_way_to_one_for_a_trained_model():
    for words in ((), ("init_from=null",)):
        demo = script_config(words)
        assert (demo.learning_rate, demo.warmup_epochs, demo.ema_decay) == (0.004, 0.0, None)
    demo = script_config(("init_from=checkpoints/demo",))
    assert (demo.learning_rate, demo.warmup_epochs, demo.ema_decay, demo.num_epochs) == ("auto", "auto", "auto", 7)


@pytest.fixture
def source(small_network, tiny_config):
    """A short run of a small network."""
    return train(tiny_config, run_name="source")


def test_a_run_that_begins_with_a_model_goes_on_about_where_that_ended(tiny_config, capsys):
    """And so does the average of its weights, which does not forget a trained model in its first steps."""
    recipe = {"num_epochs": 8, "learning_rate": 0.02, "augmentation": "none", "image_size": 48, "batch_size": 2}
    sharp = {**tiny_config, **recipe, "warmup_epochs": "auto", "val_fraction": 0.25}
    first = train(sharp, run_name="first")
    assert first.history[-1]["val_iou"] > 0.6
    capsys.readouterr()
    options = {"init_from": str(first.run_dir), "ema_decay": 0.9}
    second = train(sharp, run_name="second", on_epoch=lambda row: True, **options)  # which ends it
    assert second.history[0]["val_iou"] >= first.history[-1]["val_iou"] - 0.02
    assert second.history[0]["epoch"] == 1
    said = capsys.readouterr().out
    assert "  warmup_epochs: 1.0  (large first steps would spoil a trained model)" in said
    assert second.init_from.startswith(f"142 of 142 tensors of {first.run_dir} (epoch {first.best_epoch}, val IoU ")
    assert f" M parameters, {second.init_from}\n" in said


def test_the_record_of_a_run_says_what_it_began_with_and_it_is_resumed_without_that(source, tiny_config):
    config = {**tiny_config, "init_from": str(source.run_dir), "ema_decay": 0.9}
    straight = train(config, run_name="straight")
    with pytest.raises(KeyboardInterrupt):
        train(config, run_name="broken", on_epoch=stop_after(1))
    shutil.rmtree(source.run_dir)
    broken = straight.run_dir.parent / "broken"
    resumed = train(tiny_config, resume=str(broken), ema_decay=0.9)
    assert weights_digest(broken) == weights_digest(straight.run_dir)
    summary = straight.init_from
    assert resumed.init_from == summary
    assert summary.startswith(f"16 of 16 tensors of {source.run_dir} (epoch {source.best_epoch}, val IoU 0.")
    for folder in (straight.run_dir, broken):
        assert f"init_from: {source.run_dir}  # {summary}\n" in (folder / "config.yaml").read_text()
        run = read_run_summary(folder)
        assert run.result["init_from"] == run.settings["init_from"].reason == run.model["init_from"] == summary
        assert f"The run began with {summary}." in render_report(run)
    assert main(["--resume", str(broken), "num_epochs=3"]) == 0
    with pytest.raises(CheckpointError, match=r"init_from: .*source in the checkpoint, a now"):
        train({**tiny_config, "init_from": "a"}, resume=str(broken), ema_decay=0.9, num_epochs=4)


def test_a_model_of_other_classes_and_channels_is_taken_as_far_as_it_fits(
    source, tiny_config, tiny_data, tmp_path, capsys
):
    """Half of the foreground is another class, and images are grey."""
    import cv2

    data = shutil.copytree(tiny_data, tmp_path / "grey")
    for path in [*(data / "images").iterdir(), *(data / "masks").iterdir()]:
        pixels = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        if path.parent.name == "masks":
            pixels //= 255
            pixels[32:] *= 2
        cv2.imwrite(str(path), pixels)
    capsys.readouterr()
    settings = {"data_dir": str(data), "class_names": ["background", "foreground", "other"], "num_epochs": 1}
    result = train(tiny_config, init_from=str(source.run_dir), **settings)
    first, last = (
        "encoder.0.weight is adapted from 3 to 1 channels",
        "new weights for the classes other in the last layer",
    )
    assert f"Note: init_from: {first}; {last}\n" in capsys.readouterr().out
    assert result.init_from.startswith("16 of 16 tensors")
    spec = SegmenterSpec.from_dict(read_run(result.run_dir, print)["spec"])
    assert spec.image.mean != RGB_8BIT.mean


def test_another_set_of_the_same_kind_keeps_the_normalisation_of_the_model(source, tiny_config, monkeypatch, capsys):
    content = read_initial_model(str(source.run_dir), Path())
    other = dataclasses.replace(content.spec.image, mean=(1.0, 2.0, 3.0), std=(9.0, 9.0, 9.0))
    model = dataclasses.replace(content, spec=dataclasses.replace(content.spec, image=other))
    monkeypatch.setattr("unet_trainer.training.setup.read_initial_model", lambda *_: model)
    capsys.readouterr()
    result = train(tiny_config, init_from=str(source.run_dir), num_epochs=1)
    assert "normalised with mean 1, 2, 3, std 9, 9, 9 (as " in capsys.readouterr().out
    spec = SegmenterSpec.from_dict(torch.load(result.run_dir / "best.pt", weights_only=True)["spec"])
    assert (spec.image.mean, spec.image.std) == ((1.0, 2.0, 3.0), (9.0, 9.0, 9.0))
    assert load_config(result.run_dir / "config.yaml").image_mean == (1.0, 2.0, 3.0)
