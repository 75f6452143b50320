"""Elements of a page, each well-formed and with names of the checkpoint escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from .terminal import Column, printable

Attributes = Mapping[str, object]


def text(value: object) -> str:
    """Escapes text between tags."""
    return escape(printable(str(value)))


def tag(name: str, attributes: Attributes, *content: str) -> str:
    """Returns an element around others; floats in attributes have two decimals."""
    given = "".join(f' {key}="{_attribute(value)}"' for key, value in attributes.items())
    return f"<{name}{given}>{''.join(content)}</{name}>" if content else f"<{name}{given}/>"


def _attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else text(value)


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Returns rows of text under their titles."""
    classes = [{"class": "right"} if column.is_right else {} for column in columns]
    titles = (tag("th", kind, text(column.title)) for column, kind in zip(columns, classes, strict=True))
    lines = [
        tag("tr", {}, *(tag("td", kind, text(cell)) for cell, kind in zip(row, classes, strict=True))) for row in rows
    ]
    return tag("table", {}, tag("thead", {}, tag("tr", {}, *titles)), tag("tbody", {}, *lines, ""))


def color(number: int, *, lightness: int = 68) -> str:
    """Returns one of many colours, neighbours far apart: hues in steps of the golden angle."""
    return f"hsl({round(number * 137.508) % 360} 62% {lightness}%)"


def fitted(label: str, width: float) -> str:
    """Shortens a label to so many pixels at the size of a picture's text; returns "" if too little would be left."""
    most = int(width / 6.6)
    shown = printable(label)
    return shown if len(shown) <= most else shown[: most - 1] + "…" if most >= 4 else ""
