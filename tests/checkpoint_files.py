"""The files of a checkpoint, and damage to them."""

from __future__ import annotations

from pathlib import Path


def data_file(root: Path, step: int = 1000) -> Path:
    (path,) = (root / f"step_{step:08d}" / "data").iterdir()
    return path


def flip(path: Path, byte_offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte_offset] ^= 0x10
    path.write_bytes(content)
