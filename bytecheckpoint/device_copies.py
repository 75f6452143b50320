"""Copies of accelerator tensors into host memory, on a stream of their own: the training's stream goes on, and nothing
waits for the whole device. It knows neither files nor saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from bytecheckpoint.tensor_memory import same_bits


class DeviceCopies:
    """Copies that see the tensors as the current stream of each device has left them when this was made."""

    def __init__(self, copies: Iterable[tuple[Mapping[int, torch.Tensor], memoryview]]) -> None:
        """Each of `copies`: tensors by byte offset, and the memory that they go to, which is to be pinned."""
        self._copies: dict[torch.device, list[tuple[torch.Tensor, memoryview]]] = {}
        for tensors, memory in copies:
            for start, tensor in tensors.items():
                part = memory[start : start + tensor.nbytes]
                self._copies.setdefault(tensor.device, []).append((tensor, part))
        self._ready = mark_streams(self._copies)
        self._done: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Queues the copies, unless that was done; the host goes on."""
        if self._done:
            return
        done = []
        for device, copies in self._copies.items():
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._ready[device])
            with torch.cuda.stream(stream):
                for tensor, part in copies:
                    source = same_bits(tensor)
                    target = torch.frombuffer(part, dtype=torch.uint8).view(source.dtype).view(source.shape)
                    target.copy_(source, non_blocking=True)
                    source.record_stream(stream)
            done.append(stream.record_event())
        self._done = done  # all or none: who calls it after one that failed begins again

    def wait(self) -> None:
        """Returns when all bytes are there."""
        for event in self._done:
            event.synchronize()


def mark_streams(devices: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """An event on the current stream of each accelerator among these: after it, tensors are as they are at the call."""
    return {device: torch.cuda.current_stream(device).record_event() for device in set(devices) if has_streams(device)}


def has_streams(device: torch.device) -> bool:
    """Whether copies to and from the device can be queued. For any other they are done when torch returns from them."""
    return device.type == "cuda"
