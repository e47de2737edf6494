"""When work is run, recorded and replayed; with graphs that only note what is done with them."""

from __future__ import annotations

import pytest

from unet_trainer.training import cuda_graphs
from unet_trainer.training.cuda_graphs import MAX_GRAPHS, CudaGraphCache, DirectLauncher


class Graph:
    def __init__(self, work):
        self.work = work

    def replay(self):
        done.append("replay")


@pytest.fixture(autouse=True)
def graphs_without_a_gpu(monkeypatch):
    done.clear()
    monkeypatch.setattr(cuda_graphs, "_record", lambda work, pool: (done.append("record"), pools.add(pool), Graph(work))[2])
    monkeypatch.setattr(cuda_graphs, "_synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (len(pools), 1))
    pools.clear()


done: list[str] = []
pools: set[tuple[int, int]] = set()


def work():
    done.append("work")


def test_work_that_comes_twice_in_a_row_is_recorded_and_replayed_from_then_on():
    cache = CudaGraphCache()
    for _ in range(4):
        cache.run("step", (1, 2), work)
    assert done == ["work", "record", "replay", "replay", "replay"]
    assert cache.num_replays == 3


def test_work_with_another_key_is_recorded_apart_and_the_first_graph_is_kept():
    cache = CudaGraphCache()
    for key in (1, 1, 2, 1, 2, 2):
        cache.run("step", key, work)
    assert done == ["work", "record", "replay", "work", "replay", "work", "record", "replay"]


def test_work_of_another_name_in_between_does_not_count():
    cache = CudaGraphCache()
    cache.run("count", 1, work)
    cache.run("step", 1, work)
    cache.run("count", 1, work)
    assert done == ["work", "work", "record", "replay"]


def test_the_least_recently_used_graph_is_dropped_and_all_share_their_memory():
    cache = CudaGraphCache()
    for key in range(MAX_GRAPHS):
        cache.run("step", key, work)
        cache.run("step", key, work)
    cache.run("step", 0, work)  # 1 is the least recently used from here on
    cache.run("step", "new", work)
    cache.run("step", "new", work)
    assert done[-3:] == ["synchronize", "record", "replay"]  # the device may still replay the one that is dropped
    done.clear()
    cache.run("step", 0, work)
    cache.run("step", 1, work)
    for key in range(2, MAX_GRAPHS):
        cache.run("step", key, work)
    assert done == ["replay", "work", *["replay"] * (MAX_GRAPHS - 2)]
    assert len(pools) == 1


def test_after_clearing_work_is_recorded_anew():
    cache = CudaGraphCache()
    cache.run("step", 1, work)
    cache.run("step", 1, work)
    cache.clear()
    assert done[-1] == "synchronize"
    done.clear()
    cache.run("step", 1, work)
    cache.run("step", 1, work)
    assert done == ["work", "record", "replay"]


def test_clearing_an_empty_cache_does_not_wait_for_the_device():
    CudaGraphCache().clear()
    assert done == []


def test_an_error_while_recording_goes_through_and_the_work_can_be_tried_again(monkeypatch):
    def fail(work, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    cache = CudaGraphCache()
    cache.run("step", 1, work)
    with monkeypatch.context() as broken:
        broken.setattr(cuda_graphs, "_record", fail)
        with pytest.raises(RuntimeError, match="capturing"):
            cache.run("step", 1, work)
    cache.run("step", 1, work)
    assert done == ["work", "record", "replay"]


def test_without_graphs_work_is_run_at_every_call():
    launcher = DirectLauncher()
    for _ in range(3):
        launcher.run("step", 1, work)
    launcher.clear()
    assert done == ["work"] * 3
    assert (launcher.uses_graphs, CudaGraphCache.uses_graphs) == (False, True)
