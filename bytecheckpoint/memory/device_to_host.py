"""Copies of accelerator tensors into host memory, on a stream of their own: the training's stream goes on, and there is
no synchronization with the whole device. Knows neither files nor saves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from bytecheckpoint.adapters.shards import flat_bytes
from bytecheckpoint.memory.tensor_bytes import same_bits
from bytecheckpoint.runtime.buffers import CopyEvent


class DeviceCopy(NamedTuple):
    """A copy of bytes of a tensor to the host."""

    tensor: torch.Tensor
    skipped_bytes: int
    into: memoryview
    """Has the length of the copy. Must be pinned, or the host waits for each copy."""


class DeviceStreams(Protocol):
    """The streams of a device, for copies to the host."""

    def mark(self) -> CopyEvent:
        """Returns the event after everything queued on the current stream of this thread."""

    def copy(self, copies: Sequence[DeviceCopy], *, after: CopyEvent) -> CopyEvent:
        """Queues the copies after that event, on a stream of their own, and returns the event after them."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> CopyEvent:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def copy(self, copies: Sequence[DeviceCopy], *, after: Any) -> CopyEvent:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            for copy in copies:
                for read in (copy.tensor, queue_copy(copy)):  # torch reuses their memory when the copy is done
                    read.record_stream(stream)
        event: torch.cuda.Event = stream.record_event()
        return event


def queue_copy(copy: DeviceCopy) -> torch.Tensor:
    """Queues one copy, or makes it if the device has no streams; returns the memory of the device that is copied."""
    source = same_bits(copy.tensor)
    target = torch.frombuffer(copy.into, dtype=torch.uint8)
    if copy.into.nbytes == copy.tensor.nbytes:
        target = target.view(source.dtype).view(source.shape)
    else:
        end = copy.skipped_bytes + copy.into.nbytes
        source = flat_bytes(source.contiguous())[copy.skipped_bytes : end]
    target.copy_(source, non_blocking=True)
    return source


def streams_of(device: torch.device) -> DeviceStreams:
    """Returns access to the streams of this device, for which `has_streams` is True."""
    return CudaStreams(device)


class DeviceCopies:
    """Copies of the tensors as the current stream of each device leaves them when this is made."""

    def __init__(self, copies: Iterable[tuple[Mapping[int, torch.Tensor], memoryview]]) -> None:
        """`copies` are pairs of tensors by byte offset and the pinned memory that they are copied to."""
        self._copies: dict[torch.device, list[DeviceCopy]] = {}
        for tensors, memory in copies:
            for start, tensor in tensors.items():
                part = memory[start : start + tensor.nbytes]
                self._copies.setdefault(tensor.device, []).append(DeviceCopy(tensor, 0, part))
        self._ready = mark_streams(self._copies)
        self._done: list[CopyEvent] = []

    def start(self) -> None:
        """Queues the copies, unless that was done; the host goes on."""
        if not self._done:  # all or none: a call after a failed one begins again
            self._done = _queue(self._copies, self._ready)

    def wait(self) -> None:
        """Returns when all copies are done."""
        for event in self._done:
            event.synchronize()


class DeviceRanges:
    """Ranges of files whose tensors are on devices, as the tensors are when this is made."""

    def __init__(self, files: Iterable[Mapping[int, torch.Tensor]]) -> None:
        """`files` are the tensors of each file by byte offset."""
        self._files = [sorted(tensors.items(), key=lambda item: item[0]) for tensors in files]
        self._ready = mark_streams(tensor.device for tensors in self._files for _, tensor in tensors)

    def gather(self, file: int, byte_offset: int, into: memoryview) -> None:
        """Copies the tensors on devices in a range of a file; returns when it is done. From any thread."""
        tensors, end = self._files[file], byte_offset + into.nbytes
        first = max(bisect_right(tensors, byte_offset, key=lambda item: item[0]) - 1, 0)
        copies: dict[torch.device, list[DeviceCopy]] = {}
        for start, tensor in tensors[first:]:
            if start >= end:
                break
            low, high = max(start, byte_offset), min(start + tensor.nbytes, end)
            if low < high:
                part = into[low - byte_offset : high - byte_offset]
                copies.setdefault(tensor.device, []).append(DeviceCopy(tensor, low - start, part))
        for event in _queue(copies, self._ready):
            event.synchronize()

    def close(self) -> None:
        """Releases the tensors."""
        self._files = []


def _queue(
    copies: Mapping[torch.device, Sequence[DeviceCopy]], ready: Mapping[torch.device, CopyEvent]
) -> list[CopyEvent]:
    return [streams_of(device).copy(of_device, after=ready[device]) for device, of_device in copies.items()]


def mark_streams(devices: Iterable[torch.device]) -> dict[torch.device, CopyEvent]:
    """Returns the event on the current stream of each accelerator among these: after it, tensors are as at the call."""
    return {device: streams_of(device).mark() for device in set(devices) if has_streams(device)}


def has_streams(device: torch.device) -> bool:
    """Returns True if copies to and from the device can be queued. On others they are done when torch returns."""
    return device.type == "cuda"
