"""Elements of a page, each well-formed and with names of the checkpoint escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from urllib.parse import quote

from ..terminal import Column, printable

Attributes = Mapping[str, object]


def text(value: object) -> str:
    """Returns a value as escaped text, for use between tags or in an attribute."""
    return escape(printable(str(value)))


def tag(name: str, attributes: Attributes, *content: str) -> str:
    """Returns an element around its content, which must be escaped already; one without content is a single tag, and
    `""` as content keeps the closing tag. Attributes are escaped; floats in them get at most two decimals.
    """
    given = "".join(f' {key}="{_attribute(value)}"' for key, value in attributes.items())
    return f"<{name}{given}>{''.join(content)}</{name}>" if content else f"<{name}{given}/>"


def _attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else text(value)


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], *, kind: str = "", anchors: Sequence[str] | None = None
) -> str:
    """Returns rows of text under their titles, in a box that scrolls sideways. A row with an anchor can be linked to,
    and its first cell is that link.
    """
    kinds = ["right" if column.is_right else "whole" if column.is_whole else "" for column in columns]
    classes = [{"class": column_class} if column_class else {} for column_class in kinds]
    titles = (
        tag("th", column_class, text(column.title)) for column, column_class in zip(columns, classes, strict=True)
    )
    lines = []
    for number, row in enumerate(rows):
        cells = [text(cell) for cell in row]
        anchor = anchors[number] if anchors else ""
        if anchor:
            cells[0] = tag("a", {"href": f"#{anchor}"}, cells[0])
        cell_tags = (tag("td", column_class, cell) for cell, column_class in zip(cells, classes, strict=True))
        lines.append(tag("tr", {"id": anchor} if anchor else {}, *cell_tags))
    head = tag("thead", {}, tag("tr", {}, *titles))
    table_class = {"class": kind} if kind else {}
    return tag("div", {"class": "scroll"}, tag("table", table_class, head, tag("tbody", {}, *lines, "")))


def anchor_of(fqn: str) -> str:
    """Returns the identifier of a tensor in a page: `tensor-` and the name, special characters as %-escapes."""
    return f"tensor-{quote(printable(fqn), safe='')}"


def color(number: int, *, lightness: int = 68) -> str:
    """Returns one of many colours, neighbours far apart: hues in steps of the golden angle."""
    return f"hsl({round(number * 137.508) % 360} 62% {lightness}%)"


def fitted(label: str, width: float) -> str:
    """Shortens a label to `width` pixels of a picture's text; returns "" if fewer than 4 characters would be left."""
    max_chars = int(width / 6.6)
    shown = printable(label)
    return shown if len(shown) <= max_chars else shown[: max_chars - 1] + "…" if max_chars >= 4 else ""
