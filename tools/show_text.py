"""How `bcp show` looks: each part of its output as lines and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bytecheckpoint.info import describe_checkpoint
from bytecheckpoint.manifest import Chunk, Manifest
from bytecheckpoint.region import find_tiling_fault

from .arguments import Opened
from .chunk_map import draw_chunks, letter_of
from .contents import Contents, Plain, Tensor
from .module_tree import Node
from .screen import Column, Screen
from .tensor_stats import Stats
from .wording import (
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

_NAME = "bold cyan"
_MAX_VALUE_TEXT = 100
_STATS = ("min", "max", "mean", "std")
_COUNTS = ("NaN", "Inf", "zeros")


def print_summary(screen: Screen, opened: Opened, contents: Contents) -> None:
    manifest = opened.manifest
    info = describe_checkpoint(manifest, path=opened.path, seconds={})
    screen.line(opened.path, style="bold")
    age = age_text(info.created_at, datetime.now(UTC))
    saved = f"{time_text(info.created_at)} ({age})" if info.created_at else "-"
    by = f" by {count_text(info.world_size, 'rank')}" if info.world_size is not None else ""
    tied = f", {count_text(len(manifest.aliases), 'tied name')}" if manifest.aliases else ""
    rows = [
        ("step", "-" if manifest.step is None else str(manifest.step)),
        ("saved", saved + by),
        ("with", _versions(manifest.provenance) or "-"),
        ("size", f"{size_text(info.num_bytes)} in {count_text(len(manifest.files), 'file')}"),
        ("tensors", f"{info.num_tensors:,} in {count_text(contents.num_chunks, 'chunk')}{tied}"),
        ("parameters", f"{short_count(contents.num_parameters)} (elements outside of optimizer state)"),
        ("objects", _objects(manifest)),
        *((f"metadata {name}", shortened(repr(value), _MAX_VALUE_TEXT)) for name, value in manifest.metadata.items()),
    ]
    screen.fields(rows)
    for title, totals in (("entry", contents.entries), ("dtype", contents.dtypes)):
        if not totals:
            continue
        screen.line()
        columns = [
            Column(title, style=_NAME),
            *(Column(name, is_right=True) for name in ("tensors", "elements", "size")),
        ]
        screen.table(
            columns,
            [
                [total.name, f"{total.num_tensors:,}", f"{total.num_elements:,}", size_text(total.num_bytes)]
                for total in totals[:20]
            ],
        )
        _say_rest(screen, len(totals), 20, "more")


def _versions(provenance: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {provenance[name]}" for name in ("bytecheckpoint", "torch", "python") if name in provenance
    )


def _objects(manifest: Manifest) -> str:
    names = [*manifest.objects, *(f"{fqn} (by rank)" for fqn in manifest.rank_objects)]
    return some_of(sorted(names), 8) or "none"


def _say_rest(screen: Screen, num_rows: int, limit: int, how: str) -> None:
    if limit and num_rows > limit:
        screen.line(f"  ... and {num_rows - limit:,} {how}", style="dim")


def print_tensors(screen: Screen, tensors: Sequence[Tensor], stats: Mapping[str, Stats] | None, *, limit: int) -> None:
    columns = [
        Column("tensor", style=_NAME),
        Column("dtype"),
        Column("shape"),
        *([Column("size", is_right=True)] if stats is None else []),
        *(Column(name, is_right=True) for name in ((*_STATS, *_COUNTS) if stats is not None else ())),
    ]
    screen.line()
    screen.table(columns, [_tensor_row(tensor, stats) for tensor in tensors[: limit or None]])
    how = "more: --tree shows them by module, --tensor GLOB some, --limit 0 all"
    _say_rest(screen, len(tensors), limit, how)


def _tensor_row(tensor: Tensor, stats: Mapping[str, Stats] | None) -> list[str]:
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
    rows = [row for node in tree for row in _tree_rows(node, "", "")]
    columns = [
        Column("module", style=_NAME),
        Column("tensors", is_right=True),
        Column("dtype"),
        Column("shape"),
        Column("elements", is_right=True),
        Column("size", is_right=True),
    ]
    screen.line()
    screen.table(columns, rows[: limit or None])
    _say_rest(screen, len(rows), limit, "more rows: --tensor GLOB shows a part, --limit 0 all")


def _tree_rows(node: Node, lead: str, below: str) -> list[list[str]]:
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
        rows += _tree_rows(child, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))
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
        chunks = contents.chunks(tensor)
        _print_facts(screen, tensor, chunks, stats)
        _print_chunks(screen, manifest, chunks, limit)
        _print_map(screen, tensor, chunks)
    if limit and len(tensors) > limit:
        screen.line()
    _say_rest(screen, len(tensors), limit, "more tensors: --limit 0 shows all")


def _print_facts(screen: Screen, tensor: Tensor, chunks: Sequence[Chunk], stats: Mapping[str, Stats] | None) -> None:
    screen.line()
    screen.line(tensor.fqn, style=_NAME)
    fault = find_tiling_fault(tensor.shape, [chunk.region for chunk in chunks])
    covers = "" if fault is None else ", which do NOT cover it exactly once: see bcp verify"
    size = f"tied to {tensor.alias_of}, stored there" if tensor.alias_of else size_text(tensor.num_bytes)
    screen.fields(
        [
            ("dtype", tensor.dtype),
            ("shape", f"{shape_text(tensor.shape)} ({count_text(tensor.num_elements, 'element')})"),
            ("size", size),
            ("chunks", f"{len(chunks):,}{covers}"),
        ]
    )
    if stats is not None:
        screen.line()
        found = stats_cells(stats.get(tensor.stored_fqn))
        screen.table([Column(name, is_right=True) for name in (*_STATS, *_COUNTS)], [found], indent=4)


def _print_chunks(screen: Screen, manifest: Manifest, chunks: Sequence[Chunk], limit: int) -> None:
    if not chunks:
        return
    files = sorted({chunk.file for chunk in chunks})
    columns = [
        Column(""),
        Column("region"),
        Column("first byte", is_right=True),
        Column("size", is_right=True),
        Column("file", style="dim"),
    ]
    rows = [
        [
            letter_of(chunk.file, files),
            _region_text(chunk),
            f"{chunk.byte_offset:,}",
            size_text(chunk.byte_length) + ("" if chunk.codec == "none" else f" {chunk.codec}"),
            manifest.files[chunk.file].name,
        ]
        for chunk in chunks[: limit or None]
    ]
    screen.line()
    screen.table(columns, rows, indent=4)
    _say_rest(screen, len(chunks), limit, "more chunks: --limit 0 shows all")


def _region_text(chunk: Chunk) -> str:
    spans = zip(chunk.region.offsets, chunk.region.ends, strict=True)
    return "[" + ", ".join(f"{start}:{end}" for start, end in spans) + "]"


def _print_map(screen: Screen, tensor: Tensor, chunks: Sequence[Chunk]) -> None:
    lines = draw_chunks(tensor.shape, chunks)
    if not lines:
        return
    screen.line()
    axes = "dimension 0 down, dimension 1 across" if len(tensor.shape) == 2 else "from the first element to the last"
    screen.line(f"    which file holds what, by letter, {axes}:", style="dim")
    for line in lines:
        screen.line(f"    {line}")


def print_files(screen: Screen, files: Sequence[Mapping[str, Any]], *, limit: int) -> None:
    columns = [
        Column("file", style=_NAME),
        Column("size", is_right=True),
        Column("chunks", is_right=True),
        Column("checksums", is_right=True),
    ]
    rows = [
        [file["name"], size_text(file["num_bytes"]), f"{file['num_chunks']:,}", f"{file['num_extents']:,}" or "none"]
        for file in files[: limit or None]
    ]
    screen.line()
    screen.table(columns, rows)
    _say_rest(screen, len(files), limit, "more files: --limit 0 shows all")


def print_objects(screen: Screen, objects: Sequence[Plain], *, limit: int) -> None:
    columns = [
        Column("object", style=_NAME),
        Column("rank", is_right=True),
        Column("type", style="dim"),
        Column("value"),
    ]
    rows = [
        [plain.fqn, "" if plain.rank is None else str(plain.rank), plain.type, shortened(plain.text, _MAX_VALUE_TEXT)]
        for plain in objects[: limit or None]
    ]
    screen.line()
    screen.table(columns, rows)
    _say_rest(screen, len(objects), limit, "more objects: --limit 0 shows all")
