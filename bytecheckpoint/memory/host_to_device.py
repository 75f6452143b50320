"""Copies of a load into accelerator memory: through pinned memory and on a stream of their own, so that one range is
read while the one before it is copied. Decides when memory is free again, and knows no files and no plans.

A load waits on the host for the last copy. So all copies are done when it returns or raises, and no tensor has to be
recorded for the stream: none is freed while a copy into it is under way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

import torch

from bytecheckpoint.memory.cuda_device import CudaEvent, callers_stream, copy_stream, on_cuda
from bytecheckpoint.memory.device_to_host import finish_work, has_streams
from bytecheckpoint.runtime.buffers import BufferPool, CopyEvent
from bytecheckpoint.storage.range_reader import HostMemory

logger = logging.getLogger("bytecheckpoint")


class CopyStream(Protocol):
    """Copies into the memory of one device, made in the order in which they are queued, while the host goes on. Methods
    may be called from any thread.
    """

    def new_block(self, num_bytes: int) -> memoryview:
        """Returns writable host memory that can be copied from while the host goes on."""

    def copy(
        self, target: torch.Tensor, content: memoryview, shaped: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        """Queues a copy of these bytes into `target`, a tensor on the device. With `shaped`, copies what it returns for
        a flat tensor of the bytes.

        Memory of `new_block` must stay unchanged until the copy is done; any other has been read when this returns.
        """

    def mark(self) -> CopyEvent:
        """Returns the event after everything queued so far."""

    def close(self) -> None:
        """Waits until everything queued is done; later work of the caller's stream sees the result."""


class CudaCopyStream:
    """A stream whose copies begin after the work queued on the current stream of the thread that makes this."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._callers = callers_stream(device)
        self._stream = copy_stream(device)
        self._is_warned = False
        self._lock = threading.Lock()
        with on_cuda(device):
            self._stream.wait_stream(self._callers)

    def new_block(self, num_bytes: int) -> memoryview:
        try:
            with on_cuda(self._device):
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data
        except RuntimeError as error:
            with self._lock:
                if not self._is_warned:
                    logger.warning("memory for reading could not be pinned (%s): the load is slower", error)
                self._is_warned = True
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy().data

    def copy(
        self, target: torch.Tensor, content: memoryview, shaped: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        source = torch.frombuffer(content, dtype=torch.uint8)
        with on_cuda(self._device), torch.cuda.stream(self._stream):
            is_pinned = source.is_pinned()
            if shaped is not None:
                # Copied as it is, gaps included: the device is faster at scattering rows.
                source = shaped(source.to(self._device, non_blocking=is_pinned))
            target.copy_(source, non_blocking=is_pinned)

    def mark(self) -> CopyEvent:
        return CudaEvent(self._device, self._stream)

    def close(self) -> None:
        with on_cuda(self._device):
            self._callers.wait_stream(self._stream)
        self.mark().synchronize()


class CopyStreams:
    """The copy streams of one load, and the memory for its reads. A context: no copy is in flight after it is left."""

    def __init__(
        self,
        devices: Iterable[torch.device],
        open_stream: Callable[[torch.device], CopyStream],
        *,
        without_streams: Collection[torch.device] = (),
    ) -> None:
        """Must be made on the thread whose streams use the tensors. `without_streams` are other devices of the load:
        waits for the work on them now, and again when the context is left.
        """
        self._without_streams = without_streams
        finish_work(without_streams)
        self._streams = {device: open_stream(device) for device in dict.fromkeys(devices)}
        self._buffers: list[BufferPool] = []
        """Held until all copies are done: torch would give their memory to other tensors without waiting."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as closing:  # all streams, also after one that fails
            closing.callback(finish_work, self._without_streams)
            for stream in self._streams.values():
                closing.callback(stream.close)

    def wait_for_callers(self) -> None:
        """Waits for the work that was queued before this load, and for its copies so far: reads that no stream orders
        need this.
        """
        for stream in self._streams.values():
            stream.mark().synchronize()

    def to(self, tensor: torch.Tensor) -> CopyStream | None:
        """Returns the stream for copies into this tensor; None if its device has none, and torch copies at once."""
        return self._streams.get(tensor.device) if self._streams else None

    def block_bytes(self, byte_length: int) -> int:
        # torch rounds pinned memory up to a power of two.
        return 1 << (byte_length - 1).bit_length() if self._streams and byte_length else byte_length

    def new_buffers(self, num_buffers: int, byte_length: int) -> BufferPool:
        streams = list(self._streams.values())
        if not streams:
            return HostMemory().new_buffers(num_buffers, byte_length)
        self._buffers.append(copied_buffers(streams, num_buffers, byte_length))
        return self._buffers[-1]


def streams_to(tensors: Iterable[torch.Tensor]) -> CopyStreams:
    """Returns the copy streams of a load into these tensors: one for each device that has streams."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    queued = {device for device in devices if has_streams(device)}
    return CopyStreams(queued, CudaCopyStream, without_streams=devices - queued)


def copied_buffers(streams: Sequence[CopyStream], num_buffers: int, byte_length: int) -> BufferPool:
    """Returns a pool of buffers to copy from: each is lent again only when the copies queued from it are done."""
    return BufferPool(
        byte_length,
        num_buffers,
        new_block=streams[0].new_block,
        # Lazily, so that the marks made before a failure count.
        mark=lambda: (stream.mark() for stream in streams),
    )
