"""The loader of Energon, by a stand-in for its package: states that the installed version cannot take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bytecheckpoint.data.energon import EnergonLoader, from_tree, to_tree
from bytecheckpoint.errors import CheckpointMismatchError


@dataclass
class WorkerState:
    """A record as Energon has them."""

    offset: int


@dataclass
class SavableDataLoaderState:
    """The state of all workers of a rank, as Energon has it."""

    worker_states: list[WorkerState]
    next_worker_id: int
    micro_batch_size: int | None


class Loader:
    """A loader without workers of which no sample is read."""

    num_workers = 0
    worker_config = SimpleNamespace(rank=0, world_size=1)
    _next_worker_id, _global_sample_idx, _worker_sample_counters = 0, 0, (0,)

    def __init__(self) -> None:
        self._state = SavableDataLoaderState([WorkerState(0)], 0, None)

    def save_state_rank(self) -> SavableDataLoaderState:
        return self._state

    def restore_state_rank(self, state: SavableDataLoaderState) -> None:
        self._state = state


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("megatron.energon.savable_loader")
    for record in (WorkerState, SavableDataLoaderState):
        setattr(found, record.__name__, record)
        monkeypatch.setattr(record, "__module__", found.__name__)
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


def test_a_record_goes_into_a_tree_and_back(module: ModuleType) -> None:
    state = {"workers": [WorkerState(3), None]}
    assert from_tree(to_tree(state)) == state


def test_a_record_with_other_fields_is_refused(module: ModuleType) -> None:
    tree = to_tree(WorkerState(3))
    tree["fields"]["of_another_version"] = 1
    with pytest.raises(CheckpointMismatchError, match=r"'savable_loader.WorkerState', .* with other fields"):
        from_tree(tree)


@pytest.mark.parametrize("shared", [{"kind": "streams"}, None])
def test_a_state_of_another_kind_of_loader_is_refused(shared: Any) -> None:
    loader = EnergonLoader(SimpleNamespace(num_workers=1))
    with pytest.raises(CheckpointMismatchError, match="is not that of a loader of Energon"):
        loader.check_streams({}, shared)


def test_the_state_after_a_load_is_the_loaded_one_also_before_the_first_sample(module: ModuleType) -> None:
    """The state from before the load was saved, if it had been asked for: training began anew from it."""
    loader = EnergonLoader(Loader())
    shared = loader.shared_state()
    loaded = {"worker": to_tree(WorkerState(7))}
    loader.load_streams({"worker_0": loaded}, shared)
    assert loader.stream_state("worker_0") == loaded
