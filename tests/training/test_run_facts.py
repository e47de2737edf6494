"""What a run's events say of the machine, the data and the model: plain values that JSON can hold."""

from __future__ import annotations

import io
import json

import torch

from helpers.steps import CPU_FACTS
from unet_trainer import __version__
from unet_trainer.config.facts import HardwareFacts
from unet_trainer.config.load import load_config
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_dataset
from unet_trainer.training.run_facts import data_facts, machine_facts, model_facts
from unet_trainer.training.settings import build_settings


def test_the_machine_has_device_cores_memory_and_versions():
    facts = machine_facts(CPU_FACTS)
    assert (facts["device"], facts["cores"], facts["free_device_memory_gib"]) == ("cpu", CPU_FACTS.num_cores, None)
    assert facts["memory_gib"] > 0
    assert facts["versions"]["unet_trainer"] == __version__
    assert facts["versions"]["torch"] == torch.__version__
    assert "segmentation-models-pytorch" in facts["versions"]
    json.dumps(facts, allow_nan=False)


def test_a_gpu_has_its_free_memory():
    gpu = HardwareFacts("cuda:0", "H200", has_bfloat16=True, has_float16=True, num_cores=8, free_memory=3 * 2**30)
    assert machine_facts(gpu)["free_device_memory_gib"] == 3.0


def test_data_and_model_are_those_of_the_run(tiny_config):
    console, config = Console(io.StringIO()), load_config(tiny_config)
    dataset = build_dataset(config, console, None)
    settings = build_settings(config, CPU_FACTS, dataset, console)
    facts = data_facts(settings.taken, dataset)
    assert (facts["num_train"], facts["num_val"], facts["num_test"]) == (10, 2, 0)
    assert (facts["sizes"], facts["model_size"], facts["fit"]) == ("64×64", [32, 32], "resize")
    assert [one["name"] for one in facts["classes"]] == ["background", "foreground"]
    assert sum(one["share"] for one in facts["classes"]) == 1.0
    model = model_facts(settings.taken, torch.nn.Linear(3, 2))
    assert (model["parameters"], model["ids"], model["classes"]) == (8, ["background", "foreground"], ["foreground"])
    json.dumps([facts, model], allow_nan=False)
