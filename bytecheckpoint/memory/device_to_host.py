"""Copies of accelerator tensors into host memory, on a stream of their own: the training's stream goes on, and there is
no synchronization with the whole device. Knows neither files nor saves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from bytecheckpoint.adapters.shards import flat_bytes
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.memory.cuda_device import CudaEvent, callers_stream, copy_stream, on_cuda
from bytecheckpoint.memory.host_mapping import pin_memory_of
from bytecheckpoint.memory.tensor_bytes import same_bits
from bytecheckpoint.runtime.buffers import CopyEvent

_WITHOUT_QUEUE = ("cpu", "meta")
"""Devices that have done their work when a call of torch returns."""


class DeviceCopy(NamedTuple):
    """A copy of bytes of a tensor to the host."""

    tensor: torch.Tensor
    skipped_bytes: int
    """Bytes of the tensor before the first one that is copied."""
    into: memoryview
    """Memory of the length of the copy. If it is not in a HostMapping, or that cannot be pinned, the host waits."""


class DeviceStreams(Protocol):
    """The streams of a device, for copies to the host."""

    def mark(self) -> CopyEvent:
        """Returns an event that comes after everything queued so far on the current stream of this thread. Raises
        CheckpointSaveError (unsupported_value) while that stream captures a CUDA graph.
        """

    def copy(self, copies: Sequence[DeviceCopy], *, after: CopyEvent) -> CopyEvent:
        """Queues the copies after that event, on a stream of their own, and returns the event after them. If it raises,
        no copy is under way.
        """

    def reading_after(self, event: CopyEvent) -> AbstractContextManager[None]:
        """Within the context, work of this thread on the device runs after that event, on the stream of the copies."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> CopyEvent:
        return CudaEvent(self._device, callers_stream(self._device, raises=CheckpointSaveError))

    def copy(self, copies: Sequence[DeviceCopy], *, after: Any) -> CopyEvent:
        stream = copy_stream(self._device)
        for copy in copies:
            pin_memory_of(copy.into, self._device)
        with on_cuda(self._device), torch.cuda.stream(stream):
            stream.wait_event(after.event)
            try:
                for copy in copies:
                    queue_copy(copy)
            except BaseException:
                CudaEvent(self._device, stream).synchronize()  # the memory is free for others as soon as this raises
                raise
        return CudaEvent(self._device, stream)

    @contextmanager
    def reading_after(self, event: Any) -> Iterator[None]:
        stream = copy_stream(self._device)
        with on_cuda(self._device), torch.cuda.stream(stream):
            stream.wait_event(event.event)
            yield


def queue_copy(copy: DeviceCopy) -> None:
    """Queues one copy on the current stream, or makes it at once if the device has no streams. The caller holds the
    tensor until the copy is done. Where the tensor is made contiguous first, torch gives that memory to later work of
    the same stream only.
    """
    source = same_bits(copy.tensor)
    target = torch.frombuffer(copy.into, dtype=torch.uint8)
    if copy.into.nbytes == copy.tensor.nbytes:
        target = target.view(source.dtype).view(source.shape)
    else:
        end = copy.skipped_bytes + copy.into.nbytes
        source = flat_bytes(source.contiguous())[copy.skipped_bytes : end]
    target.copy_(source, non_blocking=True)


def streams_of(device: torch.device) -> DeviceStreams:
    """Returns access to the streams of this device, for which `has_streams` is True."""
    return CudaStreams(device)


class DeviceCopies:
    """Copies of tensors to the host, each made after the event in `ready` of the tensor's device."""

    def __init__(
        self, copies: Iterable[tuple[Mapping[int, torch.Tensor], memoryview]], ready: Mapping[torch.device, CopyEvent]
    ) -> None:
        """`copies` are pairs: tensors by their byte offset in a memory, and the memory that they are copied to."""
        self._waiting: dict[torch.device, list[DeviceCopy]] = {}
        for tensors, memory in copies:
            for start, tensor in tensors.items():
                part = memory[start : start + tensor.nbytes]
                self._waiting.setdefault(tensor.device, []).append(DeviceCopy(tensor, 0, part))
        self._ready = ready
        self._queued: list[tuple[CopyEvent, Sequence[DeviceCopy]]] = []
        """Copies, which hold their tensors, after the event that ends them."""

    def start(self) -> None:
        """Queues the copies that are not queued yet; the host goes on."""
        for device, of_device in list(self._waiting.items()):
            self._queued.append((streams_of(device).copy(of_device, after=self._ready[device]), of_device))
            del self._waiting[device]

    def wait(self) -> None:
        """Waits until all copies that were queued are done."""
        for event, _ in list(self._queued):
            event.synchronize()

    def close(self) -> None:
        """Releases the tensors. No copy of them may be under way."""
        self._waiting, self._queued = {}, []


class DeviceRanges:
    """Ranges of files whose tensors are on devices, each copied after the event in `ready` of the tensor's device."""

    def __init__(self, files: Iterable[Mapping[int, torch.Tensor]], ready: Mapping[torch.device, CopyEvent]) -> None:
        """`files` are the tensors of each file by byte offset."""
        self._files = [sorted(tensors.items(), key=lambda item: item[0]) for tensors in files]
        self._ready = ready

    def gather(self, file: int, byte_offset: int, into: memoryview) -> None:
        """Copies the tensors on devices in a range of a file to their bytes of `into`, and leaves its other bytes as
        they are; returns when that is done. From any thread.
        """
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
        with ExitStack() as waiting:  # for all copies, also after one that could not be queued
            for device, of_device in copies.items():
                waiting.callback(streams_of(device).copy(of_device, after=self._ready[device]).synchronize)

    def close(self) -> None:
        """Releases the tensors."""
        self._files = []


def mark_streams(devices: Iterable[torch.device]) -> dict[torch.device, CopyEvent]:
    """Marks the current stream of each CUDA device among these; returns the events, after which tensors are as at this
    call. Waits until other accelerators have finished their work.
    """
    marked = set(devices)
    finish_work(marked)
    return {device: streams_of(device).mark() for device in marked if has_streams(device)}


@contextmanager
def reading_after(ready: Mapping[torch.device, CopyEvent]) -> Iterator[None]:
    """Within the context, work of this thread on each of these devices runs after its event, on the copy stream."""
    with ExitStack() as streams:
        for device, event in ready.items():
            streams.enter_context(streams_of(device).reading_after(event))
        yield


def finish_work(devices: Iterable[torch.device]) -> None:
    """Waits for those of the devices that are accelerators other than CUDA. Copies from and to them are made by
    threads, each of which has a stream of its own that is not ordered after the caller's.
    """
    for device in devices:
        if device.type not in _WITHOUT_QUEUE and not has_streams(device):
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None and device.type == accelerator.type:
                torch.accelerator.synchronize(device)


def has_streams(device: torch.device) -> bool:
    """Returns True if copies to and from the device can be queued. On others they are done when torch returns."""
    return device.type == "cuda"
