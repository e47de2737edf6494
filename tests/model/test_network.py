"""Networks by name, encoder weights from files and by name, and a frozen encoder."""

import pytest
import segmentation_models_pytorch as smp
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from helpers import hub
from helpers.steps import make_spec
from unet_trainer.config.errors import UserError
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.model.network import build_network, load_encoder_weights, set_training_mode


def build(seed=0, encoder_weights=None, channels=3, **spec):
    torch.manual_seed(seed)
    image = ImageSpec(channels, "uint8", (0.0,) * channels, (1.0,) * channels, 0.0, 255.0)
    return build_network(make_spec(image, **spec), encoder_weights)


def copy_of(state):
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture
def encoder():
    """A tiny encoder to load weights into."""
    return build().encoder


@pytest.fixture(scope="module")
def encoder_state():
    """Weights of a tiny encoder as another run left them. Read-only by agreement."""
    return build(seed=1).encoder.state_dict()


def refusal(call, *arguments, **options):
    with pytest.raises(UserError) as raised:
        call(*arguments, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def assert_same_encoder(encoder, state):
    loaded = encoder.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("architecture", ["unetplusplus", "fpn", "linknet"])
def test_other_architectures_are_built_by_name(architecture):
    channels = (16, 8, 8, 8, 8) if architecture == "unetplusplus" else None
    network = build(architecture=architecture, decoder_channels=channels)
    assert network.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 1, 32, 32)


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [((0.9, 0.1), [-2.1972]), ((0.5, 0.0, 0.5), [1.3040, -2.6080, 1.3040])],  # 0 counts as a hundredth
)
@pytest.mark.parametrize("architecture", ["unet", "fpn"])
def test_an_untrained_network_expects_each_class_with_its_share_of_the_pixels(architecture, shares, wanted):
    options = {"decoder_channels": None} if architecture == "fpn" else {}
    network = build(architecture=architecture, num_classes=len(wanted), class_shares=shares, **options)
    bias = network.segmentation_head[0].bias.detach()
    torch.testing.assert_close(bias, torch.tensor(wanted), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["encoder.pt", "encoder.pth", "encoder.safetensors"])
def test_encoder_weights_are_read_from_files_of_each_kind(tmp_path, encoder, encoder_state, name):
    save = save_file if name.endswith("s") else torch.save
    save(copy_of(encoder_state), tmp_path / name)
    load_encoder_weights(encoder, tmp_path / name)
    assert_same_encoder(encoder, encoder_state)


def test_the_encoder_is_taken_out_of_a_whole_network_and_the_decoder_is_left(tmp_path):
    whole = build(seed=1)
    torch.save({"state_dict": whole.state_dict(), "epoch": 3}, tmp_path / "whole.pt")
    network = build(encoder_weights=str(tmp_path / "whole.pt"))
    assert_same_encoder(network.encoder, whole.encoder.state_dict())
    weight = "blocks.0.conv1.0.weight"
    assert not torch.equal(network.decoder.state_dict()[weight], whole.decoder.state_dict()[weight])


@pytest.mark.parametrize("channels", [1, 5])
def test_weights_of_rgb_images_are_taken_for_grey_ones_and_for_many_channels(tmp_path, encoder_state, channels):
    """The first convolution gives a grey image what it would give the same one in RGB, and shares its weights among many channels."""
    torch.save(encoder_state, tmp_path / "encoder.pt")
    found = build(encoder_weights=str(tmp_path / "encoder.pt"), channels=channels).encoder.state_dict()[
        "model.conv_stem.weight"
    ]
    rgb = encoder_state["model.conv_stem.weight"]
    assert found.shape[1] == channels
    if channels == 1:
        torch.testing.assert_close(found[:, 0], rgb.sum(1))
    else:
        torch.testing.assert_close(found[:, 3], rgb[:, 0] * 3 / 5)


STEM, NORM = "model.conv_stem.weight", "model.bn1.weight"
OTHER_SHAPE = f"has 1 tensors of another shape, e.g. {STEM} is (16, 4, 3, 3), need (24, 3, 3, 3)"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (NORM, None, f"lacks 1 of the encoder's 80 tensors, e.g. {NORM}; is it another encoder's?"),
        (STEM, torch.zeros(16, 4, 3, 3), OTHER_SHAPE),
        (NORM, torch.full((24,), torch.nan), f"holds NaN or infinite values, e.g. in {NORM}"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_leave_the_encoder_as_it_was(
    tmp_path, encoder, encoder_state, name, value, problem
):
    before, path = copy_of(encoder.state_dict()), tmp_path / "encoder.pt"
    changed = encoder_state | {name: value}
    torch.save({key: tensor for key, tensor in changed.items() if tensor is not None}, path)
    assert refusal(load_encoder_weights, encoder, path) == f"encoder_weights: {path} {problem}"
    assert_same_encoder(encoder, before)


def test_a_failed_download_is_one_line_with_both_ways_out(monkeypatch, tmp_path):
    hub.isolate(monkeypatch, tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", hub.refusing_address())
    assert refusal(build, encoder="resnet18", encoder_weights="imagenet") == (
        "encoder_weights: imagenet for resnet18 could not be downloaded (no network (127.0.0.1: Connection refused)); "
        "use encoder_weights: null, or the path of a file (.pt, .pth, .safetensors)"
    )


def test_a_misspelt_name_of_weights_is_refused_and_not_taken_for_imagenet(monkeypatch):
    assert refusal(build, encoder="resnet18", encoder_weights="imagnet") == (
        "encoder_weights: got 'imagnet' for encoder: resnet18; Wrong pretrained weights `imagnet` for encoder `resnet18`. "
        "Available options are: ['imagenet', 'ssl', 'swsl']"
    )
    monkeypatch.setattr(smp, "create_model", lambda *_, **__: pytest.fail("asked for weights"))
    expected = "encoder_weights: got 'imagenet'; small_resnet has no trained ones: need null or a file"
    assert refusal(build, encoder="small_resnet", encoder_weights="imagenet").startswith(expected)
    assert refusal(build, encoder_weights="imagnet") == (
        "encoder_weights: got 'imagnet'; need imagenet, null or a file (.pt, .pth, .safetensors)"
    )


def test_a_frozen_encoder_has_no_gradients_and_keeps_weights_and_statistics():
    network = build()
    set_training_mode(network, encoder_frozen=True)
    encoder, decoder = (copy_of(part.state_dict()) for part in (network.encoder, network.decoder))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in network.encoder.parameters())
    assert_same_encoder(network.encoder, encoder)
    for name in ("blocks.0.conv1.1.running_mean", "blocks.0.conv1.0.weight"):
        assert not torch.equal(network.decoder.state_dict()[name], decoder[name])
