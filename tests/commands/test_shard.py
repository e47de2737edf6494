"""python train_unet.py shard: what it says, writes and refuses."""

import shutil

import pytest

from helpers.layouts import bowl, disc, photo, write
from train_unet import main
from unet_trainer.config.schema import Config
from unet_trainer.data.dataset_report import build_dataset_report
from unet_trainer.system.console import Console


@pytest.fixture
def shard(tiny_data, tmp_path):
    out = tmp_path / "shards"
    words = [f"data_dir={tiny_data}", f"checkpoint_dir={tmp_path / 'runs'}", "--out", str(out)]
    return lambda *others: main(["shard", *words, *others])


def test_it_writes_shards_and_says_how_to_train_from_them(shard, tmp_path, capsys):
    assert shard("--shard-mb", "0.05") == 0
    said = capsys.readouterr().out
    assert "12 pairs in " in said
    assert f"Train from them: python train_unet.py data_dir={tmp_path / 'shards'}" in said
    assert len(list((tmp_path / "shards").glob("data-00000?.tar"))) > 1


def test_data_that_cannot_be_trained_on_is_not_sharded(tiny_data, tmp_path, capsys):
    shutil.copytree(tiny_data, tmp_path / "bad")
    broken = next((tmp_path / "bad/images").iterdir())
    broken.write_bytes(broken.read_bytes()[:100])
    assert (
        main(
            [
                "shard",
                f"data_dir={tmp_path / 'bad'}",
                f"checkpoint_dir={tmp_path / 'runs'}",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert broken.name in said
    assert "python train_unet.py check" in said
    assert not (tmp_path / "out").exists()


def test_masks_that_are_drawn_from_other_files_go_in_as_images(tmp_path, capsys):
    """One file an object, which is merged under checkpoint_dir."""
    bowl(tmp_path / "data")
    words = [f"checkpoint_dir={tmp_path / 'runs'}"]
    assert main(["shard", f"data_dir={tmp_path / 'data'}", *words, "--out", str(tmp_path / "shards")]) == 0, (
        capsys.readouterr().err
    )
    reports = [
        build_dataset_report(Config(data_dir=str(tmp_path / name), checkpoint_dir=str(tmp_path / "runs")), Console())
        for name in ("data", "shards")
    ]
    assert [pair.name for pair in reports[0].pairs] == [pair.name for pair in reports[1].pairs]
    assert [mask.digest for mask in reports[0].masks] == [mask.digest for mask in reports[1].masks]


@pytest.mark.parametrize("table", ["name,r,g,b\nbackground,255,255,255\ncrack,0,0,0\n", ""], ids=["class file", "none"])
def test_masks_mean_in_shards_what_they_mean_in_files(tmp_path, table, capsys):
    """The class file says that white is background; the shards keep it."""
    data = tmp_path / "data"
    for index in range(6):
        write(data / f"images/{index}.png", photo(index))
        write(data / f"masks/{index}.png", 255 - disc(index))
    if table:
        (data / "class_dict.csv").write_text(table)
    words = [f"checkpoint_dir={tmp_path / 'runs'}"]
    assert main(["shard", f"data_dir={data}", *words, "--out", str(tmp_path / "shards")]) == 0, capsys.readouterr().err
    configs = [
        Config(data_dir=str(place), checkpoint_dir=str(tmp_path / "runs")) for place in (data, tmp_path / "shards")
    ]
    files, shards = (build_dataset_report(config, Console()) for config in configs)
    assert files.coding is not None
    assert (files.coding, files.decided(configs[0]).class_names) == (
        shards.coding,
        shards.decided(configs[1]).class_names,
    )
    assert ("crack" in str(shards.decided(configs[1]).class_names)) == bool(table)


def test_shards_are_not_written_among_the_images(tiny_data, tmp_path, capsys):
    shutil.copytree(tiny_data, tmp_path / "mine")
    words = [
        f"data_dir={tmp_path / 'mine'}",
        f"checkpoint_dir={tmp_path / 'runs'}",
        "--out",
        str(tmp_path / "mine/images"),
    ]
    assert main(["shard", *words]) == 2
    assert "holds images or masks of the data" in capsys.readouterr().err
    assert not list((tmp_path / "mine").rglob("*.tar"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the library leaves its file open
def test_the_webdataset_library_reads_them(shard, tiny_data, tmp_path):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    assert shard() == 0
    suffix = next((tiny_data / "images").iterdir()).suffix
    samples = list(webdataset.WebDataset(str(tmp_path / "shards/data-000000.tar"), shardshuffle=False))
    assert len(samples) == 12
    for sample in samples:
        assert sample[suffix[1:]] == (tiny_data / f"images/{sample['__key__']}{suffix}").read_bytes()
        assert sample["mask.png"] == (tiny_data / f"masks/{sample['__key__']}.png").read_bytes()
