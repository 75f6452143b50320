"""What another rank has read is received right in the memory of a tensor where it is contiguous there, and so is what a
rank reads for itself and for others.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.distributed.connection import Connection
from bytecheckpoint.storage.backends.local_store import LocalStore
from distributed.workers import WorkerPool

MiB = 1 << 20


def load_noting(rank: int, world_size: int, path: str) -> tuple[int, int, int]:
    """Bytes of a tensor that were read into its memory, those received there, and those of the tensor."""
    tensor = torch.arange(2 * MiB).float()
    bcp.save(path, {"w": tensor})
    target = torch.zeros_like(tensor)
    start, end = target.data_ptr(), target.data_ptr() + target.nbytes
    inside: dict[str, list[int]] = {"read": [], "received": []}
    read_into, receive_into = LocalStore.read_into, Connection.receive_into

    def note(kind: str, buffer: memoryview) -> None:
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        if start <= address and address + buffer.nbytes <= end:
            inside[kind].append(buffer.nbytes)

    def noting_read(self, name, byte_offset, buffer, **options):
        note("read", buffer)
        read_into(self, name, byte_offset, buffer, **options)

    def noting_receipt(self, buffer):
        note("received", buffer)
        receive_into(self, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read_into", noting_read)
        patch.setattr(Connection, "receive_into", noting_receipt)
        bcp.load(path, {"w": target}, options=bcp.LoadOptions(exchange="on", timeout_s=60))
    assert torch.equal(target, tensor)
    return sum(inside["read"]), sum(inside["received"]), target.nbytes


def test_replicas_are_read_and_received_into_their_memory(workers: WorkerPool, tmp_path: Path) -> None:
    for read, received, of_tensor in workers.run(load_noting, str(tmp_path), world_size=2):
        assert read + received == of_tensor
        assert min(read, received) >= of_tensor // 3
