"""Room for slots: the file system of the memory root, the memory of the host, the limit of the container, and what the
user allows. The least of them counts, and it is looked at before a byte is staged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointSaveError

_SPARE_BYTES = 16 << 20
"""Left free: for manifests, and for what other processes of the host write meanwhile."""
_CONTAINER_BYTES = 64 << 20
"""The size of /dev/shm in a container that was given no other."""
_UNLIMITED = 1 << 60


class RoomLimit(NamedTuple):
    """Bytes that may still be allocated, and for messages the name of the limit and advice on how to get more."""

    free_bytes: int
    name: str
    advice: str


def check_room(root: str, new_bytes: int, *, held_bytes: int, max_bytes: int | None, is_copy: bool) -> None:
    """Raises CheckpointSaveError (no_space) if `new_bytes` more would leave less than 16 MiB free in the root, the host
    or the container, or would exceed `max_bytes` with the `held_bytes` of all slots of the job on this host. Never
    raises for 0 `new_bytes`. `is_copy` only changes the message: the bytes are a copy of another host's slot.
    """
    limits = [*_file_system(root), *_host_memory(), *container_limits()]
    if max_bytes is not None:
        limits.append(RoomLimit(max_bytes - held_bytes + _SPARE_BYTES, f"Memory(max_bytes={max_bytes})", "raise it"))
    least = min(limits, default=None)
    if least is None or new_bytes + _SPARE_BYTES <= least.free_bytes or not new_bytes:
        return
    need, outcome, without = "the memory checkpoints of this rank need", "nothing was written, and ", "without Memory"
    slots = ", two slots of which one is always whole,"
    if is_copy:
        need, outcome, without, slots = "a copy for another host needs", "", "with Memory(copies=1)", ""
    raise CheckpointSaveError(
        f"{need} {new_bytes} bytes more in {root}{slots} and {least.name} leaves "
        f"{max(least.free_bytes - _SPARE_BYTES, 0)}; {outcome}what memory held before is as it was: {least.advice}, or "
        f"save {without}",
        kind="no_space",
        path=root,
    )


def _file_system(root: str) -> Iterator[RoomLimit]:
    status = os.statvfs(root)
    free_bytes, total_bytes = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    if not total_bytes:  # it has no limit, as a tmpfs with size=0, or a ramfs
        return
    advice = "free space there (`bcp gc --memory` lists what ended jobs left), or mount it larger"
    if total_bytes <= _CONTAINER_BYTES:
        advice = (
            "that is the small /dev/shm of a container: run it with --shm-size, or in Kubernetes mount an emptyDir of "
            "medium Memory there"
        )
    yield RoomLimit(free_bytes, f"its file system of {total_bytes} bytes", advice)


def _host_memory() -> Iterator[RoomLimit]:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        yield RoomLimit(int(line.split()[1]) * 1024, "the memory of the host", "take a host with more")


def container_limits(groups: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> Iterator[RoomLimit]:
    """Yields the limits of the control groups that this process is in, of version 1 and 2: tmpfs counts towards them,
    and the kernel kills a process if one is exceeded.
    """
    try:
        lines = Path(groups).read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits_of(Path(mount), path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_of(Path(mount, "memory"), path, *names)


def _limits_of(mount: Path, path: str, limit_name: str, usage_name: str, reclaimable_name: str) -> Iterator[RoomLimit]:
    """Yields the limits of a control group and of those above it. A container may see its own group only, as root."""
    group_path = Path(path.strip("/"))
    for group in {mount / group_path, *(mount / parent for parent in group_path.parents), mount}:
        with suppress(OSError, ValueError):
            limit = int((group / limit_name).read_text(encoding="ascii"))  # ValueError for "max": no limit
            usage = int((group / usage_name).read_text(encoding="ascii"))
            fields = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            if limit < _UNLIMITED:
                free = limit - usage + int(fields.get(reclaimable_name, 0))
                yield RoomLimit(free, f"the memory limit of the container ({limit} bytes)", "raise the limit")
