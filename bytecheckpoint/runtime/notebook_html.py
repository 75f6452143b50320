"""Shows objects in notebooks as small tables: everything in them is escaped, since names come from checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import islice

from bytecheckpoint.errors import rest_text

_MAX_ROWS = 50
_MAX_ITEMS = 10
_MAX_TEXT = 200


def rows_html(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], num_rows: int) -> str:
    """Returns HTML: a title, a table of the first 50 of these `num_rows` rows, and how many are left out."""
    shown = list(islice(rows, _MAX_ROWS))
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = ["".join(f"<td>{escape(shortened(text))}</td>" for text in row) for row in shown]
    body = "".join(f"<tr>{of_row}</tr>" for of_row in cells)
    rest = rest_text(num_rows, len(shown))
    below = f"<p>{rest}</p>" if rest else ""
    return f"<p>{escape(shortened(title))}</p><table><tr>{titles}</tr>{body}</table>{below}"


def facts_html(title: str, facts: Mapping[str, object]) -> str:
    """Returns HTML: a title, and a table of names and values, without rows for values that are None or empty."""
    rows = [
        (name, value_text(value))
        for name, value in facts.items()
        if value is not None and value not in ("", (), [], {})
    ]
    return rows_html(title, ("", ""), rows, len(rows))


def value_text(value: object) -> str:
    """Returns a value as text: the first items of many, an integer with thousands separators, a time to the second."""
    if isinstance(value, Mapping):
        return _some((f"{key}: {value_text(item)}" for key, item in value.items()), len(value))
    if isinstance(value, str | datetime):
        return value if isinstance(value, str) else value.isoformat(" ", "seconds")
    if isinstance(value, Sequence):
        return _some(map(value_text, value), len(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def _some(texts: Iterable[str], count: int) -> str:
    return ", ".join(islice(texts, _MAX_ITEMS)) + rest_text(count, _MAX_ITEMS, " ")
