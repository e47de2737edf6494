"""When work is recorded, replayed and done as it is; with graphs that only note what is done with them."""

from __future__ import annotations

import pytest

from unet_trainer.training import cuda_graphs as recorder
from unet_trainer.training.cuda_graphs import MAX_GRAPHS, CudaGraphCache


class Graph:
    def __init__(self, work):
        self.work = work

    def replay(self):
        done.append("replay")


@pytest.fixture(autouse=True)
def graphs_without_a_gpu(monkeypatch):
    done.clear()
    monkeypatch.setattr(recorder, "_record", lambda work, pool: (done.append("record"), pools.add(pool), Graph(work))[2])
    monkeypatch.setattr(recorder, "_wait_for_device", lambda: done.append("wait"))
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (len(pools), 1))
    pools.clear()


done: list[str] = []
pools: set[tuple[int, int]] = set()


def work():
    done.append("work")


def test_what_comes_twice_in_a_row_is_recorded_and_replayed_from_then_on():
    own = CudaGraphCache()
    for _ in range(4):
        own.run("move", (1, 2), work)
    assert done == ["work", "record", "replay", "replay", "replay"]
    assert own.num_replays == 3


def test_another_key_is_other_work_and_the_first_is_not_forgotten():
    own = CudaGraphCache()
    for key in (1, 1, 2, 1, 2, 2):
        own.run("move", key, work)
    assert done == ["work", "record", "replay", "work", "replay", "work", "record", "replay"]


def test_names_are_apart():
    own = CudaGraphCache()
    own.run("count", 1, work)
    own.run("move", 1, work)
    own.run("count", 1, work)
    assert done == ["work", "work", "record", "replay"]


def test_a_few_graphs_are_kept_those_that_were_used_last_and_they_share_their_memory():
    own = CudaGraphCache()
    for key in range(MAX_GRAPHS):
        own.run("move", key, work)
        own.run("move", key, work)
    own.run("move", 0, work)  # so that 1 is the one that was not used for longest
    own.run("move", "new", work)
    own.run("move", "new", work)
    assert len(own.graphs) == MAX_GRAPHS
    assert done[-3:] == ["wait", "record", "replay"]  # the device may have been at the one that had to go
    done.clear()
    own.run("move", 0, work)
    own.run("move", 1, work)
    assert done == ["replay", "work"]
    assert len(pools) == 1


def test_after_clearing_all_begins_anew():
    own = CudaGraphCache()
    own.run("move", 1, work)
    own.run("move", 1, work)
    own.clear()
    assert done[-1] == "wait"
    done.clear()
    own.run("move", 1, work)
    own.run("move", 1, work)
    assert done == ["work", "record", "replay"]
