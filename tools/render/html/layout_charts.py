"""Draws the pictures of a report as SVG: sizes of modules and dtypes, and the files that hold the parts of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.manifest import Manifest, TensorRecord
from bytecheckpoint.region import describe

from ...analysis.module_tree import ModuleNode
from ...analysis.summary import TensorTotals
from ..chunk_map import ChunkMap, map_chunks
from ..number_format import count_text, shape_text, size_text
from .elements import color, fitted, tag, text
from .treemap import Box, TreemapTile, lay_out

WIDTH = 960.0
_TREEMAP_HEIGHT = 480.0
_BAR_HEIGHT = 28.0
_MAP_WIDTH, _MIN_MAP_HEIGHT, _MAX_MAP_HEIGHT = 480.0, 40.0, 320.0
_MAX_ROWS, _MAX_COLUMNS = 96, 160
_MAX_OUTLINES = 400
"""Largest number of chunks that are drawn one by one, not as fields."""


def svg(width: float, height: float, title: str, *content: str) -> str:
    """Returns a picture that fits the page. Screen readers read its title, which is not drawn."""
    box = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "role": "img", "aria-label": title}
    wide = {"class": "wide"} if width == WIDTH else {}
    drawn = tag("svg", {**box, **wide, "style": f"max-width:{width:.0f}px"}, *content, "")
    return tag("div", {"class": "scroll"}, drawn)


def rect(box: Box, fill: str, lines: Sequence[str], kind: str = "") -> str:
    """Returns a rectangle that shows these lines under the pointer."""
    place = {"x": box.x, "y": box.y, "width": max(box.width, 0.0), "height": max(box.height, 0.0), "fill": fill}
    return tag("rect", {**place, **({"class": kind} if kind else {})}, tag("title", {}, "\n".join(map(text, lines))))


def label(x: float, y: float, shown: str, kind: str = "") -> str:
    """Returns an SVG element with a line of text; "" for an empty line."""
    return tag("text", {"x": x, "y": y, **({"class": kind} if kind else {})}, text(shown)) if shown else ""


def treemap(nodes: Sequence[ModuleNode]) -> str:
    """Draws modules by the bytes of their tensors."""
    total = sum(node.num_bytes for node in nodes)
    tiles = lay_out(nodes, Box(0.0, 0.0, WIDTH, _TREEMAP_HEIGHT)) if total else []
    return svg(WIDTH, _TREEMAP_HEIGHT, "sizes of modules", *(_tile(tile, total) for tile in tiles))


def _tile(tile: TreemapTile, total: int) -> str:
    node, box = tile.node, tile.box
    parts = [tile.path, f"{size_text(node.num_bytes)}, {100 * node.num_bytes / total:.3g} %"]
    parts.append(f"{count_text(node.num_tensors, 'tensor')}, {count_text(node.num_elements, 'element')}")
    if node.tensor is not None:
        parts.append(f"{node.tensor.dtype} {shape_text(node.tensor.shape)}")
    fill = color(tile.family, lightness=min(60 + 5 * tile.depth, 88))
    shown = fitted(f"{tile.name}  {size_text(node.num_bytes)}", box.width - 8) if box.height >= 15 else ""
    return rect(box, fill, parts, "edge") + label(box.x + 4, box.y + 12, shown)


def bar(totals: Sequence[TensorTotals]) -> str:
    """Draws one bar, divided among these totals by their bytes."""
    total_bytes = sum(total.num_bytes for total in totals)
    x = 0.0
    parts = []
    for number, total in enumerate(totals):
        width = WIDTH * total.num_bytes / total_bytes if total_bytes else 0.0
        lines = [total.name, f"{size_text(total.num_bytes)}, {100 * total.num_bytes / max(total_bytes, 1):.3g} %"]
        parts.append(rect(Box(x, 0.0, width, _BAR_HEIGHT), color(number), lines, "edge"))
        parts.append(label(x + 4, 18.0, fitted(total.name, width - 8)))
        x += width
    return svg(WIDTH, _BAR_HEIGHT, "bytes by dtype", *parts)


def chunk_picture(manifest: Manifest, record: TensorRecord) -> tuple[str, ChunkMap] | None:
    """Returns a picture of the chunks of a tensor in the colours of their files, and its map; None where `map_chunks`
    returns None.
    """
    drawn = map_chunks(record, max_rows=_MAX_ROWS, max_columns=_MAX_COLUMNS)
    if drawn is None:
        return None
    height = _map_height(record, drawn)
    is_flat = len(record.shape) <= 2 and record.num_chunks <= _MAX_OUTLINES
    parts = _outlines(manifest, record, drawn, height) if is_flat else _field_shapes(manifest, drawn, height)
    return svg(_MAP_WIDTH, height, "which file holds which part", *parts), drawn


def _map_height(record: TensorRecord, drawn: ChunkMap) -> float:
    if drawn.axes.down is None:
        return _MIN_MAP_HEIGHT
    ratio = record.shape[drawn.axes.down] / record.shape[drawn.axes.across]
    return min(max(_MAP_WIDTH * ratio, _MIN_MAP_HEIGHT), _MAX_MAP_HEIGHT)


def _outlines(manifest: Manifest, record: TensorRecord, drawn: ChunkMap, height: float) -> list[str]:
    """Draws each chunk at its place."""
    down, across = drawn.axes
    positions = {file: position for position, file in enumerate(drawn.files)}
    parts = []
    for chunk in record.chunks:
        region = chunk.region
        scale_x = _MAP_WIDTH / record.shape[across]
        scale_y = height / record.shape[down] if down is not None else height
        y, rows = (region.offsets[down], region.lengths[down]) if down is not None else (0, 1)
        box = Box(region.offsets[across] * scale_x, y * scale_y, region.lengths[across] * scale_x, rows * scale_y)
        lines = [describe(region), size_text(chunk.byte_length), manifest.files[chunk.file].name]
        parts.append(rect(box, color(positions[chunk.file]), lines, "edge"))
    return parts


def _field_shapes(manifest: Manifest, drawn: ChunkMap, height: float) -> list[str]:
    """Returns the map's SVG: neighbouring fields of one file, and neighbouring rows that are alike, share a shape."""
    rows = drawn.fields.tolist()
    scale_x, scale_y = _MAP_WIDTH / len(rows[0]), height / len(rows)
    parts = []
    for top, bottom in _runs(rows):
        row = rows[top]
        for left, right in _runs(row):
            box = Box(left * scale_x, top * scale_y, (right - left) * scale_x, (bottom - top) * scale_y)
            is_held = row[left] >= 0
            title = manifest.files[drawn.files[row[left]]].name if is_held else "no chunk"
            parts.append(rect(box, color(row[left]) if is_held else "none", [title]))
    return parts


def _runs(items: Sequence[object]) -> list[tuple[int, int]]:
    """Returns the first index of each run of equal neighbours, and the one after its last."""
    starts = [index for index, item in enumerate(items) if not index or item != items[index - 1]]
    return list(zip(starts, [*starts[1:], len(items)], strict=True))
