"""Makes the report of `bcp show --html`: one self-contained page. It stays small at a million chunks, because
pictures and tables show a bounded part and say what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from bytecheckpoint.diagnostics.telemetry import SaveRecords, phases_of, slowest_ranks
from bytecheckpoint.manifest import TensorRecord

from ...analysis.module_tree import build_tree
from ...analysis.summary import ManifestSummary, PlainSummary, TensorEntry, file_rows
from ...analysis.tensor_stats import Histogram, TensorStats
from ...arguments import Opened
from ..chunk_map import ChunkMap, axes_text
from ..number_format import count_text, shape_text, shortened, time_text
from ..show_text import FILE_TABLE, OBJECT_TABLE, TREE_TABLE, summary_rows, tables_of_totals, tensor_table, tree_rows
from ..terminal import Column
from ..timeline_text import PHASE_TABLE, SLOW_TABLE
from .elements import anchor_of, table, tag, text
from .histogram_chart import histogram_picture, histogram_text
from .layout_charts import bar, chunk_picture, treemap
from .page import folded, legend, listing, note, note_of_rest, section, whole_page
from .save_charts import gantt, heat_map

_MAX_ROWS = 400
_MAX_TENSORS = 2000
_MAX_PICTURES = 12


class ReportContents(NamedTuple):
    """Contents of a report."""

    tensors: Sequence[TensorEntry]
    """Tensors that `--tensor` names, or all."""
    is_selected: bool
    """True if `--tensor` was given."""
    stats: Mapping[str, TensorStats] | None
    objects: Sequence[PlainSummary] | None
    records: SaveRecords
    histograms: Mapping[str, Histogram]
    """Values of tensors, by stored FQN; empty if none were read."""


def checkpoint_page(opened: Opened, summary: ManifestSummary, shown: ReportContents) -> str:
    info = opened.info
    step = "" if info.step is None else f"step {info.step}, "
    saved = f"saved {time_text(info.created_at)}" if info.created_at else "of unknown time"
    made = f"{step}{saved}; this page was made {time_text(datetime.now(UTC))}"
    heading = (tag("h1", {}, text(opened.path)), note(made))
    return whole_page(f"{opened.path}, {saved}", *heading, *_sections(opened, summary, shown))


def _sections(opened: Opened, summary: ManifestSummary, shown: ReportContents) -> Iterator[str]:
    nodes = build_tree(summary.tensors)
    plain = [Column("", style=""), Column("")]
    yield table(plain, summary_rows(opened, summary))
    yield section("Where the bytes are", treemap(nodes), bar(summary.dtypes))
    for shape, items in tables_of_totals(summary):
        yield listing(shape, items, limit=_MAX_ROWS)
    yield section("How the save went", *_save(shown.records))
    pictures = list(_pictures(opened, summary, shown))
    if pictures:
        yield section("Which file holds what", *pictures)
    if shown.histograms:
        yield section("Values", *_histograms(shown))
    rows = [row for node in nodes for row in tree_rows(node)]
    yield section("Modules", _tree(rows))
    largest = sorted(shown.tensors, key=lambda tensor: 0 if shown.is_selected else -tensor.num_bytes)
    anchors = [anchor_of(tensor.fqn) for tensor in largest[:_MAX_TENSORS]]
    yield folded("Tensors", listing(tensor_table(shown.stats), largest, limit=_MAX_TENSORS, anchors=anchors))
    files = sorted(file_rows(opened.manifest), key=lambda file: -file["num_bytes"])
    yield folded("Files", listing(FILE_TABLE, files, limit=_MAX_ROWS))
    if shown.objects is not None:
        yield folded("Plain values", listing(OBJECT_TABLE, shown.objects, limit=_MAX_ROWS))


def _pictures(opened: Opened, summary: ManifestSummary, shown: ReportContents) -> Iterator[str]:
    """Yields pictures of at most 12 tensors of several chunks: the selected ones, or else those that
    `_largest_by_count` returns.
    """
    stored = {tensor.stored_fqn: tensor for tensor in shown.tensors if summary.num_chunks_of(tensor) > 1}
    chosen = list(stored.values()) if shown.is_selected else _largest_by_count(summary, list(stored.values()))
    for tensor in chosen[:_MAX_PICTURES]:
        record = summary.record(tensor)
        picture = chunk_picture(opened.manifest, record)
        if picture is not None:
            drawing, drawn = picture
            yield _heading(tensor.stored_fqn)
            yield note(_picture_text(tensor, record, drawn))
            yield drawing
            yield legend([opened.manifest.files[file].name for file in drawn.files])
    if len(chosen) > _MAX_PICTURES:
        yield note_of_rest(len(chosen), _MAX_PICTURES, " tensors in several chunks: --tensor shows them")


def _heading(fqn: str) -> str:
    """Returns the name of a tensor, with a link to its row."""
    return tag("h3", {}, tag("a", {"href": f"#{anchor_of(fqn)}"}, text(fqn)))


def _tree(rows: Sequence[Sequence[str]]) -> str:
    """Returns the tree of modules as a table that cannot be sorted, of at most 400 rows."""
    return table(TREE_TABLE.columns, rows[:_MAX_ROWS]) + note_of_rest(len(rows), _MAX_ROWS)


def _histograms(shown: ReportContents) -> Iterator[str]:
    for fqn, histogram in shown.histograms.items():
        yield _heading(fqn)
        yield note(histogram_text(histogram))
        yield histogram_picture(histogram)


def _largest_by_count(summary: ManifestSummary, tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Returns the largest tensor of each number of chunks and number of dimensions, the largest of all first."""
    largest: dict[tuple[int, int], TensorEntry] = {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.num_bytes):
        largest.setdefault((summary.num_chunks_of(tensor), len(tensor.shape)), tensor)
    return list(largest.values())


def _picture_text(tensor: TensorEntry, record: TensorRecord, drawn: ChunkMap) -> str:
    holds = f"{count_text(record.num_chunks, 'chunk')} in {count_text(len(drawn.files), 'file')}"
    return f"{tensor.dtype} {shape_text(tensor.shape)}, {holds}, {axes_text(drawn.axes)}"


def _save(records: SaveRecords) -> Iterator[str]:
    if not records.ranks:
        yield note("The checkpoint has no telemetry that can be decoded.")
        return
    phases = phases_of(records.ranks)
    slowest = slowest_ranks(records.ranks, phases)
    if records.unreadable:
        num_files = len({item.name for item in records.unreadable})
        yield note(f"{count_text(num_files, 'telemetry file')} could not be read whole: ranks are missing here.")
    if phases:
        yield gantt(records.ranks, phases)
        yield legend([shortened(phase.name, 40) for phase in phases])
        yield heat_map(records.ranks, phases)
    yield listing(PHASE_TABLE, phases, limit=_MAX_ROWS)
    yield listing(SLOW_TABLE, slowest, limit=_MAX_ROWS)
