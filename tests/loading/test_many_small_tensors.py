"""Loads of many small tensors, which are read straight into their memory, many at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_tensors import random_bits, same_bits

import bytecheckpoint as bcp
from bytecheckpoint.adapters import checkpoint_view
from bytecheckpoint.adapters.plain import plain_data
from bytecheckpoint.storage.backends.local_store import LocalStore

NUM = 200
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def state_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of 1 to 16 KB, so that most extents have parts of several."""
    sizes = random.Random(0)
    return {
        f"layer.{number}": random_bits(DTYPES[number % len(DTYPES)], (sizes.randint(250, 2000), 4), seed + number)
        for number in range(NUM)
    }


def emptied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of places of each read."""
    seen: list[int] = []
    read_pieces = LocalStore.read_pieces

    def counted(store: LocalStore, name: str, byte_offset: int, buffers: Sequence[memoryview], **more: Any) -> None:
        seen.append(len(buffers))
        read_pieces(store, name, byte_offset, buffers, **more)

    monkeypatch.setattr(LocalStore, "read_pieces", counted)
    return seen


@pytest.mark.parametrize("verify", [True, False])
def test_small_tensors_are_read_into_their_memory(tmp_path: Path, pieces: list[int], verify: bool) -> None:
    state = state_of()
    bcp.save(tmp_path, {"model": state})
    target = emptied(state)
    report = bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(verify=verify))
    assert all(same_bits(target[name], tensor) for name, tensor in state.items())
    assert sum(pieces) >= NUM
    assert report.num_tensors == NUM


def test_those_that_are_left_out_keep_their_values(tmp_path: Path, pieces: list[int]) -> None:
    state = state_of()
    bcp.save(tmp_path, {"model": state})
    target = emptied(state)
    bcp.load(tmp_path, {"model": target}, exclude=["model.layer.*7"])
    assert all(same_bits(target[name], tensor) != name.endswith("7") for name, tensor in state.items())
    assert sum(pieces) > NUM // 2


def test_parts_of_a_bigger_tensor_and_tensors_of_other_layouts_are_filled_beside_them(tmp_path: Path) -> None:
    state = state_of()
    bcp.save(tmp_path, {"model": state})
    target = emptied(state)
    names = list(state)
    for name in names[::5]:
        target[name] = target[name].t().contiguous().t()
    for name in names[1::5]:
        target[name] = target[name].to(torch.float64)
    whole = torch.zeros(1 << 20)
    target[names[0]] = whole[17 : 17 + state[names[0]].numel()].view(state[names[0]].shape)
    bcp.load(tmp_path, {"model": target}, cast=True)
    for number, (name, tensor) in enumerate(state.items()):
        assert same_bits(target[name], tensor.to(torch.float64) if number % 5 == 1 else tensor), name
    assert not whole[:17].any()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_damage_in_one_of_them_is_found(tmp_path: Path, pieces: list[int], place: str) -> None:
    state = state_of()
    bcp.save(tmp_path, {"model": state})
    name = f"model.layer.{ {'first': 0, 'middle': NUM // 2, 'last': NUM - 1}[place] }"
    manifest = bcp.open(tmp_path)._source.manifest
    chunk = manifest.tensors[name].chunks[0]
    path = tmp_path / manifest.files[chunk.file].name
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset + chunk.byte_length - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(bcp.CheckpointCorruptError, match="are damaged") as caught:
        bcp.load(tmp_path, {"model": emptied(state)})
    assert "overwritten" in caught.value.message
    assert pieces


def test_a_dict_of_tensors_alone_is_not_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"a.long.name.of.a.layer.{number}": torch.full((3,), float(number)) for number in range(1000)}
    bcp.save(tmp_path, {"model": state})
    monkeypatch.setattr(checkpoint_view, "decode_plain", lambda _: pytest.fail("the names are known"))
    target = emptied(state)
    bcp.load(tmp_path, {"model": dict(reversed(target.items()))})
    assert all(same_bits(target[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("more", ["a tensor less", "a tensor more", "a number", "another shape"])
def test_what_such_a_dict_lacks_is_told(tmp_path: Path, more: str) -> None:
    state: dict[str, Any] = {
        f"a.long.name.of.a.layer.{number}": torch.full((3,), float(number)) for number in range(1000)
    }
    bcp.save(tmp_path, {"model": state})
    target: dict[str, Any] = emptied(state)
    name = "a.long.name.of.a.layer.500"
    if more == "a tensor less":
        del target[name]
    elif more == "a tensor more":
        target["new"] = torch.zeros(3)
    else:
        target[name] = 5 if more == "a number" else torch.zeros(4)
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(tmp_path, {"model": target})
    assert ("model.new" if more == "a tensor more" else f"model.{name}") in caught.value.message
    assert not any(tensor.any() for tensor in target.values() if isinstance(tensor, torch.Tensor))


def test_references_of_a_dict_of_tensors_are_decoded_together() -> None:
    names = tuple(f"layer.{number}" for number in range(1000))
    fqns, _, data = plain_data.encode_refs("model", names)
    assert plain_data.decode_refs(data) == dict(zip(names, fqns, strict=True))
    for other in ({}, {"a": 1}, {"a": torch.zeros(2)}, {"a": {"b": torch.zeros(2)}}, [torch.zeros(2)]):
        found = plain_data.decode_refs(plain_data.encode_plain(other, "model"))
        assert not found
    assert plain_data.decode_refs(data[:-1]) is None
