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


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("megatron.energon.savable_loader")
    found.WorkerState = WorkerState  # type: ignore[attr-defined]
    monkeypatch.setattr(WorkerState, "__module__", found.__name__)
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
