"""How `bcp show` looks: each part of its output as lines and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bytecheckpoint.info import describe_checkpoint
from bytecheckpoint.manifest import Manifest, TensorRecord
from bytecheckpoint.region import describe

from ..analysis.module_tree import Node
from ..analysis.save_layout import compressed, first_chunks, writers_of
from ..analysis.summary import Contents, Plain, Tensor
from ..analysis.tensor_stats import Stats
from ..arguments import Opened
from .chunk_map import MAX_COLUMNS, MAX_ROWS, NUM_LETTERS, axes_text, letter_of, lines_of, map_chunks
from .column_widths import Column
from .number_format import (
    age_text,
    count_text,
    number_text,
    shape_text,
    short_count,
    shortened,
    size_text,
    some_of,
    time_text,
)
from .terminal import Screen

_NAME = "bold cyan"
_MAX_VALUE_TEXT = 100
_MAX_SUMMARY_ROWS = 20
_STATS = ("min", "max", "mean", "std")
_COUNTS = ("NaN", "Inf", "zeros")
TREE_COLUMNS = [
    Column("module", style=_NAME),
    Column("tensors", is_right=True, drop=1),
    Column("dtype", is_whole=True, drop=3),
    Column("shape", is_whole=True, drop=4),
    Column("elements", is_right=True, drop=2),
    Column("size", is_right=True),
]
FILE_COLUMNS = [
    Column("file", style=_NAME),
    Column("size", is_right=True),
    Column("chunks", is_right=True, drop=2),
    Column("checksums", is_right=True, drop=1),
]
OBJECT_COLUMNS = [
    Column("object", style=_NAME),
    Column("rank", is_right=True),
    Column("type", style="dim", drop=1),
    Column("value"),
]


def print_summary(screen: Screen, opened: Opened, contents: Contents) -> None:
    screen.line(opened.path, style="bold")
    screen.fields(summary_rows(opened, contents))
    for titles, rows in tables_of_totals(contents):
        columns = [Column(titles[0], style=_NAME), *(Column(title, is_right=True) for title in titles[1:])]
        screen.line()
        screen.table(columns, rows[:_MAX_SUMMARY_ROWS])
        screen.rest(len(rows), _MAX_SUMMARY_ROWS, "more: --json has all")


def summary_rows(opened: Opened, contents: Contents) -> list[tuple[str, str]]:
    """What to know first: names and values, without those of which nothing is known."""
    manifest = opened.manifest
    info = describe_checkpoint(manifest, path=opened.path, seconds={})
    age = age_text(info.created_at, datetime.now(UTC))
    saved = f"{time_text(info.created_at)} ({age})" if info.created_at else ""
    by = f" by {count_text(info.world_size, 'rank')}" if info.world_size is not None else ""
    tied = f", {count_text(len(manifest.aliases), 'tied name')}" if manifest.aliases else ""
    metadata = list(manifest.metadata.items())
    rest = [("metadata", f"... and {len(metadata) - _MAX_SUMMARY_ROWS:,} more: --json has all")]
    rows = [
        ("format", info.format if manifest.foreign_format else ""),
        ("step", "" if manifest.step is None else str(manifest.step)),
        ("saved", (saved + by).strip()),
        ("with", _versions(manifest.provenance)),
        *_written_by(manifest),
        *_compressed(manifest),
        ("size", f"{size_text(info.num_bytes)} in {count_text(len(manifest.files), 'file')}"),
        ("tensors", f"{info.num_tensors:,} in {count_text(contents.num_chunks, 'chunk')}{tied}"),
        ("parameters", f"{short_count(contents.num_parameters)} (elements outside of optimizer state)"),
        ("objects", _objects(manifest)),
        *(
            (f"metadata {name}", shortened(repr(value), _MAX_VALUE_TEXT))
            for name, value in metadata[:_MAX_SUMMARY_ROWS]
        ),
        *(rest if len(metadata) > _MAX_SUMMARY_ROWS else []),
    ]
    return [(name, value) for name, value in rows if value]


def _written_by(manifest: Manifest) -> list[tuple[str, str]]:
    """How evenly the ranks have shared the work."""
    writers = writers_of(manifest)
    if writers is None:
        return []
    low, middle, high = map(size_text, (writers.min_num_bytes, writers.median_num_bytes, writers.max_num_bytes))
    each = f"{high} each" if low == high else f"{low} to {high} each, median {middle}"
    each = high if writers.num_ranks == 1 else each
    return [("written by", f"{count_text(writers.num_ranks, 'rank')}, {each}")]


def _compressed(manifest: Manifest) -> list[tuple[str, str]]:
    packed = compressed(manifest)
    if packed is None:
        return []
    took = f"{size_text(packed.num_bytes)} instead of {size_text(packed.raw_num_bytes)}"
    return [("compressed", f"{count_text(packed.num_chunks, 'chunk')}; all take {took}")]


def tables_of_totals(contents: Contents) -> list[tuple[list[str], list[list[str]]]]:
    """Titles and rows of the tables that sum tensors up: by entry, by dtype, by how they are cut."""
    tables = []
    for title, totals in (("entry", contents.entries), ("dtype", contents.dtypes)):
        rows = [
            [total.name, f"{total.num_tensors:,}", f"{total.num_elements:,}", size_text(total.num_bytes)]
            for total in totals
        ]
        tables.append(([title, "tensors", "elements", "size"], rows))
    cuts = [
        [cut.name, f"{cut.num_tensors:,}", f"{cut.num_chunks:,}", size_text(cut.num_bytes)] for cut in contents.cuts
    ]
    tables.append((["cut into", "tensors", "chunks", "size"], cuts))
    return [(titles, rows) for titles, rows in tables if rows]


def _versions(provenance: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {provenance[name]}" for name in ("bytecheckpoint", "torch", "python") if name in provenance
    )


def _objects(manifest: Manifest) -> str:
    names = [*manifest.objects, *(f"{fqn} (by rank)" for fqn in manifest.rank_objects)]
    return some_of(sorted(names), 8)


def print_tensors(screen: Screen, tensors: Sequence[Tensor], stats: Mapping[str, Stats] | None, *, limit: int) -> None:
    screen.line()
    screen.table(tensor_columns(stats), [tensor_cells(tensor, stats) for tensor in tensors[: limit or None]])
    screen.rest(len(tensors), limit, "more: --tree shows them by module, --tensor GLOB some, --limit 0 all")


def tensor_columns(stats: Mapping[str, Stats] | None) -> list[Column]:
    """Of a table of tensors."""
    numbers = (*_STATS, *_COUNTS) if stats is not None else ("size",)
    named = [
        Column("tensor", style=_NAME),
        Column("dtype", is_whole=True, drop=1),
        Column("shape", is_whole=True, drop=2),
    ]
    return [*named, *(Column(name, is_right=True) for name in numbers)]


def tensor_cells(tensor: Tensor, stats: Mapping[str, Stats] | None) -> list[str]:
    """A row of it."""
    name = f"{tensor.fqn} = {tensor.alias_of}" if tensor.alias_of else tensor.fqn
    row = [name, tensor.dtype, shape_text(tensor.shape)]
    if stats is not None:
        return row + stats_cells(stats.get(tensor.stored_fqn))
    return [*row, "tied" if tensor.alias_of else size_text(tensor.num_bytes)]


def stats_cells(stats: Stats | None) -> list[str]:
    if stats is None:
        return ["-"] * (len(_STATS) + len(_COUNTS))
    numbers = [number_text(value) for value in (stats.min, stats.max, stats.mean, stats.std)]
    return [*numbers, *(f"{count:,}" for count in (stats.num_nan, stats.num_inf, stats.num_zeros))]


def print_tree(screen: Screen, tree: Sequence[Node], *, limit: int) -> None:
    rows = [row for node in tree for row in tree_rows(node)]
    screen.line()
    screen.table(TREE_COLUMNS, rows[: limit or None])
    screen.rest(len(rows), limit, "more rows: --tensor GLOB shows a part, --limit 0 all")


def tree_rows(node: Node, lead: str = "", below: str = "") -> list[list[str]]:
    """A node and all below it, as rows under TREE_COLUMNS; what `lead` and `below` are drawn before."""
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
    contents: Contents,
    tensors: Sequence[Tensor],
    stats: Mapping[str, Stats] | None,
    *,
    limit: int,
) -> None:
    for tensor in tensors[: limit or None]:
        record = contents.record(tensor)
        _print_facts(screen, tensor, contents, stats)
        _print_chunks(screen, manifest, record, limit)
        _print_map(screen, record)
    if limit and len(tensors) > limit:
        screen.line()
    screen.rest(len(tensors), limit, "more tensors: --limit 0 shows all")


def _print_facts(screen: Screen, tensor: Tensor, contents: Contents, stats: Mapping[str, Stats] | None) -> None:
    screen.line()
    screen.line(tensor.fqn, style=_NAME)
    covers = "" if contents.is_covered_once(tensor) else ", which do NOT cover it exactly once: see bcp verify"
    size = f"tied to {tensor.alias_of}, stored there" if tensor.alias_of else size_text(tensor.num_bytes)
    screen.fields(
        [
            ("dtype", tensor.dtype),
            ("shape", f"{shape_text(tensor.shape)} ({count_text(tensor.num_elements, 'element')})"),
            ("size", size),
            ("chunks", f"{contents.num_chunks_of(tensor):,}{covers}"),
        ]
    )
    if stats is not None:
        screen.line()
        found = stats_cells(stats.get(tensor.stored_fqn))
        screen.table([Column(name, is_right=True) for name in (*_STATS, *_COUNTS)], [found], indent=4)


def _print_chunks(screen: Screen, manifest: Manifest, record: TensorRecord, limit: int) -> None:
    if not record.num_chunks:
        return
    positions = {file: position for position, file in enumerate(sorted(set(record.files)))}
    columns = [
        Column(""),
        Column("region", is_whole=True),
        Column("first byte", is_right=True, drop=1),
        Column("size", is_right=True),
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
    screen.rest(record.num_chunks, limit, "more chunks: --limit 0 shows all")


def _print_map(screen: Screen, record: TensorRecord) -> None:
    drawn = map_chunks(record, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS)
    if drawn is None:
        return
    screen.line()
    again = "" if len(drawn.files) <= NUM_LETTERS else f", which come again after {NUM_LETTERS} files"
    screen.line(f"    which file holds what, by letter{again}, {axes_text(drawn.axes)}:", style="dim")
    for line in lines_of(drawn):
        screen.line(f"    {line}")


def print_files(screen: Screen, files: Sequence[Mapping[str, Any]], *, limit: int) -> None:
    screen.line()
    screen.table(FILE_COLUMNS, list(map(file_cells, files[: limit or None])))
    screen.rest(len(files), limit, "more files: --limit 0 shows all")


def file_cells(file: Mapping[str, Any]) -> list[str]:
    """A row under FILE_COLUMNS."""
    return [file["name"], size_text(file["num_bytes"]), f"{file['num_chunks']:,}", f"{file['num_extents']:,}"]


def print_objects(screen: Screen, objects: Sequence[Plain], *, limit: int) -> None:
    screen.line()
    screen.table(OBJECT_COLUMNS, list(map(object_cells, objects[: limit or None])))
    screen.rest(len(objects), limit, "more objects: --limit 0 shows all")


def object_cells(plain: Plain) -> list[str]:
    """A row under OBJECT_COLUMNS."""
    rank = "" if plain.rank is None else str(plain.rank)
    return [plain.fqn, rank, plain.type, shortened(plain.text, _MAX_VALUE_TEXT)]
