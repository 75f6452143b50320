"""An S3 server that keeps what it has in a folder, so that it can be killed and started again like a real one, which
moto cannot. Run as a script, it is that server, and may kill itself when a request comes.

    python tests/faults/lasting_s3.py FOLDER PORT [PATTERN NUMBER]
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from urllib.parse import quote, unquote

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

from storage.s3_server import S3Server

from faults.free_ports import free_port


class LastingS3:
    """The server as seen from a test: a process on one port, from start to start. To be closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def uploads(self) -> list[str]:
        """Those that were neither completed nor aborted."""
        return sorted(os.listdir(self._folder / "uploads"))

    def start(self, *, dies_at: str = "", number: int = 0) -> None:
        """`dies_at` is a pattern of request lines: at this number of them, from 1, it kills itself, with the request
        read and not carried out.
        """
        command = [sys.executable, __file__, str(self._folder), str(self._port), dies_at, str(number)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert int(self._process.stdout.readline()) == self._port

    def wait_until_dead(self) -> None:
        assert self._process is not None
        assert self._process.wait() == -signal.SIGKILL
        self._forget()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def _forget(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


class _Files(MutableMapping[str, bytes]):
    """A file for each key, there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, content: bytes) -> None:
        temporary = self._folder / f".{os.getpid()}-{id(content)}"
        temporary.write_bytes(content)
        temporary.replace(self._path(key))

    def __delitem__(self, key: str) -> None:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return (unquote(name) for name in sorted(os.listdir(self._folder)) if not name.startswith("."))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


class _Folders(MutableMapping[str, MutableMapping[str, bytes]]):
    """A folder of files for each key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, key: str) -> MutableMapping[str, bytes]:
        if not (self._folder / key).is_dir():
            raise KeyError(key)
        return _Files(self._folder / key)

    def __setitem__(self, key: str, contents: MutableMapping[str, bytes]) -> None:
        _Files(self._folder / key).update(contents)

    def __delitem__(self, key: str) -> None:
        shutil.rmtree(self._folder / key)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(os.listdir(self._folder)))

    def __len__(self) -> int:
        return len(os.listdir(self._folder))


class _DeadlyLog(list[str]):
    """The requests that came, of which one is the last."""

    def __init__(self, pattern: str, number: int) -> None:
        super().__init__()
        self._pattern = re.compile(pattern)
        self._number = number

    def append(self, line: str) -> None:
        super().append(line)
        if self._number and sum(bool(self._pattern.search(each)) for each in self) == self._number:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, port: str, pattern: str = "", number: str = "0") -> None:
    server = S3Server(int(port))
    server.objects = _Files(Path(folder, "objects"))
    server.metadata = _Files(Path(folder, "metadata"))
    server.uploads = _Folders(Path(folder, "uploads"))
    server.requests = _DeadlyLog(pattern, int(number))
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
