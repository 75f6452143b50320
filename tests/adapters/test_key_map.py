"""Names of a checkpoint, renamed and found."""

from __future__ import annotations

from bytecheckpoint.adapters.key_map import SortedNames


def test_names_below_an_fqn_come_as_they_were_given() -> None:
    names = ["b.z", "a", "b", "b.a.x", "b-c.d", ".d", "b/d", "bb.c", "b.", "b.a"]
    assert SortedNames(names).below("b") == ["b.z", "b.a.x", "b.", "b.a"]
    assert SortedNames(names).below("b.a") == ["b.a.x"]
    assert SortedNames(names).below("c") == []
    assert SortedNames(names).below("") == [".d"]
