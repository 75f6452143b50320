"""A load checks of a manifest what it uses: a checkpoint may have millions of chunks, of which a rank wants a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.manifest import TensorTable, table

OTHERS = [f"b{number}" for number in range(5)]


def load_one(path: Path) -> torch.Tensor:
    state = {"a": torch.ones(40_000)}
    bcp.load(path, state, exclude=OTHERS)
    return state["a"]


READ: dict[str, Callable[[Path], torch.Tensor]] = {
    "a load": load_one,
    "a look": lambda path: bcp.open(path)["a"][:],
    "a part": lambda path: bcp.open(path)["a"][0:40_000],
}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors whose chunks are checked one by one, and "all" where they are checked together."""
    names: list[str] = []
    check_chunks, check_all = table.check_chunks, TensorTable.check_all

    def noting(columns: Any, bounds: Any, fqns: Sequence[str]) -> Any:
        names.extend(fqns)
        return check_chunks(columns, bounds, fqns)

    def noting_all(self: TensorTable) -> None:
        names.append("all")
        check_all(self)

    monkeypatch.setattr(table, "check_chunks", noting)
    monkeypatch.setattr(TensorTable, "check_all", noting_all)
    return names


@pytest.mark.parametrize("how", READ)
def test_one_tensor_is_read_without_checking_the_chunks_of_others(tmp_path: Path, checked: list[str], how: str) -> None:
    # Chunks that are compressed are checked tensor by tensor.
    bcp.save(tmp_path, {name: torch.zeros(40_000) for name in ("a", *OTHERS)}, options=bcp.SaveOptions(codec="zstd"))
    checked.clear()
    assert torch.equal(READ[how](tmp_path), torch.zeros(40_000))
    assert set(checked) == {"a"}
