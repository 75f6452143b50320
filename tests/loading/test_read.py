"""bcp.open: a checkpoint read without a model, down to the single element, and never a damaged byte."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_tensors import DTYPES, random_bits, same_bits
from torch import nn
from training import Tied, mlp, same_module

import bytecheckpoint as bcp
from bytecheckpoint import checkpoint

MiB = 1 << 20
SHAPES = [(), (7,), (5, 6), (4, 3, 5), (2, 0, 3), (600, 700)]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {f"t{len(shape)}.{index}": random_bits(torch.float32, shape, index) for index, shape in enumerate(SHAPES)}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> bcp.Checkpoint:
    path = tmp_path_factory.mktemp("opened")
    bcp.save(path, {"s": tensors, "n": 1, "d": {"a": [1, (2,)], "e": {}}}, metadata={"run": "x"}, step=3)
    return bcp.open(path)


def test_what_is_in_it(opened: bcp.Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    names = [f"s.{name}" for name in tensors]
    assert sorted(opened.keys()) == sorted(opened) == sorted(names)
    assert len(opened) == len(names)
    assert names[0] in opened
    assert "s" not in opened
    assert all(opened[f"s.{name}"].shape == tensor.shape for name, tensor in tensors.items())
    assert all(opened[f"s.{name}"].dtype == tensor.dtype for name, tensor in tensors.items())
    assert opened.objects == {"n": 1, "d": {"a": [1, (2,)], "e": {}}}


def test_its_info(opened: bcp.Checkpoint) -> None:
    info = opened.info
    assert (info.step, info.num_tensors, info.world_size, dict(info.metadata)) == (3, len(SHAPES), 1, {"run": "x"})
    assert info.path.endswith("step_00000003")
    assert info.num_bytes > 600 * 700 * 4
    assert info.created_at is not None
    assert len(info.save_id) > 8


def indices_of(length: int) -> st.SearchStrategy[Any]:
    bounds = st.none() | st.integers(-length - 2, length + 2)
    slices = st.builds(slice, bounds, bounds, st.none() | st.integers(1, 4))
    return slices | st.integers(-length, length - 1) if length else slices


@st.composite
def indexings(draw: st.DrawFn) -> tuple[int, Any]:
    number = draw(st.integers(0, len(SHAPES) - 1))
    shape = SHAPES[number]
    at = draw(st.integers(0, len(shape)))
    until = draw(st.integers(at, len(shape)))
    head = [draw(indices_of(length)) for length in shape[:at]]
    if not draw(st.booleans()):
        return number, tuple(head)
    return number, (*head, ..., *(draw(indices_of(length)) for length in shape[until:]))


@given(indexings())
@settings(max_examples=150, deadline=None)
def test_indexing_is_that_of_the_tensor(
    opened: bcp.Checkpoint, tensors: dict[str, torch.Tensor], indexing: tuple[int, Any]
) -> None:
    number, index = indexing
    name = list(tensors)[number]
    found, expected = opened[f"s.{name}"][index], tensors[name][index]
    assert same_bits(found, expected)


@pytest.mark.parametrize("index", [3, -1, slice(1, 3), slice(None), ..., (), torch.tensor(2)], ids=str)
def test_an_index_need_not_be_a_tuple(opened: bcp.Checkpoint, tensors: dict[str, torch.Tensor], index: Any) -> None:
    assert same_bits(opened["s.t2.2"][index], tensors["t2.2"][index])


@pytest.mark.parametrize(
    "index",
    [5, -6, (0, 6), (0, 0, 0), (..., ...), (0, ..., 0, 0), "a", 1.5, None, True, [0, 1], slice(None, None, -1)],
    ids=str,
)
def test_what_is_no_index_is_an_index_error(opened: bcp.Checkpoint, index: Any) -> None:
    with pytest.raises((IndexError, TypeError)):
        opened["s.t2.2"][index]


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([2]),
        torch.tensor([True]),
        torch.tensor(True),
        np.array([2]),
        np.array([True]),
        np.array([0, 1]),
        torch.tensor([0, 1]),
    ],
    ids=repr,
)
def test_a_list_of_positions_or_a_mask_is_an_index_error_also_with_one_element(
    opened: bcp.Checkpoint, index: Any
) -> None:
    """A tensor gets another dimension by them; taken for an integer, they would read another part."""
    for each in (index, (slice(None), index)):
        with pytest.raises(IndexError, match="is indexed with integers, slices"):
            opened["s.t2.2"][each]


def test_a_result_has_memory_of_its_own(opened: bcp.Checkpoint) -> None:
    first = opened["s.t2.2"][1]
    first.fill_(0)
    assert opened["s.t2.2"][1].any()
    assert first.untyped_storage().nbytes() <= 6 * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_slices_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, (6, 5))
    bcp.save(tmp_path, {"a": tensor})
    view = bcp.open(tmp_path)["a"]
    assert view.dtype == dtype
    assert same_bits(view[1:4, 2], tensor[1:4, 2])
    assert same_bits(view[::2, ::3], tensor[::2, ::3])


def test_state_dict_is_what_load_state_dict_takes(tmp_path: Path) -> None:
    source, target = Tied(), Tied(is_tied=False)
    bcp.save(tmp_path, {"model": source, "model_ema": mlp(0), "n": 1})
    opened = bcp.open(tmp_path)
    target.load_state_dict(opened.state_dict("model."))
    assert same_module(source, target)
    averaged = mlp(1)
    averaged.load_state_dict(opened.state_dict(prefix="model_ema."))
    assert same_module(averaged, mlp(0))
    assert set(opened.state_dict()) == set(opened.keys())
    assert opened.state_dict("none.") == {}


def test_names_that_are_not_there(opened: bcp.Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="'nothing' is not a tensor of"):
        opened["nothing"]
    with pytest.raises(KeyError):
        opened["n"]
    with pytest.raises(bcp.CheckpointNotFoundError, match="no value of single ranks named 'n'"):
        opened.rank_values("n")


def test_a_name_that_is_not_there_is_compared_with_few_and_by_get_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_NUM_COMPARED", 4)
    bcp.save(tmp_path, {"model": {f"layer{number:02}": torch.ones(1) for number in range(20)}})
    opened, compared = bcp.open(tmp_path), []

    def noting(name: str, others: Iterable[str], *limits: Any) -> list[str]:
        compared.append(others)
        return get_close_matches(name, others, *limits)

    monkeypatch.setattr(checkpoint, "get_close_matches", noting)
    assert opened.get("model.layer100") is None
    assert opened.get("model.layer100", 5) == 5
    assert compared == []
    assert opened.get("model.layer10").shape == (1,)
    with pytest.raises(KeyError, match=r"'model\.layer10'"):
        opened["model.layer100"]
    assert [{*others} for others in compared] == [{f"model.layer{number}" for number in ("10", "11", "00")}]
    with pytest.raises(KeyError, match=r"'model\.layer03'"):
        opened["ddp.model.layer03"]


def test_values_of_single_ranks(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"rng": bcp.RankLocal({"seed": 5, "t": torch.ones(2)}), "a": torch.ones(1)})
    opened = bcp.open(tmp_path)
    values = opened.rank_values("rng")
    assert list(values) == [0]
    assert values[0]["seed"] == 5
    assert values[0]["t"].tolist() == [1.0, 1.0]
    assert list(opened.keys()) == ["a"]
    assert opened.objects == {}


def test_only_the_bytes_that_are_needed_are_read(tmp_path: Path) -> None:
    """Damage elsewhere in the file is not met: what is not asked for is not read."""
    tensor = random_bits(torch.uint8, (8 * MiB,))
    bcp.save(tmp_path, {"a": tensor})
    flip(tmp_path, -1)
    view = bcp.open(tmp_path)["a"]
    assert same_bits(view[5 : 6 * MiB], tensor[5 : 6 * MiB])
    with pytest.raises(bcp.CheckpointCorruptError):
        view[6 * MiB :]


def flip(path: Path, position: int) -> Path:
    (file,) = (path / "data").iterdir()
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << (position % 8)
    file.write_bytes(content)
    return file


def read_into(path: Path, target: str) -> None:
    memory = {
        "flat": torch.zeros(700, 700),
        "strided": torch.zeros(700, 700).t(),
        "cast": torch.zeros(700, 700).double(),
    }
    if target == "slice":
        bcp.open(path)["s.a"][:, 3]
    else:
        bcp.load(path, {"s": {"a": memory[target]}}, cast=target == "cast")


@pytest.mark.parametrize("where", [0.0, 0.2, 0.4, 0.6, 0.8, 0.9999])
@pytest.mark.parametrize("target", ["flat", "strided", "cast", "slice"])
def test_a_flipped_bit_in_what_is_read_is_found(tmp_path: Path, where: float, target: str) -> None:
    num_bytes = 4 * 700 * 700
    bcp.save(tmp_path, {"s": {"a": random_bits(torch.float32, (700, 700))}})
    file = flip(tmp_path, 4096 + int(where * num_bytes))
    with pytest.raises(bcp.CheckpointCorruptError, match=r"s\.a") as error:
        read_into(tmp_path, target)
    assert error.value.kind == "checksum"
    assert file.name in str(error.value)
    assert "expected" in str(error.value)


def test_without_verification_damage_is_read_as_it_is(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"a": torch.zeros(100)})
    flip(tmp_path, 4096 + 8)
    options = bcp.LoadOptions(verify=False)
    assert bcp.open(tmp_path, options=options)["a"][...].count_nonzero() == 1
    target = torch.zeros(100)
    bcp.load(tmp_path, {"a": target}, options=options)
    assert target.count_nonzero() == 1


def test_a_damaged_neighbour_does_not_matter(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(600, 600), "b": nn.Linear(600, 600)})
    bcp.save(tmp_path, {"model": model})
    flip(tmp_path, -5)
    opened = bcp.open(tmp_path)
    assert torch.equal(opened["model.a.weight"][...], model["a"].weight)
    with pytest.raises(bcp.CheckpointCorruptError, match="checksum"):
        opened.state_dict()
