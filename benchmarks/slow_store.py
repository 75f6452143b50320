"""Storage that is as slow as an object store, on local files: every request waits before its first byte and then gets
so many bytes a second, however many there are at once. A file system of fsspec, so that whatever takes a URL reads
through the same delays.

    register(latency_s=0.02, bytes_per_s=100e6)      # in every process
    bcp.load("slow:///tmp/ckpt", state)
    dcp.load(state, storage_reader=FsspecReader("slow:///tmp/ckpt"))
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile


class SlowFileSystem(LocalFileSystem):
    """Local files whose reads are requests. Listing and writing cost nothing extra."""

    protocol = "slow"
    latency_s: ClassVar[float] = 0.0
    bytes_per_s: ClassVar[float] = float("inf")
    num_bytes_read: ClassVar[int] = 0
    """By this process, since `register`."""
    num_requests: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """One request for a range of a file."""
        path = self._strip_protocol(path)
        first = start or 0
        last = Path(path).stat().st_size if end is None else end
        return self.request(path, first, last)

    def request(self, path: str, start: int, end: int) -> bytes:
        """The bytes of a file, after as long as that takes."""
        began = time.monotonic()
        with Path(path).open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
        with self._lock:
            SlowFileSystem.num_bytes_read += len(content)
            SlowFileSystem.num_requests += 1
        takes_s = self.latency_s + len(content) / self.bytes_per_s
        time.sleep(max(0.0, began + takes_s - time.monotonic()))
        return content

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, block_size, **kwargs)
        return _SlowFile(self, path, mode, block_size or "default", cache_type="readahead")


class _SlowFile(AbstractBufferedFile):
    """A file that is read in blocks of 5 MiB, ahead, as fsspec's object stores do."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.request(self.path, start, end)


def register(*, latency_s: float, bytes_per_s: float) -> type[SlowFileSystem]:
    """Makes `slow://` URLs known to this process, and counts its reads from here on."""
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    SlowFileSystem.latency_s, SlowFileSystem.bytes_per_s = latency_s, bytes_per_s
    SlowFileSystem.num_bytes_read = SlowFileSystem.num_requests = 0
    return SlowFileSystem
