"""Prints the output of `bcp show`: each part as lines and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bytecheckpoint.errors import and_more, rest_text
from bytecheckpoint.manifest import Manifest, TensorRecord
from bytecheckpoint.region import describe

from ..analysis.module_tree import ModuleNode
from ..analysis.save_layout import compression_of, first_chunks, writers_of
from ..analysis.summary import ManifestSummary, TensorEntry
from ..arguments import Opened
from .chunk_map import MAX_COLUMNS, MAX_ROWS, NUM_LETTERS, axes_text, letter_of, lines_of, map_chunks
from .number_format import age_text, count_text, number_text, shape_text, short_count, shortened, size_text, time_text
from .terminal import LAST_DROP, NAME_STYLE, Column, Screen, TableShape

if TYPE_CHECKING:
    from ..analysis.tensor_stats import TensorStats

_MAX_VALUE_TEXT = 100
_MAX_SUMMARY_ROWS = 20
_STATS_DROP = {"min": 0, "max": 0, "mean": 6, "std": 4, "NaN": 0, "Inf": 5, "zeros": 3}
"""Statistics, with the order in which they leave a narrow window, as `Column.drop`: 0 stays."""
_STATS_COLUMNS = [Column(name, is_right=True, drop=drop) for name, drop in _STATS_DROP.items()]
TREE_TABLE = TableShape(
    [
        Column("module", style=NAME_STYLE),
        Column("tensors", is_right=True, drop=1),
        Column("dtype", is_whole=True, drop=3),
        Column("shape", is_whole=True, drop=4),
        Column("elements", is_right=True, drop=2),
        Column("size", is_right=True),
    ],
    list,
)
"""Table of the rows that `tree_rows` makes."""
FILE_TABLE = TableShape(
    [
        Column("file", style=NAME_STYLE),
        Column("size", is_right=True),
        Column("chunks", is_right=True, drop=2),
        Column("checksums", is_right=True, drop=1),
    ],
    lambda file: [file["name"], size_text(file["num_bytes"]), f"{file['num_chunks']:,}", f"{file['num_extents']:,}"],
)
OBJECT_TABLE = TableShape(
    [
        Column("object", style=NAME_STYLE),
        Column("rank", is_right=True),
        Column("type", style="dim", drop=1),
        Column("value"),
    ],
    lambda plain: [
        plain.fqn,
        "" if plain.rank is None else str(plain.rank),
        plain.type,
        shortened(plain.text, _MAX_VALUE_TEXT),
    ],
)


def print_summary(screen: Screen, opened: Opened, summary: ManifestSummary) -> None:
    screen.line(opened.path, style="bold")
    screen.fields(summary_rows(opened, summary))
    for table, items in tables_of_totals(summary):
        screen.section(table, items, limit=_MAX_SUMMARY_ROWS, rest=": --json has all")


def summary_rows(opened: Opened, summary: ManifestSummary) -> list[tuple[str, str]]:
    """Returns what is known of a checkpoint, as names and values."""
    manifest = opened.manifest
    info = opened.info
    age = age_text(info.created_at, datetime.now(UTC))
    saved = f"{time_text(info.created_at)} ({age})" if info.created_at else ""
    by = f" by {count_text(info.world_size, 'rank')}" if info.world_size is not None else ""
    tied = f", {count_text(len(manifest.aliases), 'tied name')}" if manifest.aliases else ""
    metadata = list(manifest.metadata.items())
    programs = [name for name in ("bytecheckpoint", "torch", "python") if name in manifest.provenance]
    objects = sorted([*manifest.objects, *(f"{fqn} (by rank)" for fqn in manifest.rank_objects)])
    left_out = rest_text(len(metadata), _MAX_SUMMARY_ROWS, "... ")
    rows = [
        ("format", info.format if manifest.foreign_format else ""),
        ("step", "" if manifest.step is None else str(manifest.step)),
        ("saved", (saved + by).strip()),
        ("with", ", ".join(f"{name} {manifest.provenance[name]}" for name in programs)),
        *_written_by(manifest),
        *_compressed(manifest),
        ("size", f"{size_text(info.num_bytes)} in {count_text(len(manifest.files), 'file')}"),
        ("tensors", f"{info.num_tensors:,} in {count_text(summary.num_chunks, 'chunk')}{tied}"),
        ("parameters", f"{short_count(summary.num_parameters)} (elements outside of optimizer state)"),
        ("plain data", and_more(objects, 8)),
        *(
            (f"metadata {name}", shortened(repr(value), _MAX_VALUE_TEXT))
            for name, value in metadata[:_MAX_SUMMARY_ROWS]
        ),
        ("metadata", left_out and f"{left_out}: --json has all"),
    ]
    return [(name, value) for name, value in rows if value]


def _written_by(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns a list with the row that compares the bytes of the ranks; an empty list if they are not known."""
    writers = writers_of(manifest)
    if writers is None:
        return []
    low, middle, high = map(size_text, (writers.min_num_bytes, writers.median_num_bytes, writers.max_num_bytes))
    each = f"{high} each" if low == high else f"{low} to {high} each, median {middle}"
    each = high if writers.num_ranks == 1 else each
    return [("written by", f"{count_text(writers.num_ranks, 'rank')}, {each}")]


def _compressed(manifest: Manifest) -> list[tuple[str, str]]:
    packed = compression_of(manifest)
    if packed is None:
        return []
    took = f"{size_text(packed.num_bytes)} instead of {size_text(packed.raw_num_bytes)}"
    return [("compressed", f"{count_text(packed.num_chunks, 'chunk')}; all take {took}")]


def tables_of_totals(summary: ManifestSummary) -> list[tuple[TableShape, Sequence[Any]]]:
    """Returns the tables that sum tensors up, by entry, by dtype and by the way in which tensors are cut, with their
    items; none without items.
    """

    def shape(titles: Sequence[str], count_of: str) -> TableShape:
        columns = [
            Column(titles[0], style=NAME_STYLE),
            *(Column(title, is_right=True, drop=drop) for title, drop in zip(titles[1:], (1, 2, 0), strict=True)),
        ]
        return TableShape(
            columns,
            lambda item: [
                item.name,
                f"{item.num_tensors:,}",
                f"{getattr(item, count_of):,}",
                size_text(item.num_bytes),
            ],
        )

    found: list[tuple[TableShape, Sequence[Any]]] = [
        (shape([title, "tensors", "elements", "size"], "num_elements"), totals)
        for title, totals in (("entry", summary.entries), ("dtype", summary.dtypes))
    ]
    found.append((shape(["cut into", "tensors", "chunks", "size"], "num_chunks"), summary.cuts))
    return [(table, items) for table, items in found if items]


def tensor_table(stats: Mapping[str, TensorStats] | None) -> TableShape:
    numbers = [Column("size", is_right=True)] if stats is None else _STATS_COLUMNS
    columns = [
        Column("tensor", style=NAME_STYLE),
        Column("dtype", is_whole=True, drop=1),
        Column("shape", is_whole=True, drop=2),
        *numbers,
    ]

    def cells(tensor: TensorEntry) -> list[str]:
        name = f"{tensor.fqn} = {tensor.alias_of}" if tensor.alias_of else tensor.fqn
        size = ["tied" if tensor.alias_of else size_text(tensor.num_bytes)]
        numbers = size if stats is None else stats_cells(stats.get(tensor.stored_fqn))
        return [name, tensor.dtype, shape_text(tensor.shape), *numbers]

    return TableShape(columns, cells)


def stats_cells(stats: TensorStats | None) -> list[str]:
    if stats is None:
        return ["-"] * len(_STATS_COLUMNS)
    numbers = [number_text(value) for value in (stats.min, stats.max, stats.mean, stats.std)]
    return [*numbers, *(f"{count:,}" for count in (stats.num_nan, stats.num_inf, stats.num_zeros))]


def tree_rows(node: ModuleNode, lead: str = "", below: str = "") -> list[list[str]]:
    """Returns the rows of a node and all below it. `lead` is put before the name of the node, `below` before the names
    of the nodes below it.
    """
    tensor = node.tensor
    is_tied = tensor is not None and tensor.alias_of is not None
    rows = [
        [
            lead + node.name + (f" = {tensor.alias_of}" if tensor and is_tied else ""),
            "" if is_tied or (tensor and node.num_tensors == 1) else f"{node.num_tensors:,}",
            tensor.dtype if tensor else "",
            shape_text(tensor.shape) if tensor else "",
            "" if is_tied else f"{node.num_elements:,}",
            "tied" if is_tied else size_text(node.num_bytes),
        ]
    ]
    for child in node.children:
        is_last = child is node.children[-1]
        rows += tree_rows(child, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))
    return rows


def print_in_depth(
    screen: Screen,
    manifest: Manifest,
    summary: ManifestSummary,
    tensors: Sequence[TensorEntry],
    stats: Mapping[str, TensorStats] | None,
    *,
    limit: int,
) -> None:
    for tensor in tensors[: limit or None]:
        record = summary.record(tensor)
        _print_tensor(screen, tensor, summary, stats)
        if record.num_chunks:
            _print_chunks(screen, manifest, record, limit)
        drawn = map_chunks(record, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS)
        if drawn is not None:
            again = "" if len(drawn.files) <= NUM_LETTERS else f" (letters repeat after {NUM_LETTERS} files)"
            screen.paragraph(f"    which file holds what, by letter{again}, {axes_text(drawn.axes)}:", style="dim")
            for line in lines_of(drawn):
                screen.line(f"    {line}")
    if limit and len(tensors) > limit:
        screen.line()
    screen.rest(len(tensors), limit, " tensors: --limit 0 shows all")


def _print_tensor(
    screen: Screen, tensor: TensorEntry, summary: ManifestSummary, stats: Mapping[str, TensorStats] | None
) -> None:
    screen.paragraph(tensor.fqn, style=NAME_STYLE)
    covers = "" if summary.is_covered_once(tensor) else ", which do NOT cover it exactly once: see bcp verify"
    size = f"tied to {tensor.alias_of}, stored there" if tensor.alias_of else size_text(tensor.num_bytes)
    screen.fields(
        [
            ("dtype", tensor.dtype),
            ("shape", f"{shape_text(tensor.shape)} ({count_text(tensor.num_elements, 'element')})"),
            ("size", size),
            ("chunks", f"{summary.num_chunks_of(tensor):,}{covers}"),
        ]
    )
    if stats is not None:
        screen.line()
        found = stats_cells(stats.get(tensor.stored_fqn))
        screen.table(_STATS_COLUMNS, [found], indent=4)


def _print_chunks(screen: Screen, manifest: Manifest, record: TensorRecord, limit: int) -> None:
    """Prints the first `limit` chunks of a tensor, all for 0."""
    positions = {file: position for position, file in enumerate(sorted(set(record.files)))}
    columns = [
        Column(""),
        Column("region", is_whole=True),
        Column("first byte", is_right=True, drop=1),
        Column("size", is_right=True, drop=LAST_DROP),
        Column("file", style="dim"),
    ]
    rows = [
        [
            letter_of(positions[chunk.file]),
            describe(chunk.region),
            f"{chunk.byte_offset:,}",
            size_text(chunk.byte_length) + ("" if chunk.codec == "none" else f" {chunk.codec}"),
            manifest.files[chunk.file].name,
        ]
        for chunk in first_chunks(record, limit).chunks
    ]
    screen.line()
    screen.table(columns, rows, indent=4)
    screen.rest(record.num_chunks, limit, " chunks: --limit 0 shows all")
