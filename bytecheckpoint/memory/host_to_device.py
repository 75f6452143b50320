"""Bytes of a load on their way into accelerator memory: through pinned memory and on a stream of their own, so that one
piece is read while the one before it is copied. It decides when memory is free again, and knows no files and no plans.

A load waits on the host for the last copy. So all bytes are there when it returns or raises, and no tensor has to be
recorded for the stream: none is freed while a copy into it is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

import torch

from bytecheckpoint.memory.device_to_host import has_streams
from bytecheckpoint.runtime.buffers import BufferPool, CopyEvent
from bytecheckpoint.storage.range_reader import HostMemory


class CopyStream(Protocol):
    """The way into the memory of one device: copies that are done in the order in which they were queued, while the
    host goes on. May be used by any thread.
    """

    def new_block(self, num_bytes: int) -> memoryview:
        """Writable host memory that can be copied from while the host goes on."""

    def copy(
        self, target: torch.Tensor, content: memoryview, shaped: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        """Queues a copy of these bytes into `target`, a tensor of the device: of what `shaped` makes of them as a flat
        tensor of bytes, or as they are.

        Memory of `new_block` must stay as it is until the copy is done; any other has been read when this returns.
        """

    def mark(self) -> CopyEvent:
        """After everything that has been queued."""

    def close(self) -> None:
        """Returns when everything that was queued is done; what the caller's stream does later sees it."""


class CudaLane:
    """A stream that begins where the current one of the thread that makes this is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._callers = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(self._callers)

    def new_block(self, num_bytes: int) -> memoryview:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data

    def copy(
        self, target: torch.Tensor, content: memoryview, shaped: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        source = torch.frombuffer(content, dtype=torch.uint8)
        is_pinned = source.is_pinned()
        with torch.cuda.stream(self._stream):
            if shaped is not None:
                # Brought as it is, gaps included: the device is faster at putting rows where they belong.
                source = shaped(source.to(self._device, non_blocking=is_pinned))
            target.copy_(source, non_blocking=is_pinned)

    def mark(self) -> CopyEvent:
        # One that blocks: waiting for others spins, on a core that reading needs.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.record_event(event)
        return event

    def close(self) -> None:
        self._callers.wait_stream(self._stream)
        self.mark().synchronize()


class CopyStreams:
    """Those of one load, and the memory for its reads. As a context: however it is left, nothing is in flight
    afterwards.
    """

    def __init__(self, devices: Iterable[torch.device], open_lane: Callable[[torch.device], CopyStream]) -> None:
        """Made on the thread on whose streams the tensors are used."""
        self._lanes = {device: open_lane(device) for device in dict.fromkeys(devices)}
        self._buffers: list[BufferPool] = []
        """Kept until all copies are done: torch would give their memory to others, whom it does not make wait."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as closing:  # every one of them, also after one that fails
            for lane in self._lanes.values():
                closing.callback(lane.close)

    def to(self, tensor: torch.Tensor) -> CopyStream | None:
        """The lane into the memory of this tensor; None where torch puts bytes there at once."""
        return self._lanes.get(tensor.device) if self._lanes else None

    def block_bytes(self, byte_length: int) -> int:
        # torch rounds pinned memory up to a power of two.
        return 1 << (byte_length - 1).bit_length() if self._lanes and byte_length else byte_length

    def new_buffers(self, num_buffers: int, byte_length: int) -> BufferPool:
        lanes = list(self._lanes.values())
        if not lanes:
            return HostMemory().new_buffers(num_buffers, byte_length)
        self._buffers.append(copied_buffers(lanes, num_buffers, byte_length))
        return self._buffers[-1]


def streams_to(tensors: Iterable[torch.Tensor]) -> CopyStreams:
    """The lanes that a load into these tensors takes: one for each device that has streams."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return CopyStreams(filter(has_streams, devices), CudaLane)


def copied_buffers(streams: Sequence[CopyStream], num_buffers: int, byte_length: int) -> BufferPool:
    """Returns a few buffers to copy from: each is lent again only when the copies queued from it are done."""
    return BufferPool(
        byte_length,
        num_buffers,
        new_block=streams[0].new_block,
        # Lazily, so that of several the marks made before a failure count.
        mark=lambda: (stream.mark() for stream in streams),
    )
