"""Makes the report of `bcp show --html`: one page that needs nothing but itself. It runs no script, asks no network,
and stays small at a million chunks, because pictures and tables show a bounded part and say what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bytecheckpoint.diagnostics.telemetry import SaveRecords, phases_of, slowest_ranks
from bytecheckpoint.manifest import TensorRecord

from ..analysis.module_tree import build_tree
from ..analysis.summary import ManifestSummary, PlainSummary, TensorEntry, file_rows
from ..analysis.tensor_stats import TensorStats
from ..arguments import Opened
from .chunk_map import ChunkMap, axes_text
from .html_elements import color, table, tag, text
from .number_format import count_text, shape_text, shortened
from .report_charts import bar, chunk_picture, treemap
from .save_charts import gantt, heat_map
from .show_text import FILE_TABLE, OBJECT_TABLE, TREE_TABLE, summary_rows, tables_of_totals, tensor_table, tree_rows
from .terminal import Column, TableShape
from .timeline_text import PHASE_TABLE, SLOW_TABLE

_MAX_ROWS = 400
_MAX_PICTURES = 12
_MAX_LEGEND = 20
_NUM_SLOWEST = 5

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.3em; overflow-wrap: anywhere; }
h2 { font-size: 1.1em; margin-top: 2em; border-bottom: 1px solid #8886; }
h3 { font-size: 1em; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .6em 0; }
th { text-align: left; font-weight: 600; opacity: .7; }
td, th { padding: .1em 1em .1em 0; vertical-align: top; }
td:first-child { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
summary h2 { display: inline-block; border: none; margin-top: 1em; cursor: pointer; }
.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; margin: .6em 0; }
svg text { font: 11px system-ui, sans-serif; fill: #111; pointer-events: none; }
svg text.small { font-size: 10px; fill: currentColor; }
.edge { stroke: #fff; stroke-width: 1; }
.tick { opacity: .25; }
.rest { opacity: .7; }
.chip { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.legend span { margin-right: 1.2em; overflow-wrap: anywhere; }
"""


class ReportContents(NamedTuple):
    """Contents of a report."""

    tensors: Sequence[TensorEntry]
    """Tensors that `--tensor` names, or all."""
    is_selected: bool
    """True if `--tensor` was given."""
    stats: Mapping[str, TensorStats] | None
    objects: Sequence[PlainSummary] | None
    records: SaveRecords


def html_report(opened: Opened, summary: ManifestSummary, shown: ReportContents) -> str:
    """Returns the page, which is well-formed XML too."""
    head = tag(
        "head",
        {},
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", {}, text(opened.path)),
        tag("style", {}, _STYLE),
    )
    body = tag("body", {}, tag("h1", {}, text(opened.path)), *_sections(opened, summary, shown))
    return f"<!DOCTYPE html>\n{tag('html', {'lang': 'en'}, head, body)}\n"


def _sections(opened: Opened, summary: ManifestSummary, shown: ReportContents) -> Iterator[str]:
    nodes = build_tree(summary.tensors)
    plain = [Column("", style=""), Column("")]
    yield table(plain, summary_rows(opened, summary))
    yield _section("Where the bytes are", treemap(nodes), bar(summary.dtypes))
    for shape, items in tables_of_totals(summary):
        yield _capped_table(shape, items)
    yield _section("How the save went", *_save(shown.records))
    pictures = list(_pictures(opened, summary, shown))
    if pictures:
        yield _section("Which file holds what", *pictures)
    rows = [row for node in nodes for row in tree_rows(node)]
    yield _section("Modules", _capped_table(TREE_TABLE, rows))
    largest = sorted(shown.tensors, key=lambda tensor: 0 if shown.is_selected else -tensor.num_bytes)
    yield _folded("Tensors", _capped_table(tensor_table(shown.stats), largest))
    files = sorted(file_rows(opened.manifest), key=lambda file: -file["num_bytes"])
    yield _folded("Files", _capped_table(FILE_TABLE, files))
    if shown.objects is not None:
        yield _folded("Plain values", _capped_table(OBJECT_TABLE, shown.objects))


def _section(title: str, *content: str) -> str:
    return tag("section", {}, tag("h2", {}, text(title)), *content)


def _folded(title: str, *content: str) -> str:
    """Returns a section that a click opens."""
    return tag("details", {}, tag("summary", {}, tag("h2", {}, text(title))), *content)


def _capped_table(shape: TableShape, items: Sequence[Any]) -> str:
    rest = _note(f"... and {len(items) - _MAX_ROWS:,} more") if len(items) > _MAX_ROWS else ""
    return table(shape.columns, map(shape.cells, items[:_MAX_ROWS])) + rest


def _note(what: str) -> str:
    return tag("p", {"class": "rest"}, text(what))


def _pictures(opened: Opened, summary: ManifestSummary, shown: ReportContents) -> Iterator[str]:
    """Yields pictures of the selected tensors, or of the largest one of each way in which tensors are cut."""
    stored = {tensor.stored_fqn: tensor for tensor in shown.tensors if summary.num_chunks_of(tensor) > 1}
    chosen = list(stored.values()) if shown.is_selected else _largest_by_count(summary, list(stored.values()))
    for tensor in chosen[:_MAX_PICTURES]:
        record = summary.record(tensor)
        picture = chunk_picture(opened.manifest, record)
        if picture is not None:
            drawing, drawn = picture
            yield tag("h3", {}, text(tensor.stored_fqn))
            yield _note(_picture_text(tensor, record, drawn))
            yield drawing
            yield _legend([opened.manifest.files[file].name for file in drawn.files])
    if len(chosen) > _MAX_PICTURES:
        yield _note(f"... and {len(chosen) - _MAX_PICTURES:,} more tensors in several chunks: --tensor shows them")


def _largest_by_count(summary: ManifestSummary, tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Returns the largest tensor of each number of chunks and of dimensions."""
    largest: dict[tuple[int, int], TensorEntry] = {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.num_bytes):
        largest.setdefault((summary.num_chunks_of(tensor), len(tensor.shape)), tensor)
    return list(largest.values())


def _picture_text(tensor: TensorEntry, record: TensorRecord, drawn: ChunkMap) -> str:
    holds = f"{count_text(record.num_chunks, 'chunk')} in {count_text(len(drawn.files), 'file')}"
    return f"{tensor.dtype} {shape_text(tensor.shape)}, {holds}, {axes_text(drawn.axes)}"


def _legend(names: Sequence[str]) -> str:
    chips = [
        tag("span", {}, tag("i", {"class": "chip", "style": f"background:{color(number)}"}, ""), text(name))
        for number, name in enumerate(names[:_MAX_LEGEND])
    ]
    rest = text(f"... and {len(names) - _MAX_LEGEND:,} more") if len(names) > _MAX_LEGEND else ""
    return tag("p", {"class": "legend"}, *chips, rest)


def _save(records: SaveRecords) -> Iterator[str]:
    if not records.ranks:
        yield _note("The checkpoint has no telemetry that can be decoded.")
        return
    phases = phases_of(records.ranks)
    slowest = slowest_ranks(records.ranks, phases, _NUM_SLOWEST)
    if records.unreadable:
        yield _note(f"{count_text(len(records.unreadable), 'rank')} left telemetry that cannot be understood.")
    if phases:
        yield gantt(records.ranks, phases)
        yield _legend([shortened(phase.name, 40) for phase in phases])
        yield heat_map(records.ranks, phases)
    yield _capped_table(PHASE_TABLE, phases)
    yield _capped_table(SLOW_TABLE, slowest)
