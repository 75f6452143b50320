"""`bcp convert`: every format that can be read, written in every format, equal to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from packed_checkpoints import compress_checkpoint
from safetensors.torch import save_file

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TARGETS = ("bcp", "hf", "dcp", "torch")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors() -> dict[str, torch.Tensor]:
    """Names within a model; every shape and dtype that all formats hold."""
    torch.manual_seed(1)
    return {
        "embed.weight": torch.randn(33, 7),
        "layers.0.weight": torch.randn(5, 3, 2, dtype=torch.bfloat16),
        "layers.0.scale": torch.tensor(1.5, dtype=torch.float64),
        "layers.10.ids": torch.arange(11, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "quantized": torch.randn(9, 5).to(torch.float8_e4m3fn),
        "other.quantized": torch.randn(4).to(torch.float8_e5m2),
        "empty": torch.zeros(0, 3),
        "u16": torch.arange(7, dtype=torch.int32).to(torch.uint16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "half": torch.randn(3, dtype=torch.float16),
        "complex": torch.randn(4, dtype=torch.complex64),
    }


def write_own(path: Path) -> None:
    bcp.save(path, {"model": tensors(), "epoch": 3})


def write_compressed(path: Path) -> None:
    bcp.save(path, {"model": {**tensors(), "long": torch.zeros(1 << 15)}, "epoch": 3})
    compress_checkpoint(path)


def write_hf(path: Path) -> None:
    path.mkdir()
    save_file(tensors(), path / "model.safetensors", {"format": "pt"})


def write_torch(path: Path) -> None:
    torch.save({"model": tensors(), "epoch": 3}, path)


def write_dcp(path: Path) -> None:
    dcp.save({"model": tensors(), "epoch": 3}, checkpoint_id=path, no_dist=True)


SOURCES = {"bcp": write_own, "zstd": write_compressed, "hf": write_hf, "torch": write_torch, "dcp": write_dcp}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """By format; not to be changed."""
    root = tmp_path_factory.mktemp("sources")
    for name, write in SOURCES.items():
        write(root / name)
    return {name: root / name for name in SOURCES}


def model_of(path: Path) -> dict[str, torch.Tensor]:
    found = bcp.open(path)
    return {fqn.removeprefix("model."): found[fqn][...] for fqn in found.keys()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_format_in_every_other(call, sources, tmp_path, source, to) -> None:
    result = call("convert", sources[source], tmp_path / "target", "--to", to, "--json")
    assert result.code == 0, result.out
    expected = model_of(sources[source])
    assert_same(model_of(tmp_path / "target"), expected)
    assert result.json["num_tensors"] == len(expected)
    if to != "hf" and source != "hf":
        assert bcp.open(tmp_path / "target").objects["epoch"] == 3
    assert call("verify", tmp_path / "target").code == 0
