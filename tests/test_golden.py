"""A checkpoint of every released format version loads for ever: each folder under tests/golden was written by the
release that it is named after, and is never written again.

A new one is made by `python tests/test_golden.py NAME`, once, when a format version is released.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import codecs_in, compress_checkpoint

import bytecheckpoint as bcp

GOLDEN = Path(__file__).parent / "golden"


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def state(*, filled: bool) -> dict[str, Any]:
    model = Tied()
    with torch.no_grad():
        model.embed.weight.copy_(torch.arange(15.0).reshape(5, 3) if filled else torch.zeros(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25 if filled else 0.5)
    if filled:
        model.embed.weight.grad = torch.ones(5, 3)
        optimizer.step()
    fill = 1 if filled else 0
    return {
        "model": model,
        "optimizer": optimizer,
        "tensors": {
            "bf16": torch.full((3, 2), 1.5 * fill, dtype=torch.bfloat16),
            "fp8": torch.full((4,), 2.0 * fill).to(torch.float8_e4m3fn),
            "complex": torch.full((2,), complex(fill, -fill), dtype=torch.complex128),
            "scalar": torch.tensor(7 * fill),
            "empty": torch.zeros(0, 5),
            "compressed": torch.arange(150_000).reshape(500, 300) * fill,
            "compressed_bf16": torch.arange(3000).to(torch.bfloat16) * fill,
        },
        "plain": {"tuple": (1, "a") if filled else (), "ints": {3: None} if filled else {}, "big": 2**70 * fill},
        "local": bcp.RankLocal([fill, b"x"] if filled else None),
        "extra_state": {"epoch": 3 * fill},
    }


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_checkpoint_of_a_released_version_loads(name: str) -> None:
    expected, found = state(filled=True), state(filled=False)
    bcp.load(GOLDEN / name, found)
    assert torch.equal(found["model"].embed.weight, expected["model"].embed.weight)
    assert found["model"].head.weight is found["model"].embed.weight
    for key, value in expected["tensors"].items():
        assert torch.equal(found["tensors"][key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), key
    old, new = (of["optimizer"].state[of["model"].embed.weight] for of in (expected, found))
    assert all(torch.equal(old[key], new[key]) for key in old)
    assert found["optimizer"].param_groups[0]["lr"] == 0.25
    assert found["plain"] == expected["plain"]
    assert found["local"].value == [1, b"x"]
    assert found["extra_state"] == {"epoch": 3}


def test_a_released_checkpoint_says_what_it_is() -> None:
    info = bcp.open(GOLDEN / "v1.0").info
    assert (info.step, info.world_size, info.metadata) == (12, 1, {"made_by": "0.1.0"})


def test_a_part_of_what_is_compressed_in_it_can_be_read() -> None:
    opened = bcp.open(GOLDEN / "v1.0")
    codecs = codecs_in(opened.manifest)
    compressed = {fqn for fqn in codecs if codecs[fqn] == {"zstd"}}
    assert compressed == {"tensors.compressed", "tensors.compressed_bf16"}
    assert opened["tensors.compressed"][499, 1:3].tolist() == [149_701, 149_702]


if __name__ == "__main__":
    bcp.save(GOLDEN / sys.argv[1], state(filled=True), step=12, metadata={"made_by": "0.1.0"})
    folder = GOLDEN / sys.argv[1] / "step_00000012"
    shutil.rmtree(folder / "telemetry")  # how the save went on some machine
    compress_checkpoint(folder, lambda fqn: "zstd" if fqn.startswith("tensors.compressed") else "none")
