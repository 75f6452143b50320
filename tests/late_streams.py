"""A device whose streams do what they are given when somebody waits for it, and not before: the snapshots' half of what
late_lanes.py is to loads. Who reads bytes before the event after their copy, or copies before the event at the call, is
found out by the values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from bytecheckpoint.memory import device_to_host as device_to_host_module
from bytecheckpoint.memory.device_to_host import DeviceCopy, queue_copy
from bytecheckpoint.runtime.buffers import CopyEvent
from bytecheckpoint.staging import file_image


class _Marked(NamedTuple):
    """On the stream of one thread."""

    streams: LateStreams
    thread: int
    number: int
    """How many kernels come before it."""

    def synchronize(self) -> None:
        self.streams.do(self.thread, self.number)


class _Copied:
    """After copies on a stream of their own."""

    def __init__(self, streams: LateStreams, copies: Sequence[DeviceCopy], after: CopyEvent) -> None:
        self._streams = streams
        self._copies: Sequence[DeviceCopy] = copies
        self._after = after
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        with self._lock:
            self._after.synchronize()  # the stream waits for it, and the host for the stream
            for copy in self._copies:
                queue_copy(copy)
            self._streams.num_copied += len(self._copies)
            self._copies = ()


class LateStreams:
    """Tensors on the host, as if they were on a device. Each thread has a stream of its own."""

    def __init__(self) -> None:
        self.num_queued = self.num_copied = 0
        self.events: list[str] = []
        """What was asked for, in order."""
        self.copying_threads: set[int] = set()
        self._kernels: dict[int, list[Callable[[], object]]] = {}
        self._num_done: dict[int, int] = {}
        self._lock = threading.RLock()

    def give(self, kernel: Callable[[], object]) -> None:
        """To the current stream of this thread."""
        with self._lock:
            self._kernels.setdefault(threading.get_ident(), []).append(kernel)

    def mark(self) -> CopyEvent:
        with self._lock:
            self.events.append("mark")
            thread = threading.get_ident()
            return _Marked(self, thread, len(self._kernels.get(thread, ())))

    def copy(self, copies: Sequence[DeviceCopy], *, after: CopyEvent) -> CopyEvent:
        with self._lock:
            self.events.append("copy")
            self.copying_threads.add(threading.get_ident())
            self.num_queued += len(copies)
            return _Copied(self, copies, after)

    @contextmanager
    def reading_after(self, event: CopyEvent) -> Iterator[None]:
        event.synchronize()
        self.events.append("read after")
        yield

    def do(self, thread: int, number: int) -> None:
        with self._lock:
            for kernel in self._kernels.get(thread, [])[self._num_done.get(thread, 0) : number]:
                kernel()
            self._num_done[thread] = max(self._num_done.get(thread, 0), number)


@contextmanager
def on_late_streams() -> Iterator[LateStreams]:
    """Within the block the host's tensors that are not flat lie on such a device, as far as saves can tell."""
    streams = LateStreams()

    def have_streams(_: torch.device) -> bool:
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_to_host_module, "streams_of", lambda _: streams)
        patch.setattr(device_to_host_module, "has_streams", have_streams)
        patch.setattr(file_image, "has_streams", have_streams)
        yield streams
