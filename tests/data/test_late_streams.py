"""A stream that joins a run late begins with the epoch that the others are in, and streams that lag behind catch up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from data.sample_sources import KINDS, Lines, passes, plain
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from bytecheckpoint.data import Streams

OLD = list(range(10))
LATE = list(range(100, 120))


def streams_of(sources: Mapping[str, Any], **options: Any) -> Streams:
    return Streams(sources, rank=0, size=1, with_ids=True, **options)


def reader_of(streams: Streams, num_workers: int | None) -> Any:
    """The streams themselves, or a loader of theirs."""
    return streams if num_workers is None else DataLoader(streams, batch_size=None, num_workers=num_workers)


def data_state(reader: Any) -> bcp.DataLoaderState:
    return bcp.DataLoaderState(reader, rank=0, size=1)


def epochs(state: bcp.DataLoaderState) -> dict[str, int]:
    return {each: state.streams.stream_state(each)["epoch"] for each in state.streams.stream_ids()}


def late_samples(kind: str, num_epochs: int) -> list[Any]:
    """Those of its first passes; a source that orders each epoch anew is told the epoch of the run."""
    source = KINDS[kind](LATE)
    if kind != "epoch order":
        return passes(source, num_epochs)
    return passes(source, 2 + num_epochs)[2 * len(LATE) :]


@pytest.mark.parametrize("num_workers", [None, 0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_joins_late_begins_with_the_epoch_of_the_others(
    tmp_path: Path, kind: str, num_workers: int | None
) -> None:
    first = streams_of({"a": Lines(OLD)})
    assert len(list(itertools.islice(itertools.chain(first, first, first), 25))) == 25
    bcp.save(tmp_path / "1", {"data": data_state(first)})

    def with_late() -> tuple[Any, bcp.DataLoaderState]:
        reader = reader_of(streams_of({"a": Lines(OLD), "b": KINDS[kind](LATE)}), num_workers)
        return reader, data_state(reader)

    reader, state = with_late()
    with pytest.raises(bcp.CheckpointMismatchError, match="stream 'b' of the loader are not in the checkpoint"):
        bcp.load(tmp_path / "1", {"data": state})
    report = bcp.load(tmp_path / "1", {"data": state}, strict=False)
    assert report.missing == ["data.streams"]
    assert epochs(state) == {"a": 2, "b": 2}
    bcp.save(tmp_path / "2", {"data": state})  # before anything of it was read
    reader, state = with_late()
    bcp.load(tmp_path / "2", {"data": state})
    found: dict[str, list[Any]] = {"a": [], "b": []}
    for number_of_passes in (1, 2):
        for stream_id, sample in reader:
            found[stream_id].append(plain(sample))
        assert epochs(state) == {"a": 2 + number_of_passes, "b": 2 + number_of_passes}
    assert found == {"a": OLD[5:] + OLD, "b": late_samples(kind, 2)}


def test_a_late_source_alone_on_its_rank_begins_with_the_epoch_of_all(tmp_path: Path) -> None:
    first = streams_of({"a": OLD})
    list(first), list(first)
    bcp.save(tmp_path, {"data": data_state(first)})
    second = Streams({"a": OLD, "b": LATE}, rank=1, size=2)
    state = bcp.DataLoaderState(second, rank=1, size=2)
    bcp.load(tmp_path, {"data": state}, strict=False)
    assert epochs(state) == {"b": 2}


@pytest.mark.parametrize("num_workers", [None, 0])
@pytest.mark.parametrize("endless", [False, True])
def test_an_empty_source_thousands_of_epochs_behind_is_passed_over(num_workers: int | None, *, endless: bool) -> None:
    streams = streams_of({"a": OLD, "b": []}, endless=endless)
    states = {each: streams.stream_state(each) for each in streams.stream_ids()}
    states["a"].update(epoch=3000, position=4, samples=30_004)
    reader = reader_of(streams, num_workers)
    state = data_state(reader)
    state.streams.load_streams(states, streams.shared_state())
    rest = [sample for _, sample in itertools.islice(reader, 6)]
    assert rest == OLD[4:]
