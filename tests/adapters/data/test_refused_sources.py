"""A load finds out that a loader's sources are not those that were saved before it fills any weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from data.sample_sources import Lines, Records
from stream_loaders import StreamLoader
from torch.utils.data import DataLoader
from training import same_value

import bytecheckpoint as bcp
from bytecheckpoint.data import Packer, ShuffleBuffer, Streams
from bytecheckpoint.data.cursors import CursorLoader

LISTS = {name: list(range(20)) for name in ("a", "b")}


def rows(length: int) -> dict[str, Any]:
    return {name: Packer([[each, each] for each in samples], length) for name, samples in LISTS.items()}


def shuffled_rows(length: int) -> dict[str, Any]:
    return {name: ShuffleBuffer(each, 3) for name, each in rows(length).items()}


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows of another length": (rows(4), rows(8), r"source Packer\[4\]\(list\), .* from Packer\[8\]\(list\)"),
    "rows of another length below a buffer": (
        shuffled_rows(4),
        shuffled_rows(8),
        r"source ShuffleBuffer\[3, .*\]\(Packer\[4\]\(list\)\), .* from ShuffleBuffer\[3, .*\]\(Packer\[8\]\(list\)\)",
    ),
    "another kind of source": (
        {name: Records(samples) for name, samples in LISTS.items()},
        {name: ShuffleBuffer(Lines(samples), 3) for name, samples in LISTS.items()},
        r"source Records, .* from ShuffleBuffer\[3, seed 0\]\(Lines\)",
    ),
    "fewer samples": (LISTS, {**LISTS, "b": [1]}, "stands at sample 3 of epoch 0, and its source of type list has 1"),
    "another stream instead": (LISTS, {"a": LISTS["a"], "c": LISTS["b"]}, "stream 'b' are in the checkpoint"),
    "more streams": (LISTS, {**LISTS, "c": [1]}, "stream 'c' of the loader are not in the checkpoint"),
    "fewer streams": (LISTS, {"a": LISTS["a"]}, "stream 'b' are in the checkpoint"),
}


def state_of(sources: Mapping[str, Any], num_workers: int = 0) -> tuple[dict[str, Any], DataLoader[Any]]:
    streams = Streams(copy.deepcopy(dict(sources)), rank=0, size=1)
    loader = DataLoader(streams, batch_size=2, collate_fn=list, num_workers=num_workers)
    return {"model": torch.nn.Linear(3, 3), "data": bcp.DataLoaderState(loader, rank=0, size=1)}, loader


def take(loader: DataLoader[Any], num_batches: int) -> None:
    """Ends the workers here: where the collector of cycles ends them, torch waits for 5 s."""
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("case", CHANGED)
def test_sources_that_changed_are_refused_before_weights_are_filled(
    tmp_path: Path, case: str, num_workers: int
) -> None:
    before, after, message = CHANGED[case]
    saved, loader = state_of(before, num_workers)
    take(loader, 3)
    bcp.save(tmp_path, saved)
    state, other = state_of(after)
    next(iter(other))
    weight = state["model"].weight.detach().clone()
    position = state["data"].streams.stream_state("a")
    with pytest.raises(bcp.CheckpointMismatchError, match=message) as caught:
        bcp.load(tmp_path, state)
    assert caught.value.kind in {"conflict", "missing_key"}
    assert torch.equal(state["model"].weight, weight)
    assert same_value(state["data"].streams.stream_state("a"), position)


def test_sources_that_changed_are_refused_without_strict_too(tmp_path: Path) -> None:
    before, after, message = CHANGED["rows of another length"]
    saved, loader = state_of(before)
    next(iter(loader))
    bcp.save(tmp_path, saved)
    state, _ = state_of(after)
    weight = state["model"].weight.detach().clone()
    with pytest.raises(bcp.CheckpointMismatchError, match=message):
        bcp.load(tmp_path, state, strict=False)
    assert torch.equal(state["model"].weight, weight)
    bcp.load(tmp_path, state, exclude="data*")
    assert torch.equal(state["model"].weight, saved["model"].weight)


def test_positions_that_do_not_say_how_long_rows_are_load(tmp_path: Path) -> None:
    streams, again = (Streams(rows(4), rank=0, size=1) for _ in range(2))
    passed = [next(iter(streams)).tolist() for _ in range(3)]
    states = {each: streams.stream_state(each) for each in streams.stream_ids()}
    old = {each: {**state, "source": "Packer(list)"} for each, state in states.items()}
    bcp.save(tmp_path, {"data": bcp.DataLoaderState(StreamLoader(old, streams.shared_state()), rank=0, size=1)})
    bcp.load(tmp_path, {"data": bcp.DataLoaderState(again, rank=0, size=1)})
    rest = [row.tolist() for row in streams]
    assert len(passed) + len(rest) == 20
    assert [row.tolist() for row in again] == rest


def test_a_position_that_a_loader_cannot_go_on_at_is_refused_before_weights_are_filled(tmp_path: Path) -> None:
    taken: list[Any] = []

    def refuse(position: Any) -> None:
        raise bcp.CheckpointMismatchError(f"no multiple of 24: {position['count']}", kind="conflict")

    class Position(CursorLoader):
        def __init__(self, check: Any = lambda _: None) -> None:
            super().__init__(lambda: {"count": 60}, taken.append, key="count", check=check)

    saved = {"model": torch.nn.Linear(3, 3), "data": bcp.DataLoaderState(Position(), rank=0, size=1)}
    bcp.save(tmp_path, saved)
    state = {"model": torch.nn.Linear(3, 3), "data": bcp.DataLoaderState(Position(refuse), rank=0, size=1)}
    weight = state["model"].weight.detach().clone()
    with pytest.raises(bcp.CheckpointMismatchError, match=r"data: no multiple of 24: 60\. Nothing else was changed"):
        bcp.load(tmp_path, state)
    assert torch.equal(state["model"].weight, weight)
    bcp.load(tmp_path, {**state, "data": saved["data"]})
    assert taken == [{"count": 60}]
