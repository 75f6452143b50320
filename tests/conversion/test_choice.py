"""What include and exclude of a conversion may name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from counted_looks import CountedName

from bytecheckpoint.adapters import key_map
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.conversion.choice import check_choice
from bytecheckpoint.loading.select import Selection, SelectionRequest
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.records import tensor_record


def test_a_choice_among_many_optimizers_is_checked_without_a_look_at_all_names_for_each() -> None:
    group: dict[str, Any] = {"w": {"params": {"w": None}, "values": {"lr": 0.1}}}
    trees = {f"optimizers.{number}": {"state": {}, "groups": group} for number in range(100)}
    names = [CountedName(f"{fqn}.state.w.key{key}") for fqn in trees for key in range(10)]
    record = tensor_record("float32", (2,), ())
    objects = {fqn: encode_plain(tree, fqn) for fqn, tree in trees.items()}
    manifest = Manifest(save_id="1" * 16, tensors=dict.fromkeys(names, record), objects=objects)
    selection = Selection(wanted=[], names={name: name for name in names}, aliases={}, left_out=[], trees=trees)
    CountedName.num_looks = 0
    check_choice(manifest, SelectionRequest(to="bcp", include=("optimizers.*",)), selection)
    assert CountedName.num_looks < 40 * len(names)


def test_globs_are_compiled_once_and_not_for_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of names as `include` of a tree or a conversion took minutes."""
    compiled: list[str] = []
    counted = SimpleNamespace(compile=lambda pattern: (compiled.append(pattern), re.compile(pattern))[1])
    monkeypatch.setattr(key_map, "re", counted)
    request = SelectionRequest(to="torch", include=("a.*", "b"), exclude=("a.x*",))
    assert [request.takes(name) for name in ("a.y", "a.x1", "b", "c")] == [True, False, True, False]
    assert len(compiled) == 2
