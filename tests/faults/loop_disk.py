"""A disk whose power can be cut: a file with an ext4 on it, mounted through a loop device. A cut drops whatever the
file system has not written to its disk; what it had written, journal included, is there when it is mounted again.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

_DISK_BYTES = 64 << 20
_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN."""
_WITHOUT_LOG_FLUSH = 2
_MAX_BUSY_S = 20.0


class LoopDisk:
    """Mounted from the beginning; to be closed."""

    def __init__(self, folder: Path) -> None:
        self._image, self.mounted = folder / "disk.img", folder / "disk"
        self.mounted.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_DISK_BYTES)
        _run("mkfs.ext4", "-q", "-F", self._image)
        self._mount()

    def cut_power(self) -> None:
        """From now on every call on its files fails, and nothing more reaches the disk."""
        fd = os.open(self.mounted, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    def start_again(self) -> None:
        """As after a reboot. Nobody may have a file open there."""
        self._unmount()
        self._mount()

    def close(self) -> None:
        self._unmount()

    def _mount(self) -> None:
        _run("mount", "-t", "ext4", "-o", "loop", self._image, self.mounted)

    def _unmount(self) -> None:
        deadline = time.monotonic() + _MAX_BUSY_S
        while True:
            try:
                return _run("umount", self.mounted)
            except OSError:  # a process that was killed may not have ended yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


@functools.cache
def missing_for_loop_disks() -> str | None:
    """What this machine lacks for such a disk: told by making one and cutting its power."""
    for command in ("mkfs.ext4", "mount", "umount"):
        if shutil.which(command) is None:
            return f"the command {command}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            disk = LoopDisk(Path(folder))
            try:
                disk.cut_power()
            finally:
                disk.close()
    except OSError as error:
        return f"the right to mount a loop device with ext4 and to shut it down ({error})"
    return None


def _run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.returncode, f"{' '.join(map(str, command))}: {done.stderr.strip()}")
