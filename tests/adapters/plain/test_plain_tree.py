"""Trees of plain data and their items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.plain_tree import descend


class Unwalked(dict[Any, Any]):
    """A dict that nobody may go through: a checkpoint may have as many paths as it has keys."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a walk")

    items = values = keys = __iter__  # type: ignore[assignment]


def test_an_item_is_found_at_its_path_without_a_walk() -> None:
    tree = Unwalked({"a": Unwalked({"b": 1, "": 2, "d.": 3}), "a.c": 4, 5: [6, (7, 8)], -1: 9, "": 10, "07": 11})
    found = {path: descend(tree, path) for path in ("a.b", "a.", "a.d.", "a.c", "5.0", "5.1.1", "-1", "", "07")}
    assert found == {"a.b": 1, "a.": 2, "a.d.": 3, "a.c": 4, "5.0": 6, "5.1.1": 8, "-1": 9, "": 10, "07": 11}
    none = ("b", "a.b.c", "5.2", "5.-1", "5.00", "7", "-01", "1" * 30, "5.\u0661")
    assert {path: descend(tree, path) for path in none} == dict.fromkeys(none)


def test_an_item_is_found_below_a_number_that_is_a_key_as_text_too(tmp_path: Path) -> None:
    tree = {"0": {"a": 1}, 0: {"b": {"c": 2}}, 1: {"b": {}}, "1": {"a": {"c": 3}}}
    assert descend(tree, "0.b") == {"c": 2}
    assert descend(tree, "1.a") == {"c": 3}
    bcp.save(tmp_path, {"it": tree})
    loaded: dict[str, Any] = {"it": {"0": {"a": 0}, 0: {"b": {}}, 1: {"b": {}}, "1": {"a": {}}}}
    bcp.load(tmp_path, loaded)
    assert loaded["it"] == tree
