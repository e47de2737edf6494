"""Imagenet weights that are found on this machine, fetched, or given up with a reason. No test needs a network."""

import json
import socket
import threading
from unittest import mock

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save

from helpers import hub
from helpers.project import TINY_MODEL
from helpers.steps import make_spec
from unet_trainer.config.errors import UserError
from unet_trainer.model import pretrained
from unet_trainer.model.network import build_network
from unet_trainer.model.pretrained import choose_encoder_weights, weight_files

TIMM, SMP = TINY_MODEL["encoder"], "mobilenet_v2"
ADVICE = "random weights; run once with a network, or give encoder_weights=FILE.safetensors"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty one, and a hub that cannot be reached."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.refusing_address())
    return hub.isolate(monkeypatch, tmp_path)


@pytest.fixture
def no_connection(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def trained_weights(encoder):
    """As another training left them, under the names that the hub's file has."""
    torch.manual_seed(1)
    if encoder.startswith("tu-"):
        return timm.create_model(encoder.removeprefix("tu-")).state_dict()
    state = smp.encoders.get_encoder(encoder, weights=None).state_dict()
    return {**state, "classifier.1.weight": torch.zeros(1), "classifier.1.bias": torch.zeros(1)}


def hub_contents(encoder, state):
    """{file: bytes} of all that is loaded for the encoder."""
    contents = {"config.json": json.dumps({}).encode(), "model.safetensors": save(state)}
    return {file: contents[file.names[0]] for file in weight_files(encoder, "imagenet")}


def fill_cache(cache, encoder, state):
    """Returns the path of the weights."""
    for file, content in hub_contents(encoder, state).items():
        blob = hub.write_cached(cache, file.repo_id, file.revision, file.names[0], content)
    return blob


def choose(encoder=TIMM, **limits):
    said = []
    return *choose_encoder_weights(encoder, said.append, **limits), said


def first_conv(encoder_weights, encoder):
    torch.manual_seed(0)
    network = build_network(make_spec(encoder=encoder), encoder_weights)
    return next(network.encoder.parameters())


@pytest.mark.parametrize("encoder", [TIMM, SMP])
def test_weights_in_the_cache_are_found_and_loaded_without_a_network(cache, encoder, no_connection):
    state = trained_weights(encoder)
    fill_cache(cache, encoder, state)
    assert choose(encoder) == ("imagenet", "on this machine", [])
    assert torch.equal(first_conv("imagenet", encoder), next(iter(state.values())))


@pytest.mark.parametrize("encoder", [TIMM, SMP])
def test_a_damaged_file_in_the_cache_is_refused_with_the_way_out(cache, encoder):
    blob = fill_cache(cache, encoder, trained_weights(encoder))
    blob.write_bytes(blob.read_bytes()[:1000])
    with pytest.raises(UserError) as raised:
        first_conv("imagenet", encoder)
    message = str(raised.value)
    assert message.startswith(f"encoder_weights: the file of imagenet for {encoder} in the download cache is damaged (")
    assert message.endswith("); delete it there, and it is downloaded again")


@pytest.mark.parametrize("encoder", ["resnext101_32x4d", "tu-mobilenetv3_large_075", f"{TIMM}.no_such_tag"])
def test_an_encoder_without_imagenet_weights_gets_random_ones(encoder):
    assert choose(encoder) == (None, f"the hub has no imagenet weights of {encoder}: random weights", [])


@pytest.mark.parametrize("encoder", [TIMM, SMP])
def test_weights_that_the_hub_has_are_fetched_once_and_loaded(monkeypatch, encoder):
    state = trained_weights(encoder)
    files = {f"{file.repo_id}/{file.names[0]}": content for file, content in hub_contents(encoder, state).items()}
    with hub.serving(files) as endpoint:
        hub.use(monkeypatch, endpoint)
        weights, reason, said = choose(encoder)
    assert (weights, reason.split(" in ")[0]) == ("imagenet", "fetched")
    assert said == [f"Fetching imagenet weights for {encoder} (once; at most 60 s)"]
    assert choose(encoder) == ("imagenet", "on this machine", [])
    assert torch.equal(first_conv("imagenet", encoder), next(iter(state.values())))


def test_a_host_that_cannot_be_reached_gives_random_weights(monkeypatch):
    """One that refuses, a name that is not resolved, and packets that are swallowed."""
    assert choose()[:2] == (None, f"no network (127.0.0.1: Connection refused): {ADVICE}")
    over = threading.Event()
    monkeypatch.setattr(pretrained, "CONNECT_LIMIT", 0.1)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    for name, silent in (
        ("getaddrinfo", lambda *_, **__: over.wait(60)),
        ("create_connection", mock.Mock(side_effect=TimeoutError)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(socket, name, silent)
            assert choose()[1] == f"no network (hub.invalid did not answer within 0.1 s): {ADVICE}"
    over.set()


def test_a_server_that_never_answers_gives_random_weights_at_the_time_limit(monkeypatch):
    with hub.silent_server() as endpoint:
        hub.use(monkeypatch, endpoint)
        assert choose(time_limit=1.0)[:2] == (None, f"not fetched within 1 s: {ADVICE}")
