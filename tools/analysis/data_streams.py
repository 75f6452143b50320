"""Lists the states of data loaders in a checkpoint: position of each stream, and totals by source. It reads only the
manifest, and needs torch to decode plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bytecheckpoint.manifest import Manifest

from ..render.number_format import shortened
from .summary import in_natural_order, plain_value

_MAX_SOURCE_TEXT = 60
_SHARED_COUNTS = ("samples", "consumed_train_samples", "global_next_index")
"""Keys of a position for all ranks that count samples of all epochs; Megatron's and Grain's are two of them."""


class StreamRow(NamedTuple):
    """A stream. Facts that its state does not have are None."""

    id: str
    source: str | None
    owner: int | None
    """Data-parallel rank that saved it."""
    epoch: int | None
    position: int | None
    """Samples that were taken in this epoch."""
    samples: int | None
    """Samples that were taken in all epochs."""


class SourceTotal(NamedTuple):
    """The streams of one source."""

    source: str | None
    num_streams: int
    epochs: tuple[int, int] | None
    """Least and greatest of those that are known; None without any. The same for `positions`."""
    positions: tuple[int, int] | None
    samples: int | None
    """Sum over its streams; None if one of them does not count."""


class DataRecord(NamedTuple):
    """The state of a data loader."""

    fqn: str
    loader: str
    """Name of its class."""
    elastic: str
    keyed_by: str
    """`stream`, or `rank` if each stream is the state of a data-parallel rank."""
    size: int
    """Number of data-parallel ranks that saved it."""
    samples: int | None
    """Samples that were taken in all epochs, over all streams, or by the one position for all; None if that position,
    or one of the streams, does not count."""
    sources: Sequence[SourceTotal]
    streams: Sequence[StreamRow]
    shared: Any
    """State that all ranks share, as JSON can hold it."""


class DataDifference(NamedTuple):
    """The progress of a data loader from one checkpoint to another."""

    fqn: str
    samples: tuple[int | None, int | None]
    num_samples_between: int | None
    """Samples counted in the second minus those in the first, over the streams that both have, or by the position for
    all ranks; None if both have no stream in common, or one of these does not count."""
    num_streams: int
    """Number of streams that both have."""
    num_only_in_a: int
    num_only_in_b: int


def data_records(manifest: Manifest) -> list[DataRecord]:
    """Returns a record of each complete state of a data loader, sorted by FQN. Raises the errors of decoding plain
    data.
    """
    from bytecheckpoint.adapters.data.stream_wire import (  # noqa: PLC0415
        StreamTable,
        decode_loader_state,
        is_loader_state,
        is_whole,
    )

    trees = {fqn: decode_loader_state(data) for fqn, data in manifest.objects.items() if is_loader_state(data)}
    complete = {
        fqn: tree
        for fqn, tree in trees.items()
        if is_whole(tree) and isinstance(tree["streams"], StreamTable) and tree["owners"].dtype.kind in "iu"
    }
    return [_record(fqn, complete[fqn]) for fqn in in_natural_order(complete)]


def _record(fqn: str, tree: Mapping[str, Any]) -> DataRecord:
    ids, owners = sorted(tree["streams"]), tree["owners"].tolist()
    owner_of = dict(zip(ids, owners, strict=False))
    plain, others = tree["streams"].decode(ids)
    states = {**plain, **others}
    rows = [_row(each, owner_of.get(each), states[each]) for each in in_natural_order(ids)]
    by_source: dict[str | None, list[StreamRow]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    shared = tree["shared"]
    return DataRecord(
        fqn=fqn,
        loader=tree["loader"],
        elastic=tree["elastic"],
        keyed_by=tree["keyed_by"],
        size=tree["size"],
        samples=_sum([row.samples for row in rows]) if rows else _shared_count(shared),
        sources=[_total(source, found) for source, found in by_source.items()],
        streams=rows,
        shared=plain_value(shared)[0],
    )


def _row(stream_id: str, owner: int | None, state: Any) -> StreamRow:
    source = state.get("source") if isinstance(state, dict) else None
    return StreamRow(
        stream_id,
        shortened(source, _MAX_SOURCE_TEXT) if isinstance(source, str) else None,
        owner,
        *(_count(state, key) for key in ("epoch", "position", "samples")),
    )


def _count(state: Any, key: str) -> int | None:
    value = state.get(key) if isinstance(state, dict) else None
    # Python refuses to print an integer of thousands of digits, such as a sum of made-up ones.
    return value if type(value) is int and abs(value) < 1 << 63 else None


def _shared_count(shared: Any) -> int | None:
    return next((count for key in _SHARED_COUNTS if (count := _count(shared, key)) is not None), None)


def _total(source: str | None, rows: Sequence[StreamRow]) -> SourceTotal:
    epochs, positions = (
        [value for row in rows if (value := getattr(row, name)) is not None] for name in ("epoch", "position")
    )
    return SourceTotal(source, len(rows), _range_of(epochs), _range_of(positions), _sum([row.samples for row in rows]))


def _range_of(values: Sequence[int]) -> tuple[int, int] | None:
    return (min(values), max(values)) if values else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def data_differences(a: Manifest, b: Manifest) -> list[DataDifference]:
    """Returns how far each data loader in both checkpoints has moved from `a` to `b`. Raises the errors of decoding
    plain data.
    """
    records = {record.fqn: record for record in data_records(a)}
    return [_difference(records[other.fqn], other) for other in data_records(b) if other.fqn in records]


def _difference(a: DataRecord, b: DataRecord) -> DataDifference:
    samples_a, samples_b = ({row.id: row.samples for row in record.streams} for record in (a, b))
    common = samples_a.keys() & samples_b.keys()
    has_streams = bool(samples_a or samples_b)
    sums = (
        [_sum([found[each] for each in common]) for found in (samples_a, samples_b)]
        if has_streams
        else [a.samples, b.samples]
    )
    is_counted = bool(common) or not has_streams
    between = sums[1] - sums[0] if is_counted and sums[0] is not None and sums[1] is not None else None
    num_only = [len(found.keys() - common) for found in (samples_a, samples_b)]
    return DataDifference(a.fqn, (a.samples, b.samples), between, len(common), *num_only)
