"""Names that don't exist, weights that can't be had or trusted, a frozen encoder, and the average of the weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import segmentation_models_pytorch as smp
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from unet_trainer.config.errors import ConfigError, UserError
from unet_trainer.config.load import load_config
from unet_trainer.model.ema import Ema
from unet_trainer.model.network import build_network, load_encoder_weights, set_training_mode

TINY = {"encoder": "tu-mobilenetv3_small_050", "decoder_channels": [16, 8, 8, 8, 8], "image_size": 32, "in_channels": 3}

GOOD = torch.tensor(True)


def build(seed=0, **settings):
    torch.manual_seed(seed)
    return build_network(load_config({**TINY, **settings}))


@pytest.fixture
def encoder_state():
    """Weights of a tiny encoder as another run left them."""
    return build(seed=1).encoder.state_dict()


def save(state, path):
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


def message_of(**settings):
    with pytest.raises(UserError) as raised:
        build(**settings)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_the_model_has_the_classes_and_decoder_channels_of_the_config():
    model = build(num_classes=3)
    assert model.segmentation_head[0].out_channels == 3
    assert [block.conv1[0].out_channels for block in model.decoder.blocks] == [16, 8, 8, 8, 8]
    assert model.eval()(torch.zeros(2, 3, 64, 32)).shape == (2, 3, 64, 32)


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("encoder", ["tu-mobilenetv3_small_050", "resnet18"])
def test_the_model_takes_as_many_channels_as_the_data_has(channels, encoder):
    model = build(encoder=encoder, in_channels=channels)
    assert model.eval()(torch.zeros(1, channels, 32, 64)).shape == (1, 1, 32, 64)


def test_without_decoder_channels_the_decoder_has_smps_own():
    model = build(decoder_channels=None)
    assert [block.conv1[0].out_channels for block in model.decoder.blocks] == [256, 128, 64, 32, 16]


@pytest.mark.parametrize("architecture", ["unetplusplus", "fpn", "linknet"])
def test_other_architectures_are_built_by_name(architecture):
    channels = TINY["decoder_channels"] if architecture == "unetplusplus" else None
    model = build(architecture=architecture, decoder_channels=channels)
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 1, 32, 32)


def test_the_same_seed_gives_the_same_weights():
    first, second = build(seed=3).state_dict(), build(seed=3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("resnet3", "resnet34"),
        ("ResNet34", "resnet34"),
        ("mobilenetv3_small_050", "tu-mobilenetv3_small_050"),
        ("tu-mobilenetv3_smal_050", "tu-mobilenetv3_small_050"),
        ("timm-regnetx_002", "tu-regnetx_002"),
    ],
)
def test_an_unknown_encoder_is_answered_with_the_nearest_name(wrong, meant):
    assert message_of(encoder=wrong) == f"encoder: got {wrong!r}; did you mean {meant}?"


@pytest.mark.parametrize("wrong", ["zzz", "timm-nonsense-of-mine"])
def test_an_encoder_like_no_other_is_answered_with_what_there_is(wrong):
    message = message_of(encoder=wrong)
    assert message.startswith(f"encoder: got {wrong!r}; there are resnet18, resnet34")
    assert message.endswith("and tu-NAME for any model of timm")


def test_an_unknown_architecture_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"architecture: got 'unett'; need one of unet, .*; did you mean unet\?"):
        load_config({**TINY, "architecture": "unett"})


def test_an_encoder_that_an_architecture_cannot_take_is_refused_with_the_reason():
    message = message_of(architecture="pan", encoder="densenet121", decoder_channels=None)
    assert message.startswith("architecture: pan does not go with encoder: densenet121; ")
    assert "dilated" in message


# Encoder weights from a file


def assert_same_encoder(encoder, state):
    loaded = encoder.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("name", ["encoder.pt", "encoder.pth", "encoder.safetensors"])
def test_encoder_weights_are_read_from_a_local_file(tmp_path, encoder_state, name):
    assert not torch.equal(build().encoder.state_dict()["model.conv_stem.weight"], encoder_state["model.conv_stem.weight"])
    model = build(encoder_weights=save(encoder_state, tmp_path / name))
    assert_same_encoder(model.encoder, encoder_state)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "encoder.", "module._orig_mod.encoder.", "_orig_mod.module.encoder."])
def test_prefixes_of_other_tools_are_taken_off(tmp_path, encoder_state, prefix):
    renamed = {prefix + name: tensor for name, tensor in encoder_state.items()}
    model = build(encoder_weights=save(renamed, tmp_path / "encoder.pt"))
    assert_same_encoder(model.encoder, encoder_state)


def test_a_file_with_timms_own_names_is_read(tmp_path, encoder_state):
    renamed = {name.removeprefix("model."): tensor for name, tensor in encoder_state.items()}
    assert renamed.keys() != encoder_state.keys()
    model = build(encoder_weights=save(renamed, tmp_path / "encoder.safetensors"))
    assert_same_encoder(model.encoder, encoder_state)


def test_an_encoder_of_smps_own_is_read(tmp_path):
    state = smp.encoders.get_encoder("resnet18").state_dict()
    model = build(encoder="resnet18", encoder_weights=save(state, tmp_path / "resnet.pth"))
    assert_same_encoder(model.encoder, state)


def test_the_encoder_is_taken_out_of_a_whole_model_and_the_decoder_is_left(tmp_path):
    whole = build(seed=1)
    path = save({"state_dict": whole.state_dict(), "epoch": 3}, tmp_path / "whole.pt")
    model = build(encoder_weights=path)
    assert_same_encoder(model.encoder, whole.encoder.state_dict())
    weight = "blocks.0.conv1.0.weight"
    assert not torch.equal(model.decoder.state_dict()[weight], whole.decoder.state_dict()[weight])


def test_tensors_beyond_the_encoder_such_as_a_classifier_are_left(tmp_path, encoder_state):
    path = save({**encoder_state, "classifier.weight": torch.zeros(1000, 8)}, tmp_path / "encoder.pt")
    assert_same_encoder(build(encoder_weights=path).encoder, encoder_state)


def test_batch_counters_may_be_missing_from_the_file(tmp_path, encoder_state):
    without = {name: tensor for name, tensor in encoder_state.items() if not name.endswith("num_batches_tracked")}
    build(encoder_weights=save(without, tmp_path / "encoder.pt"))


def test_a_file_that_lacks_tensors_is_refused_by_name(tmp_path, encoder_state):
    del encoder_state["model.bn1.weight"], encoder_state["model.bn1.bias"]
    path = save(encoder_state, tmp_path / "encoder.pt")
    assert message_of(encoder_weights=path) == (
        f"encoder_weights: {path} lacks 2 of the encoder's 240 tensors, e.g. model.bn1.weight; is it another encoder's?"
    )


def test_tensors_of_another_shape_are_refused_by_name(tmp_path, encoder_state):
    encoder_state["model.conv_stem.weight"] = torch.zeros(16, 4, 3, 3)
    path = save(encoder_state, tmp_path / "encoder.pt")
    assert message_of(encoder_weights=path) == (
        f"encoder_weights: {path} has 1 tensors of another shape, e.g. model.conv_stem.weight is (16, 4, 3, 3), need (16, 3, 3, 3)"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path, encoder_state, value):
    encoder_state["model.bn1.running_var"][3] = value
    path = save(encoder_state, tmp_path / "encoder.safetensors")
    assert (
        message_of(encoder_weights=path) == f"encoder_weights: {path} holds NaN or infinite values, e.g. in model.bn1.running_var"
    )


def test_a_refused_file_leaves_the_encoder_as_it_was(tmp_path, encoder_state):
    encoder = build().encoder
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    encoder_state["model.bn1.running_var"][3] = float("nan")
    with pytest.raises(UserError):
        load_encoder_weights(encoder, Path(save(encoder_state, tmp_path / "encoder.pt")))
    assert_same_encoder(encoder, before)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "nothing.pth"
    assert message_of(encoder_weights=str(path)) == f"encoder_weights: no file {path}"


def test_a_folder_named_like_a_weights_file_is_refused(tmp_path):
    (tmp_path / "folder.pt").mkdir()
    assert message_of(encoder_weights=str(tmp_path / "folder.pt")) == f"encoder_weights: no file {tmp_path / 'folder.pt'}"


@pytest.mark.parametrize("extension", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello, world\n", b"PK\x03\x04 and no more", b"\x80\x02u."])
def test_a_file_that_holds_no_weights_is_refused(tmp_path, extension, content):
    path = tmp_path / f"weights{extension}"
    path.write_bytes(content)
    assert message_of(encoder_weights=str(path)).startswith(f"encoder_weights: {path} is no file of plain tensors (")


def test_a_cut_off_file_is_refused(tmp_path, encoder_state):
    for extension in (".pt", ".safetensors"):
        path = tmp_path / f"weights{extension}"
        save(encoder_state, path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert message_of(encoder_weights=str(path)).startswith(f"encoder_weights: {path} is no file of plain tensors (")


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, {0: torch.zeros(2)}, [torch.zeros(2)], torch.zeros(2)])
def test_a_file_without_named_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "weights.pt")
    path = str(tmp_path / "weights.pt")
    assert message_of(encoder_weights=path) == f"encoder_weights: {path} holds no tensors by name"


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (Path(self.canary),)


@pytest.mark.parametrize("writer", [torch.save, lambda content, path: Path(path).write_bytes(pickle.dumps(content, protocol=2))])
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, encoder_state, writer):
    canary, path = tmp_path / "canary", tmp_path / "weights.pth"
    pickle.loads(pickle.dumps(Hostile(canary)))
    assert canary.exists()  # it works where pickles are trusted
    canary.unlink()
    writer({"state_dict": Hostile(canary)}, path)
    assert message_of(encoder_weights=str(path)).startswith(f"encoder_weights: {path} is no file of plain tensors (")
    assert not canary.exists()


# Encoder weights by name


def raises(error):
    def fail(*args, **kwargs):
        raise error

    return fail


WAYS_OUT = "use encoder_weights: null, or the path of a weights file (.pt, .pth, .safetensors) that you brought here"


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("offline"), ConnectionError("no route\nto host"), TimeoutError("too slow")]
)
def test_imagenet_weights_without_a_network_are_one_line_with_both_ways_out(monkeypatch, error):
    monkeypatch.setattr(smp.encoders, "hf_hub_download", raises(error))
    assert message_of(encoder="resnet18", encoder_weights="imagenet") == (
        f"encoder_weights: imagenet for resnet18 could not be downloaded ({type(error).__name__}); {WAYS_OUT}"
    )


def test_timm_encoders_without_a_network_say_the_same(monkeypatch):
    error = RuntimeError("timm wraps the cause")
    error.__cause__ = LocalEntryNotFoundError("offline")
    monkeypatch.setattr(smp, "create_model", raises(error))
    message = message_of(encoder_weights="imagenet")
    assert message.startswith("encoder_weights: imagenet for tu-mobilenetv3_small_050 could not be downloaded")
    assert message.endswith(WAYS_OUT)


def test_timm_encoders_get_their_weights_when_imagenet_is_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(smp, "create_model", lambda *args, **options: seen.append(args))
    build(encoder_weights="imagenet")
    build()
    assert seen == [("unet", TINY["encoder"], True), ("unet", TINY["encoder"], None)]


def test_nothing_is_downloaded_when_weights_are_null_or_a_file(monkeypatch, tmp_path, encoder_state):
    monkeypatch.setattr(smp.encoders, "hf_hub_download", raises(AssertionError("asked the network")))
    monkeypatch.setattr("timm.models._builder.load_pretrained", raises(AssertionError("asked the network")))
    build(encoder="resnet18", decoder_channels=None)
    build()
    build(encoder_weights=save(encoder_state, tmp_path / "encoder.pt"))


def test_a_misspelt_name_of_weights_is_refused_and_not_taken_for_imagenet(monkeypatch):
    assert message_of(encoder="resnet18", encoder_weights="imagnet") == (
        "encoder_weights: got 'imagnet' for encoder: resnet18; Wrong pretrained weights `imagnet` for encoder `resnet18`. "
        "Available options are: ['imagenet', 'ssl', 'swsl']"
    )
    monkeypatch.setattr(smp, "create_model", raises(AssertionError("asked for weights")))
    assert message_of(encoder_weights="imagnet") == (
        "encoder_weights: got 'imagnet'; need imagenet, null or a file (.pt, .pth, .safetensors)"
    )


def test_a_folder_called_imagenet_does_not_stand_in_the_way(monkeypatch, tmp_path):
    (tmp_path / "imagenet").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smp.encoders, "hf_hub_download", raises(ConnectionError()))
    assert "could not be downloaded" in message_of(encoder="resnet18", encoder_weights="imagenet")


def test_an_error_that_is_nobodys_fault_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(smp, "create_model", raises(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        build()


# Freezing


def train_once(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()


def changed(before, module):
    return [name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])]


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_a_frozen_encoder_has_no_gradients_and_keeps_weights_and_statistics():
    model = build()
    set_training_mode(model, encoder_frozen=True)
    encoder, decoder = snapshot(model.encoder), snapshot(model.decoder)
    train_once(model)
    assert all(parameter.grad is None for parameter in model.encoder.parameters())
    assert changed(encoder, model.encoder) == []
    assert "blocks.0.conv1.1.running_mean" in changed(decoder, model.decoder)
    assert "blocks.0.conv1.0.weight" in changed(decoder, model.decoder)


def test_an_encoder_that_is_no_longer_frozen_learns():
    model = build()
    set_training_mode(model, encoder_frozen=True)
    train_once(model)
    set_training_mode(model, encoder_frozen=False)
    before = snapshot(model.encoder)
    train_once(model)
    moved = changed(before, model.encoder)
    assert {"model.conv_stem.weight", "model.bn1.running_mean", "model.bn1.running_var"} <= set(moved)


def test_freezing_drops_gradients_that_were_there():
    model = build()
    set_training_mode(model, encoder_frozen=False)
    train_once(model)
    set_training_mode(model, encoder_frozen=True)
    assert all(parameter.grad is None for parameter in model.encoder.parameters())


# The average of the weights


def numbers(value, count):
    """A model of one weight, one float buffer and one counter."""
    model = torch.nn.BatchNorm1d(1)
    write(model, value, count)
    return model


@torch.no_grad()
def write(model, value, count):
    model.weight.fill_(value)
    model.running_mean.fill_(10 * value)
    model.num_batches_tracked.fill_(count)


def test_the_average_equals_the_hand_computed_one_over_three_updates():
    model = numbers(0.0, 0)
    ema = Ema(model, decay=0.999)
    expected = 0.0
    for update, value, kept in ((1, 1.0, 2 / 11), (2, 2.0, 3 / 12), (3, 3.0, 4 / 13)):  # kept = (1 + n) / (10 + n)
        write(model, value, count=update * 7)
        ema.update(GOOD)
        expected = kept * expected + (1 - kept) * value
        assert ema.model.weight.item() == pytest.approx(expected, rel=1e-6)
        assert ema.model.running_mean.item() == pytest.approx(10 * expected, rel=1e-6)  # buffers are averaged too
        assert ema.model.num_batches_tracked.item() == update * 7  # counters are copied
    assert expected == pytest.approx(2.601399, abs=1e-6)
    assert ema.num_updates == 3


def test_the_decay_rises_to_what_was_asked_for_and_no_further():
    model = numbers(0.0, 0)
    ema = Ema(model, decay=0.2)
    write(model, 1.0, 0)
    ema.update(GOOD)
    assert ema.model.weight.item() == pytest.approx(1 - 2 / 11)  # 2/11 is below 0.2
    write(model, 0.0, 0)
    for _ in range(2):
        before = ema.model.weight.item()
        ema.update(GOOD)
        assert ema.model.weight.item() == pytest.approx(0.2 * before)  # 3/12 and 4/13 would be above


def test_the_average_is_a_copy_in_evaluation_mode_without_gradients():
    model = build().train()
    ema = Ema(model, decay=0.9)
    assert model.training
    assert not ema.model.training
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    before = snapshot(ema.model)
    train_once(model)
    assert changed(before, ema.model) == []
    ema.update(GOOD)
    assert len(changed(before, ema.model)) > 100
    assert all(parameter.grad is None for parameter in ema.model.parameters())


def test_an_update_leaves_the_model_as_it_is():
    model = build().train()
    ema = Ema(model, decay=0.9)
    train_once(model)
    before = snapshot(model)
    ema.update(GOOD)
    assert changed(before, model) == []


def test_a_bad_step_leaves_the_average_its_buffers_and_its_count_as_they_are():
    model = build().train()
    ema = Ema(model, decay=0.9)
    train_once(model)
    ema.update(GOOD)
    before = snapshot(ema.model)
    train_once(model)
    ema.update(torch.tensor(False))
    assert changed(before, ema.model) == []
    assert ema.num_updates == 1
