"""Local files through fsspec as an object store would serve them: every request has a latency and a limited rate.
Requests do not slow one another down. All that read through fsspec meet exactly the same delays.

    fsspec.register_implementation("slow", SlowFiles)
    bcp.load("slow:///folder", state, storage_options={"latency_s": 0.02, "bytes_per_s": 100e6})
    dcp.load(state, storage_reader=FsspecReader("slow:///folder", latency_s=0.02, bytes_per_s=100e6))
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile


class Requests(NamedTuple):
    """Requests of a process."""

    num: int = 0
    num_bytes: int = 0


class Tally:
    """Sum of the requests of all threads."""

    def __init__(self) -> None:
        self.total = Requests()
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.total = Requests(self.total.num + 1, self.total.num_bytes + num_bytes)


class SlowFiles(AbstractFileSystem):
    """Read-only. A listing and a look at an object are one request each, and so is a range of bytes."""

    protocol = "slow"
    tally: ClassVar = Tally()
    """Tally of the process: fsspec makes an instance for each thread."""

    def __init__(self, latency_s: float, bytes_per_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s

    @contextmanager
    def _request(self, num_bytes: int) -> Iterator[None]:
        """Lasts as long as the request would, the body included."""
        end = time.monotonic() + self._latency_s + num_bytes / self._bytes_per_s
        self.tally.add(num_bytes)
        yield
        time.sleep(max(0.0, end - time.monotonic()))

    def _local(self, path: str) -> Path:
        return Path(self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  fsspec's signature
        with self._request(0):
            entries = [described(each) for each in sorted(self._local(path).iterdir())]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        with self._request(0):
            return described(self._local(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with self._local(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, last, _step = slice(start, end).indices(size)
            with self._request(max(0, last - first)):
                return os.pread(file.fileno(), max(0, last - first), first)

    def _open(self, path: str, mode: str = "rb", block_size: int | str | None = None, **options: Any) -> SlowFile:
        if mode != "rb":
            raise NotImplementedError(f"slow files are only read, not opened as {mode!r}")
        options.pop("autocommit", None)
        return SlowFile(self, path, mode, block_size or "default", **options)


class SlowFile(AbstractBufferedFile):
    """A file as fsspec's object stores open it: with their usual read-ahead, block by block."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)


def described(path: Path) -> dict[str, Any]:
    status = path.stat()
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
    return {"name": str(path), "size": status.st_size, "type": kind}
