"""torch.cuda on a machine without a GPU, as far as this library calls it: it keeps account of the device on which each
call was made, and holds back what a stream was given until another stream or the host waits for it. Tensors on the host
that are not flat count as on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch

from bytecheckpoint.loading import exchange, read, scatter
from bytecheckpoint.memory import cuda_device, device_to_host, host_to_device
from bytecheckpoint.memory.host_mapping import HostMapping
from bytecheckpoint.memory.host_to_device import CopyStreams, CudaCopyStream
from bytecheckpoint.saving import prepare
from bytecheckpoint.staging import file_image

OWN = 3
"""Device of this process."""


class FakeStream:
    """Runs what it was given in order, when somebody waits for it."""

    def __init__(self, cuda: FakeCuda, device: object = None) -> None:
        cuda.touch()
        cuda.num_streams += 1
        self._cuda, self.device = cuda, device
        self._given: list[Callable[[], object]] = []
        self._num_run = 0
        self._lock = threading.RLock()

    def give(self, work: Callable[[], object]) -> None:
        self._given.append(work)

    @property
    def num_given(self) -> int:
        return len(self._given)

    def run(self, number: int) -> None:
        with self._lock:
            while self._num_run < number:
                self._num_run += 1
                self._given[self._num_run - 1]()

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.note("wait_event")
        event.stream.run(event.number)  # what this stream is given now is done at once, as early as it may

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.note("wait_stream")
        other.run(other.num_given)


class FakeEvent:
    def __init__(self, cuda: FakeCuda, *, blocking: bool = False) -> None:
        self._cuda, self._is_blocking = cuda, blocking

    def record(self, stream: FakeStream) -> None:
        self._cuda.note("record")
        self.stream, self.number = stream, stream.num_given

    def query(self) -> bool:
        self._cuda.touch()
        return True

    def synchronize(self) -> None:
        assert self._is_blocking, "waiting would take a core"
        self._cuda.note("synchronize")
        self.stream.run(self.number)


class _Cudart:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        self._cuda.touch()
        assert flags == 1
        if self._cuda.pin_error:
            self._cuda.threads_with_an_error.add(threading.get_ident())
            return self._cuda.pin_error
        assert address not in self._cuda.pinned
        self._cuda.pinned[address] = length
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._cuda.touch()
        del self._cuda.pinned[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


class FakeCuda:
    """The state of the runtime."""

    def __init__(self) -> None:
        self.devices_used: set[int] = set()
        """Those that have a context."""
        self.calls: list[str] = []
        self.num_streams = 0
        self.pinned: dict[int, int] = {}
        """Length by address."""
        self.pin_error = 0
        self.threads_with_an_error: set[int] = set()
        self.is_capturing = False
        self.modes: set[int] = set()
        """Capture modes of the calls."""
        self._local = threading.local()
        self._callers: dict[int, FakeStream] = {}

    @property
    def current(self) -> int:
        return getattr(self._local, "device", 0)

    def touch(self) -> None:
        self.devices_used.add(self.current)
        self.modes.add(getattr(self._local, "mode", 0))

    def note(self, call: str) -> None:
        self.touch()
        self.calls.append(call)

    def exchange_mode(self, mode: int) -> int:
        before = getattr(self._local, "mode", 0)
        self._local.mode = mode
        return before

    @contextmanager
    def device(self, _: object) -> Iterator[None]:
        before, self._local.device = self.current, OWN
        try:
            yield
        finally:
            self._local.device = before  # as torch does: no context is made for it

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.touch()
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before
            self.touch()  # the stream before is set again, on the current device

    def callers_stream(self) -> FakeStream:
        """The current stream of this thread."""
        stream = getattr(self._local, "stream", None)
        if stream is None:
            with self.device(None):
                stream = self._local.stream = FakeStream(self)
        return stream

    def current_stream(self, _: object = None) -> FakeStream:
        self.touch()
        return self.callers_stream()


@contextmanager
def on_fake_cuda() -> Iterator[FakeCuda]:
    """Within the block saves and loads do to tensors on the host that are not flat what they do to CUDA tensors."""
    cuda, mappings = FakeCuda(), WeakSet[HostMapping]()

    def have_streams(_: object) -> bool:
        return True

    def streams_to(_: object) -> CopyStreams:
        return CopyStreams([torch.device("cpu")], CudaCopyStream)

    def new_block(_: object, num_bytes: int) -> memoryview:  # torch pins nothing without CUDA
        return torch.empty(num_bytes, dtype=torch.uint8).numpy().data

    fakes: dict[str, Any] = {
        "device": cuda.device,
        "stream": cuda.stream,
        "current_stream": cuda.current_stream,
        "Stream": lambda device: FakeStream(cuda, device),
        "Event": lambda **options: FakeEvent(cuda, **options),
        "cudart": lambda: _Cudart(cuda),
        "is_current_stream_capturing": lambda: cuda.is_capturing,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        for module in (device_to_host, file_image, prepare, read, scatter):
            patch.setattr(module, "has_streams", have_streams)
        patch.setattr(cuda_device, "_capture_mode_exchange", lambda: cuda.exchange_mode)
        for module in (read, exchange):
            patch.setattr(module, "streams_to", streams_to)
        patch.setattr(host_to_device.CudaCopyStream, "new_block", new_block)
        pin = HostMapping.pin

        def pin_here(mapping: HostMapping, device: torch.device) -> bool:
            mappings.add(mapping)
            return pin(mapping, device)

        patch.setattr(HostMapping, "pin", pin_here)
        cuda_device.copy_stream.cache_clear()
        try:
            yield cuda
        finally:
            cuda_device.copy_stream.cache_clear()
            for mapping in mappings:  # memory may outlive the runtime that it was pinned with
                mapping._device, mapping._is_tried = None, False
