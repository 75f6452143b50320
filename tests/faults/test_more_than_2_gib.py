"""A tensor of more than 2 GiB, which no single system call moves: written, verified and read to its last byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.tools.main import cli

NUM_BYTES = (2 << 30) + 8192
PIECE_BYTES = 4 << 20


def available_bytes() -> int:
    """Of memory, as Linux reckons it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found) << 10


def is_counted(tensor: torch.Tensor) -> bool:
    """Whether all numbers are those of their positions, piece by piece."""
    pieces = tensor.split(PIECE_BYTES)
    starts = range(0, NUM_BYTES // 8, PIECE_BYTES)
    return all(
        torch.equal(piece, torch.arange(start, start + len(piece))) for start, piece in zip(starts, pieces, strict=True)
    )


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_tensor_of_more_than_2_gib_is_written_and_read(tmp_path: Path, is_async: bool) -> None:
    if shutil.disk_usage(tmp_path).free < NUM_BYTES + (1 << 30):
        pytest.skip("needs 3 GiB of disk")
    if available_bytes() < 2 * NUM_BYTES + (2 << 30):
        pytest.skip("needs 6 GiB of memory")
    state = {"x": torch.arange(NUM_BYTES // 8)}
    bcp.save(tmp_path, state, async_save=is_async).result()
    (file,) = (tmp_path / "data").iterdir()
    assert file.stat().st_size > NUM_BYTES
    state["x"].zero_()
    bcp.load(tmp_path, state)
    assert is_counted(state["x"])
    with file.open("r+b") as opened:  # the last byte is looked at, too
        opened.seek(-1, 2)
        opened.write(b"\xff")
    assert CliRunner().invoke(cli, ["verify", str(tmp_path)]).exit_code == 1
    with pytest.raises(bcp.CheckpointCorruptError):
        bcp.load(tmp_path, state)
    file.unlink()
