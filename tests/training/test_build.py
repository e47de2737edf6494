"""Config → dataset, loaders, model and steps."""

import dataclasses
from unittest import mock

import pytest
import torch

from helpers.steps import CPU, CPU_FACTS, make_settings, make_spec, small_components
from unet_trainer.config.errors import TrainingFailed, UserError
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.launch import Launch
from unet_trainer.training.build import build_components, build_dataset, build_loaders
from unet_trainer.training.memory import fit_into_memory
from unet_trainer.training.parallel import Job
from unet_trainer.training.settings import build_settings


def test_a_dataset_that_cannot_be_trained_on_is_answered_with_the_command_that_shows_all_of_it(
    config, console, tmp_path
):
    (tmp_path / "an empty folder").mkdir()
    with pytest.raises(DataError) as caught:
        build_dataset(dataclasses.replace(config, data_dir=str(tmp_path / "an empty folder")), console, None)
    last = str(caught.value).splitlines()[-1]
    assert last == f"To see all of it: python train_unet.py check data_dir='{tmp_path / 'an empty folder'}'"


def test_a_run_whose_images_have_moved_asks_where_they_are(config, console, tmp_path):
    (tmp_path / "split.csv").write_text("image,mask,split\nimages/gone.png,masks/gone.png,train\n")
    with pytest.raises(
        DataError, match=r"put them back, say where they are now \(data_dir=FOLDER\), or start a new run\n"
    ):
        build_dataset(config, console, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 11}, "11 is more than the 10 training images; need at most 10"),
        (
            {"repeats": 0.25},
            r"4 is .* 2 training images of an epoch \(repeats: 0.25\); need at most 2, or larger repeats",
        ),
        ({"repeats": 0.05}, r"4 is more than the 0 .*0.05\); need larger repeats"),
    ],
)
def test_a_batch_that_is_larger_than_an_epoch_is_refused(changes, message, config, console):
    dataset = build_dataset(config, console, None)
    settings = build_settings(dataclasses.replace(config, **changes), CPU_FACTS, dataset, console)
    with pytest.raises(UserError, match=f"batch_size: {message}"):
        build_loaders(settings.taken, dataset, CPU, console)


def test_training_is_shuffled_and_augmented_and_validation_is_neither(config, console):
    dataset = build_dataset(config, console, None)
    loaders = build_loaders(build_settings(config, CPU_FACTS, dataset, console).taken, dataset, CPU, console)
    assert (len(loaders.train), len(loaders.val), loaders.pool) == (2, 1, None)
    assert not torch.equal(loaders.train.read(0, 0).images, loaders.train.read(1, 0).images)
    assert torch.equal(loaders.val.read(0, 0).images, loaders.val.read(1, 0).images)
    batch = loaders.val.read(0, 0)
    assert (batch.num_images, batch.images.shape) == (2, (4, 32, 32, 3))
    assert (batch.masks[2:] == 255).all()  # padding


def test_an_attempt_that_never_fits_ends_with_what_to_try(console):
    settings = make_settings(batch_size=2, on_oom="shrink")
    components = small_components()
    with pytest.raises(TrainingFailed, match=r"a smaller encoder, .*; nothing was begun$"):
        fit_into_memory(mock.Mock(side_effect=MemoryError), settings, components, console, "nothing was begun")
    assert settings.taken.batch_parts == 2


def test_synchronised_batch_norm_is_for_gpus_and_for_several_processes(console, small_network):
    parts = make_settings(sync_batchnorm=True).taken, make_spec(), CPU, 4, console
    assert build_components(*parts, processes=Job(Launch(is_torchrun=True)))
    with pytest.raises(UserError, match="sync_batchnorm: torch has it for GPUs only, and the device is cpu"):
        build_components(*parts, processes=Job(Launch(world_size=2, is_torchrun=True)))
