"""Files that each rank writes of what it holds: torch.save's and safetensors'. Nothing is synced."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.states import HeldState


def rank_file(folder: Path, held: HeldState, suffix: str) -> Path:
    """Returns the file of this rank; where all ranks hold the same, one for all."""
    return folder / f"{0 if held.is_replicated else held.rank}.{suffix}"


def is_writer(held: HeldState) -> bool:
    return held.rank == 0 or not held.is_replicated


def write_torch(folder: Path, held: HeldState) -> Path:
    path = rank_file(folder, held, "pt")
    if is_writer(held):
        torch.save(held.local_tensors, path)
    return path


def write_safetensors(folder: Path, held: HeldState) -> Path:
    path = rank_file(folder, held, "safetensors")
    if is_writer(held):
        save_file(held.local_tensors, path)
    return path
