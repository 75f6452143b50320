"""Mapped host memory that a device can copy from and to by itself. The code that queues the first such copy pins it, so
that CUDA is never called for states on the host. Knows nothing of the content and use of the memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading

import torch

from bytecheckpoint.memory.cuda_device import on_cuda
from bytecheckpoint.runtime.buffers import advise

logger = logging.getLogger("bytecheckpoint")

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices."""
_LARGE = 32 << 20
"""From here on a pin that fails is a warning; a block of scratch memory costs little time."""


class HostMapping(mmap.mmap):
    """Page-aligned memory of exactly the length that was asked for: anonymous, or of an open file. A memoryview of a
    mapping leads back to it (`memoryview.obj`), and the memory is unmapped when its last view is gone.
    """

    _device: torch.device | None = None
    """The device for which it was pinned, and with that for all; None if it is not pinned."""
    _is_tried = False
    _pid = 0

    def pin(self, device: torch.device) -> bool:
        """Pins the memory for all CUDA devices, at the first call only; `device` is one that has a context already.
        Returns False if the first call was refused, or after `unpin`: copies work, but each makes the host wait.
        """
        if not self._is_tried:
            self._is_tried, self._pid = True, os.getpid()
            error = _register(self, device)
            if error is None:
                self._device = device
            elif len(self) >= _LARGE:
                logger.warning(
                    "%.2f GiB of host memory could not be pinned (%s): copies from %s are slower, and nothing else "
                    "changes. The container may have too little memory; SaveOptions(staging_bytes=...) needs less",
                    len(self) / (1 << 30),
                    error,
                    device,
                )
        return self._device is not None

    def unpin(self) -> None:
        """Unpins the pages. No copy may be under way."""
        device, self._device = self._device, None
        # Not in a forked child, where CUDA cannot be called; and at its end a process gives back everything.
        if device is not None and self._pid == os.getpid() and not sys.is_finalizing():
            with on_cuda(device):
                cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                cudart.cudaHostUnregister(_address_of(self))

    def __del__(self) -> None:
        self.unpin()  # before it is unmapped


def map_memory(num_bytes: int, *, large_pages: bool) -> HostMapping:
    """Returns anonymous memory, which a forked child does not have. `large_pages` is as in `advise`."""
    memory = HostMapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(memory, large_pages=large_pages)
    return memory


def pin_memory_of(memory: memoryview, device: torch.device) -> bool:
    """Pins all of the HostMapping that this memory is part of. Returns False for other memory, or if CUDA refuses."""
    mapping = memory.obj
    return isinstance(mapping, HostMapping) and mapping.pin(device)


def _register(mapping: HostMapping, device: torch.device) -> str | None:
    """Pins the mapping. Returns what went wrong; None if nothing did."""
    outcome = ["the call did not return"]

    def register() -> None:
        try:
            with on_cuda(device):
                cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                result = cudart.cudaHostRegister(_address_of(mapping), len(mapping), _PORTABLE)
                outcome[0] = str(cudart.cudaGetErrorString(result)) if int(result) else ""
        except RuntimeError as error:
            outcome[0] = str(error)

    try:
        # On a thread that ends after the call: the runtime keeps a refusal as the last error of its thread, and torch
        # would raise this error at the next kernel of training.
        thread = threading.Thread(target=register, name="bytecheckpoint-pin")
        thread.start()
    except RuntimeError as error:  # no more threads
        return str(error)
    thread.join()
    return outcome[0] or None


def _address_of(mapping: HostMapping) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
