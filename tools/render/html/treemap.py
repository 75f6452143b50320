"""Lays out a tree of modules as nested rectangles whose areas are sizes.

Squarified treemaps: Bruls, Huizing, van Wijk (2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from ...analysis.module_tree import ModuleNode

_TITLE_HEIGHT = 16.0
_MARGIN = 2.0
_MIN_WIDTH, _MIN_HEIGHT = 60.0, 44.0
"""Size of a rectangle below which it shows nothing inside."""
_MAX_DEPTH = 6
_MAX_CHILDREN = 40


class Box(NamedTuple):
    """A rectangle, in pixels."""

    x: float
    y: float
    width: float
    height: float


class TreemapTile(NamedTuple):
    """A node and its rectangle. In a list of tiles, those inside it come after it."""

    box: Box
    name: str
    path: str
    """Names of the nodes from the top to this one, with dots: an FQN, or `layers.0-31` for several."""
    node: ModuleNode
    depth: int
    family: int
    """Number of the top-level node that it is in, 0 for the largest."""


def lay_out(nodes: Sequence[ModuleNode], box: Box) -> list[TreemapTile]:
    """Returns the tiles of a tree in a rectangle. Nodes without bytes have no tile; of many siblings, the smallest
    share a tile; a tile that is small or deep has none inside it.
    """
    tiles: list[TreemapTile] = []
    for family, (node, place) in enumerate(_placed(nodes, box)):
        _add(tiles, node, place, path=node.name, depth=0, family=family)
    return tiles


def _add(tiles: list[TreemapTile], node: ModuleNode, box: Box, *, path: str, depth: int, family: int) -> None:
    inside = Box(
        box.x + _MARGIN,
        box.y + _TITLE_HEIGHT,
        box.width - 2 * _MARGIN,
        box.height - _TITLE_HEIGHT - _MARGIN,
    )
    has_room = box.width >= _MIN_WIDTH and box.height >= _MIN_HEIGHT and depth < _MAX_DEPTH
    tiles.append(TreemapTile(box, node.name, path, node, depth, family))
    if has_room and any(child.num_bytes for child in node.children):
        for child, place in _placed(node.children, inside):
            _add(tiles, child, place, path=f"{path}.{child.name}", depth=depth + 1, family=family)


def _placed(nodes: Sequence[ModuleNode], box: Box) -> list[tuple[ModuleNode, Box]]:
    """Returns the nodes with bytes, the largest first, each with its part of the rectangle. All after the 40 largest
    are one node, the last.
    """
    ordered = sorted((node for node in nodes if node.num_bytes), key=lambda node: -node.num_bytes)
    smallest = ordered[_MAX_CHILDREN:]
    if smallest:
        together = ModuleNode(
            f"{len(smallest):,} more",
            num_tensors=sum(node.num_tensors for node in smallest),
            num_elements=sum(node.num_elements for node in smallest),
            num_bytes=sum(node.num_bytes for node in smallest),
        )
        ordered = [*ordered[:_MAX_CHILDREN], together]
    boxes = squarify([float(node.num_bytes) for node in ordered], box)
    return list(zip(ordered, boxes, strict=True))


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Divides a box into nearly square rectangles, with areas in proportion to these sizes, all above 0."""
    boxes: list[Box] = []
    first, remaining = 0, sum(sizes)
    while first < len(sizes):
        last = _end_of_row(sizes, first, min(box.width, box.height), box.width * box.height / remaining)
        row = sizes[first:last]
        placed, box = _cut_row(row, box, share=sum(row) / remaining)
        boxes += placed
        remaining = max(remaining - sum(row), 1e-12)
        first = last
    return boxes


def _end_of_row(sizes: Sequence[float], first: int, side: float, area_per_size: float) -> int:
    """Returns the index after the last size of a row that begins at `first` and lies along a side: sizes are added as
    long as the most elongated rectangle of the row does not get further from a square.
    """
    last, worst = first, inf
    while last < len(sizes):
        row = sizes[first : last + 1]
        thickness = max(sum(row) * area_per_size / max(side, 1e-9), 1e-9)
        lengths = [max(size * area_per_size / thickness, 1e-9) for size in (min(row), max(row))]
        longer = max(max(thickness / length, length / thickness) for length in lengths)
        if longer > worst:
            break
        worst, last = longer, last + 1
    return last


def _cut_row(row: Sequence[float], box: Box, *, share: float) -> tuple[list[Box], Box]:
    """Returns the rectangles of a row along the shorter side, and the rest of the box."""
    if box.width < box.height:
        boxes, rest_of_box = _cut_row(row, _turned(box), share=share)
        return list(map(_turned, boxes)), _turned(rest_of_box)
    width, y, boxes = box.width * share, box.y, []
    for size in row:
        boxes.append(Box(box.x, y, width, box.height * size / sum(row)))
        y += boxes[-1].height
    return boxes, Box(box.x + width, box.y, max(box.width - width, 0.0), box.height)


def _turned(box: Box) -> Box:
    return Box(box.y, box.x, box.height, box.width)
