"""Every value that torch can hold comes back with the same bits, from and into every memory layout; what cannot be
saved is one error before anything is written.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from sample_tensors import DTYPES, LAYOUTS, SHAPE, bits_of, random_bits, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves

# torch calls its own complex32, CSR and nested tensors experimental.
pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support", "ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:torch.quantize"
)

MiB = 1 << 20
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def by_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
def test_bits_survive_from_every_layout_into_every_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    contents = {
        f"{source} to {target}": random_bits(dtype, SHAPE, seed)
        for seed, (source, target) in enumerate((source, target) for source in LAYOUTS for target in LAYOUTS)
    }
    sources = {name: LAYOUTS[name.split(" to ")[0]](content) for name, content in contents.items()}
    targets = {name: LAYOUTS[name.split(" to ")[1]](random_bits(dtype, SHAPE, 99)) for name in contents}
    before = {name: (id(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in targets.items()}

    bcp.save(tmp_path, {"tensors": sources})
    bcp.load(tmp_path, {"tensors": targets})

    assert [name for name, content in contents.items() if not same_bits(sources[name], content)] == []
    assert [name for name, content in contents.items() if not same_bits(targets[name], content)] == []
    assert {name: (id(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in targets.items()} == before


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
def test_scalars_and_empty_tensors_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(), (0,), (0, 5), (5, 0), (2, 0, 3), (1,), (1, 1, 1)]
    sources = {f"shape {shape}": random_bits(dtype, shape) for shape in shapes}
    targets = {name: random_bits(dtype, tuple(tensor.shape), 1) for name, tensor in sources.items()}
    bcp.save(tmp_path, sources)
    bcp.load(tmp_path, targets)
    assert [name for name in sources if not same_bits(targets[name], sources[name])] == []
    opened = bcp.open(tmp_path)
    assert [name for name in sources if not same_bits(opened[name][...], sources[name])] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
def test_safetensors_opens_the_data_file_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    sources = {"plain": random_bits(dtype, (3, 5)), "strided": LAYOUTS["transposed"](random_bits(dtype, SHAPE))}
    bcp.save(tmp_path, {"model": sources})
    (file,) = (tmp_path / "data").iterdir()
    loaded = safetensors.torch.load_file(file)
    with safetensors.safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == {"model.plain", "model.strided"}
        assert {name: bits_of(opened.get_tensor(name)) for name in opened.keys()} == {
            f"model.{name}": bits_of(tensor) for name, tensor in sources.items()
        }
    assert {name: bits_of(tensor) for name, tensor in loaded.items()} == {
        f"model.{name}": bits_of(tensor) for name, tensor in sources.items()
    }


SAFETENSORS_DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn]


def test_safetensors_gives_back_the_very_tensors_where_it_knows_the_dtype(tmp_path: Path) -> None:
    sources = {by_name(dtype): random_bits(dtype, (3, 5)) for dtype in SAFETENSORS_DTYPES}
    bcp.save(tmp_path, {"model": sources})
    (file,) = (tmp_path / "data").iterdir()
    loaded = safetensors.torch.load_file(file)
    assert [name for name in sources if not same_bits(loaded[f"model.{name}"], sources[name])] == []


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((2, 3, 4, 5), torch.channels_last), ((2, 3, 2, 4, 5), torch.channels_last_3d)],
    ids=["2d", "3d"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex128], ids=by_name)
def test_channels_last(
    tmp_path: Path, shape: tuple[int, ...], memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    content = random_bits(dtype, shape)
    source = {
        "a": content.contiguous(memory_format=memory_format),
        "b": content,
        "c": content.permute(1, 0, *range(2, len(shape))),
    }
    target = {
        "a": torch.zeros(shape, dtype=dtype),
        "b": torch.zeros(shape, dtype=dtype).contiguous(memory_format=memory_format),
        "c": torch.zeros(source["c"].shape, dtype=dtype).contiguous(memory_format=memory_format),
    }
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert [name for name in source if not same_bits(target[name], source[name])] == []
    assert target["b"].is_contiguous(memory_format=memory_format)


COMPLEX = [torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", COMPLEX, ids=by_name)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_conjugated_views(tmp_path: Path, dtype: torch.dtype, is_transposed: bool) -> None:
    content = random_bits(dtype, SHAPE).nan_to_num(1.0)
    source = {"from": content.conj(), "into": content, "both": content.conj(), "row": content.conj()[1]}
    shape = (SHAPE[1], SHAPE[0]) if is_transposed else SHAPE
    memory = {name: torch.zeros(shape, dtype=dtype) for name in source}
    memory["row"] = torch.zeros(SHAPE[1], dtype=dtype)
    target = {
        name: tensor.conj() if name in {"into", "both"} else tensor
        for name, tensor in ((name, tensor.t() if is_transposed else tensor) for name, tensor in memory.items())
    }
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert [name for name in source if not same_bits(target[name], source[name])] == []
    assert target["into"].is_conj()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.complex64], ids=by_name)
def test_negated_views(tmp_path: Path, dtype: torch.dtype) -> None:
    content = random_bits(dtype, SHAPE)
    if dtype != torch.int32:
        content = content.nan_to_num(1.0)
    memory = torch.zeros(SHAPE, dtype=dtype)
    source = {
        "from": torch._neg_view(content),
        "into": content,
        "imag": torch.complex(torch.ones(3), torch.ones(3)).conj().imag,
    }
    target = {"from": torch.zeros(SHAPE, dtype=dtype), "into": torch._neg_view(memory), "imag": torch.zeros(3)}
    assert source["imag"].is_neg()
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert [name for name in source if not same_bits(target[name], source[name])] == []


@pytest.mark.parametrize("wrap", [dict, bcp.RankLocal], ids=["plain", "rank_local"])
@pytest.mark.parametrize("name", ["state", "extra_state"])
def test_one_element_with_a_stride_is_one_element(tmp_path: Path, name: str, wrap: Any) -> None:
    """Torch calls it contiguous, whatever its stride is."""
    weight = torch.arange(6.0).view(3, 2)
    bcp.save(tmp_path, {name: wrap({"one": weight[:1, 1], "matrix": weight[1:2, :1].T})})
    for source in (torch.zeros(3, 2), torch.zeros(3, 4)):
        given = wrap({"one": source[:1, 1], "matrix": source[1:2, :1].T})
        bcp.load(tmp_path, {name: given})
        into = given.value if isinstance(given, bcp.RankLocal) else given
        assert [into["one"].item(), into["matrix"].item()] == [1.0, 2.0]


def test_expanded_and_overlapping_tensors_are_saved_whole(tmp_path: Path) -> None:
    source = {
        "expanded": torch.arange(3.0).expand(4, 3),
        "scalar": torch.tensor(7).expand(2, 2),
        "windows": torch.arange(6.0).unfold(0, 3, 1),
    }
    target = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in source.items()}
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert [name for name in source if not same_bits(target[name], source[name])] == []


@pytest.mark.parametrize(
    "view",
    [lambda memory: memory[:1].expand(4, 3), lambda memory: memory.reshape(-1).as_strided((4, 3), (1, 1))],
    ids=["expanded", "windows"],
)
def test_a_target_whose_elements_share_memory_is_refused_and_unchanged(tmp_path: Path, view: Any) -> None:
    bcp.save(tmp_path, {"good": torch.ones(2), "bad": torch.ones(4, 3)})
    memory = torch.zeros(4, 3)
    target = {"good": torch.zeros(2), "bad": view(memory)}
    with pytest.raises(bcp.CheckpointMismatchError, match="bad") as error:
        bcp.load(tmp_path, target)
    assert error.value.kind == "conflict"
    assert not memory.any()
    assert not target["good"].any()


def test_tensors_with_gradients_and_inference_tensors(tmp_path: Path) -> None:
    with torch.inference_mode():
        inference = torch.arange(6.0).reshape(2, 3)
        targets = {"inference": torch.zeros(2, 3), "inference_t": torch.zeros(3, 2).t()}
    leaf = torch.arange(4.0, requires_grad=True)
    sources = {
        "inference": inference,
        "inference_t": inference,
        "leaf": leaf,
        "result": leaf * 2,
        "leaf_t": leaf[:, None],
    }
    targets |= {"leaf": torch.zeros(4, requires_grad=True), "result": torch.zeros(4, requires_grad=True) * 1}
    targets |= {"leaf_t": torch.zeros(4, 2)[:, ::2].requires_grad_()}
    bcp.save(tmp_path, sources)
    bcp.load(tmp_path, targets)
    assert [name for name in sources if not same_bits(targets[name], sources[name])] == []
    assert targets["leaf"].requires_grad
    assert targets["leaf"].is_leaf


def test_loading_under_inference_mode_and_no_grad(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3.0)})
    for mode in (torch.inference_mode, torch.no_grad):
        target = {"a": torch.zeros(3, 2, requires_grad=True).t(), "b": torch.zeros(3, requires_grad=True)}
        with mode():
            bcp.load(tmp_path, target)
        assert torch.equal(target["a"], torch.arange(6.0).reshape(2, 3))
        assert torch.equal(target["b"], torch.arange(3.0))


def test_a_tensor_at_an_address_that_its_dtype_does_not_align(tmp_path: Path) -> None:
    def odd(seed: int) -> torch.Tensor:
        content = bytearray(random_bits(torch.uint8, (97,), seed).numpy().tobytes())
        return torch.frombuffer(content, dtype=torch.float32, offset=1, count=24)

    source, target = {"a": odd(0), "b": odd(1).view(4, 6).t()}, {"a": odd(2), "b": odd(3).view(6, 4)}
    assert source["a"].data_ptr() % 4
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert [name for name in source if not same_bits(target[name], source[name])] == []


def test_sizes_around_the_limits_of_extents_and_blocks(tmp_path: Path) -> None:
    """Large chunks have extents of their own, small ones share; every mixture has another seam."""
    sizes = [1, MiB - 1, 3, MiB, 5, MiB + 1, 7, 2 * MiB, 2 * MiB - 1, 4 * MiB + 9, 1, 16 * MiB + 3, 2]
    sources = {f"{index:02d}": random_bits(torch.uint8, (size,), index) for index, size in enumerate(sizes)}
    sources |= {
        "wide": random_bits(torch.float64, (MiB // 8 + 1,)),
        "half": random_bits(torch.bfloat16, (MiB // 2 - 1,)),
    }
    targets = {name: torch.zeros_like(tensor) for name, tensor in sources.items()}
    bcp.save(tmp_path, sources)
    bcp.load(tmp_path, targets)
    assert [name for name in sources if not same_bits(targets[name], sources[name])] == []


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_strided_tensors_with_little_scratch_memory(tmp_path: Path, verify: bool, threads: int) -> None:
    content = random_bits(torch.float32, (1801, 1501))  # more than scratch memory holds
    sources = {"from": content.t(), "into": content, "flat": content, "cast": content}
    targets = {
        "from": torch.zeros(1501, 1801),
        "into": torch.zeros(1501, 1801).t(),
        "flat": torch.zeros(1801, 1501),
        "cast": torch.zeros(1801, 1501, dtype=torch.float64),
    }
    bcp.save(tmp_path, sources)
    options = bcp.LoadOptions(scratch_bytes=8 * MiB, reader_threads=threads, verify=verify, max_gap_bytes=0)
    bcp.load(tmp_path, targets, cast=True, options=options)
    assert [name for name in ("from", "into", "flat") if not same_bits(targets[name], sources[name])] == []
    assert torch.equal(targets["cast"].isnan(), content.isnan())
    assert torch.equal(targets["cast"].nan_to_num(), content.double().nan_to_num())


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")  # noqa: PYI024  the untyped kind is the case


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def cut(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


UNSUPPORTED = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested_jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.ones(3, device="meta"),
    "meta_empty": lambda: torch.ones(0, 3, device="meta"),
    "quantized": quantized,
    "fake": fake,
    "object": object,
    "function": lambda: lambda: 0,
    "class": lambda: dict,
    "set_of_tuples": lambda: {(1, 2)},
    "frozenset_of_objects": lambda: frozenset([object()]),
    "dataclass": Settings,
    "namedtuple": lambda: Point(1, 2),
    "enum": lambda: Colour.RED,
    "str_subclass": lambda: Name("a"),
    "generator": torch.Generator,
    "device": lambda: torch.device("cpu"),
    "bytearray": lambda: bytearray(b"a"),
    "range": lambda: range(3),
    "object_array": lambda: np.array([object()], dtype=object),
    "datetime_array": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "record_array": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "tuple_key": lambda: {(1, 2): 3},
    "float_key": lambda: {1.5: 3},
    "none_key": lambda: {None: 3},
    "bool_key": lambda: {True: 3},
    "large_int_key": lambda: {2**64: 3},
    "deep": lambda: deep(100),
    "long_int": lambda: 10**4300,
    "uninitialized": lambda: torch.nn.LazyLinear(3).weight,
    "cut": lambda: cut(torch.ones(1000), 400),
    "cut_view": lambda: cut(torch.ones(1000)[:500], 400),
    "cut_strided": lambda: cut(torch.ones(50, 30).T, 400),
    "surrogate": lambda: "\ud800",
    "surrogate_key": lambda: {"\ud800": 1},
}


@pytest.mark.parametrize("make", UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
@pytest.mark.parametrize("name", ["state", "extra_state"])
def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, make: Any, name: str
) -> None:
    root = tmp_path / "checkpoint"
    with pytest.raises(bcp.CheckpointSaveError, match=rf"{name}\.layers\.1\.bad") as error:
        bcp.save(root, {"good": torch.ones(3), name: {"layers": [torch.ones(2), {"bad": make()}]}})
    assert error.value.kind == "unsupported_value"
    assert not root.exists()


@pytest.mark.parametrize("dtype", ["object", "datetime64[D]", "[('a', '<i4')]"])
def test_an_array_is_refused_with_its_dtype(tmp_path: Path, dtype: str) -> None:
    array = np.zeros(2, dtype=[("a", "<i4")] if dtype.startswith("[") else dtype)
    with pytest.raises(bcp.CheckpointSaveError, match=re.escape(f"its dtype is {dtype}")):
        bcp.save(tmp_path / "checkpoint", {"array": array})


@pytest.mark.parametrize("make", UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
@pytest.mark.parametrize("wrap", [bcp.RankLocal, lambda value: value], ids=["rank_local", "top_level"])
def test_what_cannot_be_saved_is_refused_at_the_top_and_in_rank_local(tmp_path: Path, make: Any, wrap: Any) -> None:
    if wrap is bcp.RankLocal and make is torch.Generator:
        pytest.skip("RankLocal takes generators")
    root = tmp_path / "checkpoint"
    with pytest.raises(bcp.CheckpointSaveError, match="bad") as error:
        bcp.save(root, {"good": torch.ones(3), "bad": wrap(make())})
    assert error.value.kind == "unsupported_value"
    assert not root.exists()


class Tagged(torch.Tensor):
    """A subclass that only adds Python attributes."""


def test_a_tensor_subclass_without_memory_of_its_own_kind_is_saved_as_a_tensor(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"a": torch.arange(3.0).as_subclass(Tagged)})
    target = torch.zeros(3).as_subclass(Tagged)
    bcp.load(tmp_path, {"a": target})
    assert target.tolist() == [0.0, 1.0, 2.0]
    assert type(target) is Tagged


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_ints_may_hold_some_beyond_64_bits(kind: type) -> None:
    for odd in (1 << 64, -(1 << 63) - 1, 1 << 200):
        value = kind([*range(600), odd, 7])
        assert decode_plain(encode_plain(value, "numbers")) == value


def test_a_tensor_in_a_list_of_numbers_is_a_leaf() -> None:
    tensor = torch.ones(2)
    assert list(leaves([1, 2.0, tensor], "a")) == ["a.0", "a.1", "a.2"]
    assert leaves((1, [2, [3, tensor]]), "a")["a.1.1.1"] is tensor
    assert list(leaves([1, [2, 3]], "a")) == ["a"]
