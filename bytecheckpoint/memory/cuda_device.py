"""Calls of CUDA on threads of this library. A thread begins with device 0 as the current one, so its calls would make a
context there, which takes half a gigabyte of device memory for each process of a host. Knows no tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from bytecheckpoint.errors import CheckpointError

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

_Exchange = Callable[[int], int]
"""Sets the capture mode of this thread, and returns the one before."""


@contextmanager
def on_cuda(device: torch.device) -> Iterator[None]:
    """Surrounds every call of CUDA: `device` is the current one, and a CUDA graph that another thread captures
    meanwhile stays valid, whatever is called.
    """
    exchange = _capture_mode_exchange()
    with torch.cuda.device(device):
        before = None if exchange is None else exchange(_RELAXED)
        try:
            yield
        finally:
            if exchange is not None and before is not None:
                exchange(before)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the one stream of all copies from and to a device. torch has 32 streams a device and gives them out in
    turn: a new one each time would some day be that of a collective, and would keep free memory of its own.
    """
    with on_cuda(device):
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def callers_stream(device: torch.device, *, raises: type[CheckpointError] = CheckpointError) -> torch.cuda.Stream:
    """Returns the current stream of this thread on a device.

    Raises an error of the class `raises` (unsupported_value) while the stream captures a CUDA graph: work is only
    recorded then.
    """
    with on_cuda(device):
        if torch.cuda.is_current_stream_capturing():
            raise raises(
                f"the current stream of {device} captures a CUDA graph, and work given to it is only recorded; nothing "
                "was read or written: save and load outside of the capture",
                kind="unsupported_value",
            )
        return torch.cuda.current_stream(device)


class CudaEvent:
    """A point in the work of a stream. Waiting for it takes no processor time, and may be done on any thread."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        with on_cuda(device):
            self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self.event.record(stream)

    def query(self) -> bool:
        with on_cuda(self._device):
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        with on_cuda(self._device):
            self.event.synchronize()


@cache
def _capture_mode_exchange() -> _Exchange | None:
    """Returns a function that sets this thread's mode of stream capture and returns the one before; None if the driver
    has no such function: then no CUDA graph may be captured while a save or a load runs.

    Asked of the driver, because torch has no function for it, and the runtime's library has no fixed name.
    """
    try:
        function: Any = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (AttributeError, OSError):
        return None
    function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int

    def exchange(mode: int) -> int:
        value = ctypes.c_int(mode)
        function(ctypes.byref(value))
        return value.value

    return exchange
