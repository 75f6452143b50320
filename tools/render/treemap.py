"""A tree of modules as rectangles whose areas are sizes, one inside the other. It knows areas, and nothing of how they
are drawn.

Squarified treemaps: Bruls, Huizing, van Wijk (2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..analysis.module_tree import Node

_TITLE_HEIGHT = 16.0
_MARGIN = 2.0
_MIN_WIDTH, _MIN_HEIGHT = 60.0, 44.0
"""What is smaller shows nothing inside."""
_MAX_DEPTH = 6
_MAX_CHILDREN = 40


class Box(NamedTuple):
    """A rectangle, in pixels."""

    x: float
    y: float
    width: float
    height: float


class Tile(NamedTuple):
    """A node with its place; those inside it come after it."""

    box: Box
    name: str
    path: str
    """FQN of what it stands for."""
    node: Node
    depth: int
    family: int
    """Number of the top-level node that it belongs to."""
    has_inside: bool


def lay_out(nodes: Sequence[Node], box: Box) -> list[Tile]:
    """The tiles of a tree in a rectangle. What takes no bytes has none, and of many siblings the smallest share one."""
    tiles: list[Tile] = []
    for family, (node, place) in enumerate(_placed(nodes, box)):
        _add(tiles, node, place, path=node.name, depth=0, family=family)
    return tiles


def _add(tiles: list[Tile], node: Node, box: Box, *, path: str, depth: int, family: int) -> None:
    inside = Box(
        box.x + _MARGIN,
        box.y + _TITLE_HEIGHT,
        box.width - 2 * _MARGIN,
        box.height - _TITLE_HEIGHT - _MARGIN,
    )
    has_room = box.width >= _MIN_WIDTH and box.height >= _MIN_HEIGHT and depth < _MAX_DEPTH
    has_inside = has_room and any(child.num_bytes for child in node.children)
    tiles.append(Tile(box, node.name, path, node, depth, family, has_inside))
    if has_inside:
        for child, place in _placed(node.children, inside):
            _add(tiles, child, place, path=f"{path}.{child.name}", depth=depth + 1, family=family)


def _placed(nodes: Sequence[Node], box: Box) -> list[tuple[Node, Box]]:
    """The nodes with a size, the largest first, each with its part of the rectangle."""
    ordered = sorted((node for node in nodes if node.num_bytes), key=lambda node: -node.num_bytes)
    rest = ordered[_MAX_CHILDREN:]
    if rest:
        together = Node(
            f"{len(rest):,} more",
            num_tensors=sum(node.num_tensors for node in rest),
            num_elements=sum(node.num_elements for node in rest),
            num_bytes=sum(node.num_bytes for node in rest),
        )
        ordered = [*ordered[:_MAX_CHILDREN], together]
    boxes = squarify([float(node.num_bytes) for node in ordered], box)
    return list(zip(ordered, boxes, strict=True))


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Rectangles with areas in the proportion of these sizes, above 0, as near to squares as this way finds them."""
    boxes: list[Box] = []
    first, left = 0, sum(sizes)
    while first < len(sizes):
        per_size = box.width * box.height / left
        last = _end_of_row(sizes, first, min(box.width, box.height), per_size)
        row = sizes[first:last]
        placed, box = _cut_row(row, box, share=sum(row) / left)
        boxes += placed
        left -= sum(row)
        left = max(left, 1e-12)
        first = last
    return boxes


def _end_of_row(sizes: Sequence[float], first: int, side: float, per_size: float) -> int:
    """How far a row along a side goes before its rectangles get longer again."""
    last = first + 1
    worst = _worst(sizes[first:last], side, per_size)
    while last < len(sizes):
        longer = _worst(sizes[first : last + 1], side, per_size)
        if longer > worst:
            break
        worst, last = longer, last + 1
    return last


def _worst(row: Sequence[float], side: float, per_size: float) -> float:
    """The largest ratio of the sides of a rectangle in a row."""
    thickness = sum(row) * per_size / max(side, 1e-9)
    lengths = [size * per_size / max(thickness, 1e-9) for size in row]
    return max(max(thickness / max(length, 1e-9), length / max(thickness, 1e-9)) for length in lengths)


def _cut_row(row: Sequence[float], box: Box, *, share: float) -> tuple[list[Box], Box]:
    """The rectangles of a row along the shorter side, and what of the box is left."""
    total = sum(row)
    boxes = []
    if box.width >= box.height:
        width, y = box.width * share, box.y
        for size in row:
            boxes.append(Box(box.x, y, width, box.height * size / total))
            y += boxes[-1].height
        return boxes, Box(box.x + width, box.y, max(box.width - width, 0.0), box.height)
    height, x = box.height * share, box.x
    for size in row:
        boxes.append(Box(x, box.y, box.width * size / total, height))
        x += boxes[-1].width
    return boxes, Box(box.x, box.y + height, box.width, max(box.height - height, 0.0))
