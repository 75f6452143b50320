"""Copies of accelerator tensors into host memory, on a stream of their own: the training's stream goes on, and nothing
waits for the whole device. It knows neither files nor saves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from bytecheckpoint.adapters.shards import flat_bytes
from bytecheckpoint.memory.tensor_bytes import same_bits


class Copy(NamedTuple):
    """Bytes of a tensor on their way to the host."""

    tensor: torch.Tensor
    skipped_bytes: int
    into: memoryview
    """As long as what is copied. To be pinned, or the host waits for each copy."""


class Event(Protocol):
    """A moment in what a device does."""

    def synchronize(self) -> None:
        """Returns when it has come."""


class Streams(Protocol):
    """What a device does one after the other, as far as copies to the host need to know."""

    def mark(self) -> Event:
        """When all is done that the current stream of this thread has been given."""

    def copy(self, copies: Sequence[Copy], *, after: Event) -> Event:
        """Has the copies made on a stream of their own after that event, and returns the one when they are done."""


class CudaStreams:
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def copy(self, copies: Sequence[Copy], *, after: Any) -> Event:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            for copy in copies:
                for read in (copy.tensor, bring(copy)):  # torch lends their memory again when the copy is done
                    read.record_stream(stream)
        event: torch.cuda.Event = stream.record_event()
        return event


def bring(copy: Copy) -> torch.Tensor:
    """Queues one copy, or where the device has no streams makes it; returns the device's memory that it is from."""
    source = same_bits(copy.tensor)
    target = torch.frombuffer(copy.into, dtype=torch.uint8)
    if copy.into.nbytes == copy.tensor.nbytes:
        target = target.view(source.dtype).view(source.shape)
    else:
        end = copy.skipped_bytes + copy.into.nbytes
        source = flat_bytes(source.contiguous())[copy.skipped_bytes : end]
    target.copy_(source, non_blocking=True)
    return source


def streams_of(device: torch.device) -> Streams:
    """Those of a device that has some."""
    return CudaStreams(device)


class DeviceCopies:
    """Copies that see the tensors as the current stream of each device has left them when this was made."""

    def __init__(self, copies: Iterable[tuple[Mapping[int, torch.Tensor], memoryview]]) -> None:
        """Each of `copies`: tensors by byte offset, and the memory that they go to, which is to be pinned."""
        self._copies: dict[torch.device, list[Copy]] = {}
        for tensors, memory in copies:
            for start, tensor in tensors.items():
                part = memory[start : start + tensor.nbytes]
                self._copies.setdefault(tensor.device, []).append(Copy(tensor, 0, part))
        self._ready = mark_streams(self._copies)
        self._done: list[Event] = []

    def start(self) -> None:
        """Queues the copies, unless that was done; the host goes on."""
        if not self._done:  # all or none: who calls it after one that failed begins again
            self._done = _queue(self._copies, self._ready)

    def wait(self) -> None:
        """Returns when all bytes are there."""
        for event in self._done:
            event.synchronize()


class DeviceParts:
    """What of some files lies on devices, a range at a time. It sees the tensors as `DeviceCopies` does."""

    def __init__(self, files: Iterable[Mapping[int, torch.Tensor]]) -> None:
        """Of each file, the tensors by byte offset."""
        self._files = [sorted(tensors.items(), key=lambda item: item[0]) for tensors in files]
        self._ready = mark_streams(tensor.device for tensors in self._files for _, tensor in tensors)

    def gather(self, file: int, byte_offset: int, into: memoryview) -> None:
        """Copies what lies on devices of a range of a file; returns when it is there. From any thread."""
        tensors, end = self._files[file], byte_offset + into.nbytes
        first = max(bisect_right(tensors, byte_offset, key=lambda item: item[0]) - 1, 0)
        copies: dict[torch.device, list[Copy]] = {}
        for start, tensor in tensors[first:]:
            if start >= end:
                break
            low, high = max(start, byte_offset), min(start + tensor.nbytes, end)
            if low < high:
                part = into[low - byte_offset : high - byte_offset]
                copies.setdefault(tensor.device, []).append(Copy(tensor, low - start, part))
        for event in _queue(copies, self._ready):
            event.synchronize()

    def close(self) -> None:
        """Lets go of the tensors."""
        self._files = []


def _queue(copies: Mapping[torch.device, Sequence[Copy]], ready: Mapping[torch.device, Event]) -> list[Event]:
    return [streams_of(device).copy(of_device, after=ready[device]) for device, of_device in copies.items()]


def mark_streams(devices: Iterable[torch.device]) -> dict[torch.device, Event]:
    """An event on the current stream of each accelerator among these: after it, tensors are as they are at the call."""
    return {device: streams_of(device).mark() for device in set(devices) if has_streams(device)}


def has_streams(device: torch.device) -> bool:
    """Whether copies to and from the device can be queued. For any other they are done when torch returns from them."""
    return device.type == "cuda"
