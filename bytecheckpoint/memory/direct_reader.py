"""Reads from a disk straight into device memory, past the host, by GPUDirect Storage where kvikio is installed. Nothing
can verify such bytes, because checksums are computed on the host. Knows no plans and no tensors of a state.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from bytecheckpoint.errors import CheckpointCorruptError, StorageError
from bytecheckpoint.memory.cuda_device import on_cuda


class DirectRead(NamedTuple):
    """Consecutive bytes of a file, and where they go."""

    byte_offset: int
    target: torch.Tensor
    """Flat bytes on a device."""


class DirectReader(Protocol):
    """Reads ranges of files into the memory of devices."""

    def read(self, path: str, reads: Sequence[DirectRead]) -> None:
        """Makes all `reads` and returns when the bytes are in their targets. There must be at least one read, and all
        targets must be on one device. The reads are not ordered by a stream: nothing may be using the targets.

        Raises StorageError (unavailable) or CheckpointCorruptError (truncated); no read is under way then.
        """


class KvikioReader:
    """GPUDirect Storage through kvikio, which cuts reads into tasks for threads of its own."""

    def __init__(self, kvikio: ModuleType) -> None:
        self._kvikio = kvikio

    def read(self, path: str, reads: Sequence[DirectRead]) -> None:
        reading: list[tuple[DirectRead, Any]] = []
        try:
            with on_cuda(reads[0].target.device), self._kvikio.CuFile(path, "r") as file, ExitStack() as waiting:
                for read in reads:
                    future = file.pread(read.target, read.target.nbytes, read.byte_offset)
                    waiting.callback(future.get)  # also after a failure: until then it writes to its target
                    reading.append((read, future))
                waiting.pop_all()
                found = _wait(reading)
        except (OSError, RuntimeError) as error:
            raise StorageError(
                f'{path} could not be read straight into device memory: {error}. Load with LoadOptions(direct="off")',
                kind="unavailable",
            ) from error
        for read, num_bytes in found:
            if num_bytes != read.target.nbytes:
                end = read.byte_offset + read.target.nbytes
                raise CheckpointCorruptError(
                    f"{path} ends at byte {read.byte_offset + num_bytes}, and the checkpoint needs it up to byte {end}",
                    kind="truncated",
                )


def _wait(reading: Sequence[tuple[DirectRead, Any]]) -> list[tuple[DirectRead, int]]:
    """Waits until all reads have ended. Returns the number of bytes that each has read, or raises the first error."""
    found: list[tuple[DirectRead, int]] = []
    errors: list[Exception] = []
    for read, future in reading:
        try:
            found.append((read, int(future.get())))
        except (OSError, RuntimeError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def find_direct_reader() -> DirectReader | None:
    """Returns a reader; None if kvikio is not installed, or cannot be used here."""
    try:
        return KvikioReader(importlib.import_module("kvikio"))
    except (ImportError, OSError, RuntimeError):
        return None
