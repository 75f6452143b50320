"""A device that copies as late as it may: what is queued is done when somebody waits for it, and not before. Whoever
uses memory again too early, or does not wait at the end, is found out by the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch


class LateEvent(NamedTuple):
    lane: LateLane
    number: int
    """How many copies come before it."""

    def query(self) -> bool:
        return self.lane.num_done >= self.number

    def synchronize(self) -> None:
        self.lane.do(self.number)


class LateLane:
    """The way to tensors on the host, as if they were on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[memoryview] = []
        self.num_done = 0
        self.most_waiting = 0
        self.is_closed = False
        self._queued: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    def new_block(self, num_bytes: int) -> memoryview:
        block = np.empty(num_bytes, np.uint8).data
        with self._lock:
            self.blocks.append(block)
        return block

    def copy(
        self, target: torch.Tensor, content: memoryview, shaped: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        stored = torch.frombuffer(content, dtype=torch.uint8)
        late = stored if self._is_block(stored.data_ptr()) else stored.clone()

        def copy_now() -> None:
            brought = late.clone()
            target.copy_(brought if shaped is None else shaped(brought))

        with self._lock:
            assert not self.is_closed
            self._queued.append(copy_now)
            self.most_waiting = max(self.most_waiting, len(self._queued) - self.num_done)

    def mark(self) -> LateEvent:
        with self._lock:
            return LateEvent(self, len(self._queued))

    def do(self, number: int) -> None:
        with self._lock:
            while self.num_done < number:
                self._queued[self.num_done]()
                self.num_done += 1

    def close(self) -> None:
        self.do(len(self._queued))
        self.is_closed = True

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def _is_block(self, address: int) -> bool:
        starts = [(np.frombuffer(block, np.uint8).ctypes.data, block.nbytes) for block in self.blocks]
        return any(start <= address < start + length for start, length in starts)
