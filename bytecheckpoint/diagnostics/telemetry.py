"""Telemetry of a save, one record for each rank, read from the checkpoint's folder, and the phases over all ranks, to
find what made the save slow. An object holds a list with the records of a block of ranks, or the record of one rank, as
earlier versions wrote it. Objects and records that are not as docs/format.md describes are reported and left out: they
do not damage the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_VERSION = 1
_MAX_BYTES = 4 << 20
_MAX_SPANS = 10_000
_MAX_SECONDS = 1e9
"""Longest time in a save that is accepted."""
_MAX_TIME = 1e11
"""Latest time that is accepted, in seconds since 1970."""
_LOOKS_IN_FLIGHT = 16
_DAMAGED = "damaged"
_ORDER = ("wait", "plan", "stage", "write", "upload", "commit")
_START = "start"
"""The time before a rank called save, while the others waited for it."""
_MAX_PHASES = 16
_NUM_SLOWEST = 5


class PhaseSpan(msgspec.Struct, frozen=True):
    """One phase. Times are in seconds since the call."""

    phase: str
    start: float
    end: float


class RankRecord(msgspec.Struct, frozen=True):
    """Telemetry of one rank, as docs/format.md describes it."""

    version: int
    save_id: str
    rank: int
    host: str
    started_at: float
    """Seconds since 1970, by the clock of that machine."""
    spans: list[PhaseSpan]
    seconds: dict[str, float]
    num_bytes: int
    num_files: int

    @property
    def end(self) -> float:
        """End of its last phase, in seconds since its call."""
        return max((span.end for span in self.spans), default=0.0)


class Unreadable(NamedTuple):
    """A telemetry file that cannot be read, or one record in it that is not valid."""

    name: str
    """Path inside the checkpoint's folder."""
    kind: str
    """`damaged`, or the kind of the store's error."""
    what: str


class SaveRecords(NamedTuple):
    """Telemetry of all ranks that have left some."""

    ranks: Sequence[RankRecord]
    """Records in the order of the ranks."""
    unreadable: Sequence[Unreadable]


def read_save_records(store: Store, checkpoint_folder: str, save_id: str) -> SaveRecords:
    """Reads the telemetry of this save from the checkpoint's folder; no records if it has left none. Raises
    StorageError if the store cannot be listed.
    """
    folder = join_name(checkpoint_folder, layout.TELEMETRY_FOLDER)
    try:
        sizes = store.list(folder)
    except CheckpointNotFoundError:  # a file is in the place of the folder
        sizes = {}
    names = sorted(name for name, size in sizes.items() if size is not None and name.startswith(f"{save_id}-"))

    def read(name: str) -> Sequence[RankRecord | Unreadable]:
        return _read(store, checkpoint_folder, name, sizes[name] or 0, save_id=save_id)

    found = [item for items in map_jobs(read, names, num_threads=_LOOKS_IN_FLIGHT) for item in items]
    ranks = sorted((item for item in found if isinstance(item, RankRecord)), key=lambda record: record.rank)
    return SaveRecords(ranks, [item for item in found if isinstance(item, Unreadable)])


def _read(store: Store, folder: str, name: str, num_bytes: int, *, save_id: str) -> Sequence[RankRecord | Unreadable]:
    path_inside = join_name(layout.TELEMETRY_FOLDER, name)
    if not 0 < num_bytes <= _MAX_BYTES:
        return [Unreadable(path_inside, _DAMAGED, f"{num_bytes} bytes found, 1 to {_MAX_BYTES} expected")]
    content = bytearray(num_bytes)
    try:
        store.read_into(join_name(folder, path_inside), 0, memoryview(content))
    except CheckpointError as error:
        return [Unreadable(path_inside, error.kind, error.message)]
    try:
        records = msgspec.json.decode(content, type=RankRecord | list[RankRecord])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return [Unreadable(path_inside, _DAMAGED, str(error))]
    records = records if isinstance(records, list) else [records]
    if not records:
        return [Unreadable(path_inside, _DAMAGED, "it has no record of any rank")]
    faults = [_fault_of(record, save_id) for record in records]
    return [
        record if fault is None else Unreadable(path_inside, _DAMAGED, fault)
        for record, fault in zip(records, faults, strict=True)
    ]


def _fault_of(record: RankRecord, save_id: str) -> str | None:
    """Returns the reason why a record cannot be telemetry of this save, or None."""
    if record.version != _VERSION:
        return f"version {record.version} found, {_VERSION} expected"
    if record.save_id != save_id:
        return f"it is about save {record.save_id!r:.80}, not about {save_id!r}"
    if len(record.spans) > _MAX_SPANS or len(record.seconds) > _MAX_SPANS:
        return f"{len(record.spans)} spans of {len(record.seconds)} phases, at most {_MAX_SPANS} are accepted"
    counts = record.rank, record.num_bytes, record.num_files
    if min(counts) < 0 or max(counts) >= 1 << 62 or not 0 <= record.started_at <= _MAX_TIME:
        return f"one of the numbers {[*counts, record.started_at]} is out of range"
    odd_spans = [span for span in record.spans if not 0 <= span.start <= span.end <= _MAX_SECONDS]
    odd_seconds = [value for value in record.seconds.values() if not 0 <= value <= _MAX_SECONDS]
    if odd_spans or odd_seconds:
        return f"{[*odd_spans, *odd_seconds][0]!r:.200} cannot be a time in a save"
    return None


class Phase(NamedTuple):
    """One phase over all ranks, in seconds."""

    name: str
    min_s: float
    median_s: float
    max_s: float
    slowest_rank: int
    by_rank: Sequence[float]
    """Seconds of each rank, in the order of the records."""


class SlowRank(NamedTuple):
    """A rank that was among the last to end."""

    rank: int
    host: str
    end_s: float
    """Seconds since the first rank's call, by the clocks of their machines."""
    phase: str
    """The phase with the most time lost against the median rank, or the longest if none was lost; `start` for a late
    call.
    """
    phase_s: float
    median_s: float
    """Median of that phase."""


class RankRow(NamedTuple):
    """A rank, or neighbours that share a row of a chart."""

    label: str
    """`3`, or `0-15`."""
    host: str
    """Host of the rank that ended last."""
    seconds: Sequence[float]
    """In each phase, the longest time of a rank of the row."""
    slowest: RankRecord
    """The rank that ended last."""


def phases_of(ranks: Sequence[RankRecord]) -> list[Phase]:
    """Returns the phases that have spans, in the order of a save, then those with unknown names; at most 16."""
    names = dict.fromkeys(span.phase for record in ranks for span in record.spans)
    known = [name for name in _ORDER if name in names]
    others = [name for name in names if name not in _ORDER]
    return [_phase(name, ranks) for name in [*known, *others][:_MAX_PHASES]]


def _phase(name: str, ranks: Sequence[RankRecord]) -> Phase:
    seconds = [sum(span.end - span.start for span in record.spans if span.phase == name) for record in ranks]
    slowest = max(range(len(ranks)), key=lambda index: seconds[index])
    return Phase(name, min(seconds), median(seconds), max(seconds), ranks[slowest].rank, seconds)


def first_call(ranks: Sequence[RankRecord]) -> float:
    """Returns the time of the earliest call of any rank, in seconds since 1970. `ranks` is not empty."""
    return min(record.started_at for record in ranks)


def last_end(ranks: Sequence[RankRecord]) -> float:
    """Returns the last end of a phase of any rank, in seconds since the earliest call of any. `ranks` is not empty."""
    first = first_call(ranks)
    return max(record.started_at - first + record.end for record in ranks)


def slowest_ranks(ranks: Sequence[RankRecord], phases: Sequence[Phase]) -> list[SlowRank]:
    """Returns the 5 ranks that ended last, or all if there are fewer, the last one first, each with the phase in which
    it lost the most time against the median. `ranks` is not empty.
    """
    first = first_call(ranks)
    starts = [record.started_at - first for record in ranks]
    candidates = [(_START, starts), *((phase.name, phase.by_rank) for phase in phases)]
    medians = {name: median(seconds) for name, seconds in candidates}
    order = sorted(range(len(ranks)), key=lambda index: -(starts[index] + ranks[index].end))
    slow = []
    for index in order[:_NUM_SLOWEST]:
        name, seconds = max(candidates, key=lambda item: (item[1][index] - medians[item[0]], item[1][index]))
        record = ranks[index]
        end_s = starts[index] + record.end
        slow.append(SlowRank(record.rank, record.host, end_s, name, seconds[index], medians[name]))
    return slow


def rank_rows(ranks: Sequence[RankRecord], phases: Sequence[Phase], max_rows: int) -> list[RankRow]:
    """Divides the ranks among at most `max_rows` rows (0 for a row each). Neighbours share a row, which has the longest
    time of any of them in each phase, and the host of the one that ended last. `ranks` is not empty.
    """
    per_row = -(-len(ranks) // max_rows) if max_rows else 1
    rows = []
    for start in range(0, len(ranks), per_row):
        of_row = range(start, min(start + per_row, len(ranks)))
        slowest = max((ranks[index] for index in of_row), key=lambda record: record.started_at + record.end)
        first, last = ranks[of_row[0]].rank, ranks[of_row[-1]].rank
        seconds = [max(phase.by_rank[index] for index in of_row) for phase in phases]
        rows.append(RankRow(str(first) if len(of_row) == 1 else f"{first}-{last}", slowest.host, seconds, slowest))
    return rows
