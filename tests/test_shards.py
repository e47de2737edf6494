"""Training from shards: the same bits as from the files they were written from, from a disk and from a web server that fails now
and then, after kills, and with a run that moves from one to the other."""

import pytest

from helpers.runs import assert_same_run, train_until
from helpers.shard_server import serving
from train_unet import main, train
from unet_trainer.data import shard_store
from unet_trainer.inference.evaluation_data import find_validation_pairs


@pytest.fixture(scope="module")
def shards(tiny_data, tmp_path_factory):
    """In four shards or so."""
    folder = tmp_path_factory.mktemp("sharded")
    places = [f"data_dir={tiny_data}", f"checkpoint_dir={folder / 'runs'}", "--out", str(folder / "shards")]
    assert main(["shard", *places, "--shard-mb", "0.025"]) == 0
    assert len(list((folder / "shards").glob("*.tar"))) >= 3
    return folder / "shards"


@pytest.fixture
def server(shards):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    with serving(shards) as found:
        yield found


@pytest.fixture
def run(tiny_config, small_network, tmp_path):
    """Trains and gives the run's folder."""

    def run_named(name, **settings):
        return train({**tiny_config, "run_name": name, **settings}).run_dir

    return run_named


def test_shards_train_to_the_same_bits_as_files(run, shards):
    settings = {"fit": "crop", "num_workers": 2}
    assert_same_run(run("files", **settings), run("shards", data_dir=str(shards), **settings))


def test_shards_need_no_scan_since_their_index_has_the_facts(run, shards, monkeypatch):
    from unet_trainer.data import scan

    def refuse(*arguments):
        raise AssertionError("a file was scanned")

    monkeypatch.setattr(scan, "_scan_file", refuse)
    run("shards", data_dir=str(shards))


def test_a_web_server_that_fails_now_and_then_gives_the_same_bits(run, server, monkeypatch):
    monkeypatch.setattr(shard_store, "WAITS", (0.01,) * 6)
    server.faults.extend([503, "cut", "garbage", 0.3, "hang up", "whole", 500])
    assert_same_run(run("files", num_workers=2), run("remote", data_dir=server.url, num_workers=2))
    assert not server.faults


def test_a_shard_that_is_gone_or_changed_ends_a_run_with_its_name(run, server, shards, tmp_path, monkeypatch):
    from unet_trainer.config.errors import UserError

    monkeypatch.setattr(shard_store, "WAITS", (0.01,))
    server.always = 404
    with pytest.raises(UserError, match=r"http://127.0.0.1:\d+/data-00000\d.tar is not there"):
        run("gone", data_dir=server.url)
    server.always = "garbage"
    with pytest.raises(UserError, match=r"data-00000\d.tar/.*: its content differs from the index"):
        run("changed", data_dir=server.url)


def test_a_run_that_moves_from_files_to_shards_and_back_keeps_its_bits(run, shards, tiny_config):
    settings = {**tiny_config, "num_epochs": 4}
    straight = run("straight", num_epochs=4)
    moved = straight.parent / "moved"
    train_until(1, settings, run_name="moved")
    train_until(3, settings, resume=str(moved), data_dir=str(shards))
    train(settings, resume=str(moved))
    assert_same_run(straight, moved)


@pytest.mark.real_network
def test_runs_on_files_and_on_shards_of_them_are_compared_shown_and_their_tables_predicted(
    run, shards, tmp_path, capsys, monkeypatch
):
    files, stored = run("files", num_epochs=1), run("stored", data_dir=str(shards), num_epochs=1)
    predict = ["predict", str(stored), str(stored / "split.csv"), "--out", str(tmp_path / "out")]
    for words in (["evaluate", str(files), "--compare", str(stored)], ["report", str(stored)], predict):
        assert main(words) == 0, capsys.readouterr()
    assert len(list((tmp_path / "out").rglob("*.png"))) == 12


def test_validation_images_are_found_in_shards_wherever_they_lie_now(run, shards, monkeypatch):
    model = run("run") / "best.pt"
    of_files = find_validation_pairs(model)
    of_shards = find_validation_pairs(model, shards)
    assert [pair.name for pair in of_files] == [pair.name for pair in of_shards]
    assert all(".tar" in str(pair.image) for pair in of_shards)
