"""What tests of foreign formats share: tensors compared to the bit, and a global that must never be run."""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner

from bytecheckpoint.tools.main import cli


class Touch:
    """Pickled, it is an order to make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def convert(source: Path, target: Path, *options: str) -> None:
    """`bcp convert`, into the library's own format unless the options say another."""
    options = options or ("--to", "bcp")
    result = CliRunner().invoke(cli, ["convert", str(source), str(target), *options])
    assert result.exit_code == 0, result.output
