"""Tensors of a state that lie in the same memory: it is filled once, and what only overlaps is refused."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bytecheckpoint as bcp
from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.expectation import Expectation
from bytecheckpoint.adapters.shards import LocalShard, LocalShards
from bytecheckpoint.loading.match import match_again, match_state
from bytecheckpoint.memory.overlap import find_overlaps


def shards_of(*tensors: torch.Tensor) -> list[LocalShard]:
    shards = LocalShards()
    for index, tensor in enumerate(tensors):
        shards.add(f"t{index}", tensor)
    return shards.found


def bytes_of(tensor: torch.Tensor) -> set[int]:
    indices = np.indices(tuple(tensor.shape)).reshape(tensor.dim(), -1)
    offsets = (np.array(tensor.stride(), np.int64)[:, None] * indices).sum(axis=0) * tensor.element_size()
    return {tensor.data_ptr() + int(at) + byte for at in offsets for byte in range(tensor.element_size())}


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A part of 60 numbers, in rows of 10."""
    tensor = _NUMBERS.view(torch.int16) if draw(st.booleans()) else _NUMBERS
    for dim in (0, 1):
        first = draw(st.integers(0, tensor.shape[dim]))
        last = draw(st.integers(first, tensor.shape[dim]))
        tensor = tensor[(slice(None),) * dim + (slice(first, last, draw(st.integers(1, 3))),)]
    return tensor.T if draw(st.booleans()) else tensor


_NUMBERS = torch.zeros(6, 10, dtype=torch.int32)


@given(st.lists(views(), max_size=4))
@settings(max_examples=300, deadline=None)
def test_tensors_share_memory_where_they_have_a_byte_in_common(tensors: list[torch.Tensor]) -> None:
    shared = find_overlaps(shards_of(*tensors))
    left_out = [second for _, second in shared.within + shared.clashing]
    assert len(left_out) == len(set(left_out))
    kept = set(range(len(tensors))) - set(left_out)
    for first, second in shared.clashing:
        assert first in kept
        assert bytes_of(tensors[first]) & bytes_of(tensors[second])
    for first, second in shared.within:
        assert bytes_of(tensors[second]) <= set().union(*(bytes_of(tensors[number]) for number in kept))
        assert first in kept
    assert not any(bytes_of(tensors[a]) & bytes_of(tensors[b]) for a, b in combinations(sorted(kept), 2))


def test_memory_that_does_not_exist_is_not_shared() -> None:
    meta = torch.empty(4, 6, device="meta")
    assert find_overlaps(shards_of(meta, meta[2:], meta[1:], torch.empty(0), torch.empty(0))) == ([], [])


def saved(path: Path, **tensors: torch.Tensor) -> None:
    bcp.save(path, {"s": tensors})


@pytest.mark.parametrize("verify", [True, False])
def test_tensors_that_overlap_in_memory_are_refused_by_name_before_anything_is_read(
    tmp_path: Path, verify: bool
) -> None:
    saved(tmp_path, a=torch.ones(1 << 20), b=torch.full((1 << 20,), 2.0), c=torch.ones(3))
    memory = torch.zeros(3 << 19)
    state = {"s": {"a": memory[: 1 << 20], "b": memory[1 << 19 :], "c": torch.zeros(3)}}
    options = bcp.LoadOptions(verify=verify)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"s\.b: shares memory with s\.a in the state") as error:
        bcp.load(tmp_path, state, options=options)
    assert error.value.kind == "conflict"
    assert not memory.any()
    assert not state["s"]["c"].any()
    report = bcp.load(tmp_path, state, strict=False, options=options)
    assert ["shares memory" in text for text in report.mismatched] == [True]
    assert state["s"]["a"].eq(1).all()
    assert state["s"]["c"].eq(1).all()


def test_columns_of_one_buffer_are_loaded_each_for_itself(tmp_path: Path) -> None:
    stored = {name: torch.randn(500, 70) for name in "qkv"}
    saved(tmp_path, **stored)
    buffer = torch.zeros(500, 210)
    bcp.load(tmp_path, {"s": {name: buffer[:, 70 * index : 70 * (index + 1)] for index, name in enumerate("qkv")}})
    assert torch.equal(buffer, torch.cat(list(stored.values()), dim=1))


def test_views_of_a_tensor_that_is_loaded_take_its_value(tmp_path: Path) -> None:
    memory = torch.arange(1 << 20)
    saved(tmp_path, part=memory[5:77], all=memory, square=memory.view(1 << 10, 1 << 10), column=memory[::3])
    target = torch.zeros_like(memory)
    views = {"part": target[5:77], "all": target, "square": target.view(1 << 10, 1 << 10), "column": target[::3]}
    report = bcp.load(tmp_path, {"s": views})
    assert torch.equal(target, memory)
    assert not report.unexpected


@pytest.mark.parametrize("is_part", [False, True])
def test_one_memory_under_two_dtypes_is_refused_by_name(tmp_path: Path, is_part: bool) -> None:
    """Both were filled, one after the other, and one of them was then wrong without a word."""
    bcp.save(tmp_path, {"a": torch.full((4,), 3.0), "b": torch.full((2 if is_part else 4,), 7, dtype=torch.int32)})
    memory = torch.zeros(4)
    state = {"a": memory, "b": memory.view(torch.int32)[: 2 if is_part else 4]}
    with pytest.raises(
        bcp.CheckpointMismatchError, match=r"b: shares memory with a in the state.*another dtype"
    ) as error:
        bcp.load(tmp_path, state)
    assert error.value.kind == "conflict"
    assert memory.tolist() == [0.0] * 4
    report = bcp.load(tmp_path, state, strict=False)
    assert memory.tolist() == [3.0] * 4
    assert any("b: shares memory" in text for text in report.mismatched)
    bcp.load(tmp_path, state, exclude="a")
    assert state["b"].unique().tolist() == [7]


def test_what_is_tied_in_a_dict_takes_the_value_of_its_first_name(tmp_path: Path) -> None:
    saved(tmp_path, a=torch.full((1 << 20,), 1.0), b=torch.full((1 << 20,), 2.0))
    memory = torch.zeros(1 << 20)
    for _ in range(5):
        report = bcp.load(tmp_path, {"s": {"a": memory, "b": memory}})
        assert memory.eq(1).all()
        assert not report.unexpected


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on another device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:1")

    @property
    def is_cpu(self) -> bool:
        return False


def test_equal_addresses_on_different_devices_are_different_memory() -> None:
    memory = torch.zeros(100)
    shared = find_overlaps(shards_of(memory, memory.as_subclass(Elsewhere), memory[50:].as_subclass(Elsewhere)))
    assert shared.clashing == []
    assert shared.within == [(1, 2)]


class GivenMemory:
    """An entry whose tensors get memory only when the load is under way."""

    fqn = "s"

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def expect(self, _: CheckpointView) -> Expectation:
        shards = LocalShards()
        for name, tensor in self.tensors.items():
            shards.add(f"s.{name}", tensor)
        return Expectation(shards.found, set(), [])


def test_memory_that_was_made_during_the_load_and_overlaps_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, a=torch.ones(4), b=torch.zeros(4))
    stored = CheckpointView(bcp.open(tmp_path).manifest, rank=0, num_ranks=1, key_map=None, include=None, exclude=None)
    entry = GivenMemory(a=torch.empty(4, device="meta"), b=torch.empty(4, device="meta"))
    before = match_state([entry], stored, cast=False)
    assert before.problems == []
    memory = torch.zeros(6)
    entry.tensors = {"a": memory[:4], "b": memory[2:]}
    with pytest.raises(
        bcp.CheckpointMismatchError, match=r"1 tensors .* memory that they were given:\ns\.b: shares"
    ) as error:
        match_again([entry], stored, before, cast=False)
    assert error.value.kind == "conflict"
    entry.tensors = {"a": memory[:4], "b": torch.zeros(4)}
    assert len(match_again([entry], stored, before, cast=False).shards) == 2
