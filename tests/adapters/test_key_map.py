"""Names of a checkpoint, renamed and found."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from bytecheckpoint.adapters import key_map
from bytecheckpoint.adapters.key_map import Globs, SortedNames


def test_names_below_an_fqn_come_as_they_were_given() -> None:
    names = ["b.z", "a", "b", "b.a.x", "b-c.d", ".d", "b/d", "bb.c", "b.", "b.a"]
    assert SortedNames(names).below("b") == ["b.z", "b.a.x", "b.", "b.a"]
    assert SortedNames(names).below("b.a") == ["b.a.x"]
    assert SortedNames(names).below("c") == []
    assert SortedNames(names).below("") == [".d"]


def test_a_name_is_compared_once_with_each_pattern_and_with_no_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of names, as `include` of thousands of tensors is, took minutes."""
    compared: list[str] = []

    def counted(pattern: str) -> SimpleNamespace:
        match = re.compile(pattern).match
        return SimpleNamespace(match=lambda name: (compared.append(name), match(name))[1])

    monkeypatch.setattr(key_map, "re", SimpleNamespace(compile=counted))
    globs = Globs(["a.*", "b", "[c", "d?", "a.x"])
    names = ["b", "b.x", "a.x", "[c", "dd", "e"]
    assert [globs.match(name) for name in names * 3] == [True, False, True, True, True, False] * 3
    assert sorted(compared) == sorted(names * 3)
    assert list(globs.unused) == []
    assert Globs(["f", "g*"]).match("g")
