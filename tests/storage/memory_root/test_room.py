"""What a memory root refuses for want of room, by name and before a byte is staged."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.storage.memory_root import room
from bytecheckpoint.storage.memory_root.room import check_room, container_limits

pytestmark = pytest.mark.filterwarnings("ignore:the memory root")
MIB = 1 << 20


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)


def version_2(limit: str, usage: int, inactive: int) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {inactive}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}


def version_1(limit: int, usage: int, inactive: int) -> dict[str, str]:
    stat = f"cache 1\ntotal_inactive_file {inactive}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n", "memory.stat": stat}


def limits_of(tmp_path: Path, groups: str) -> list[tuple[int, str]]:
    (tmp_path / "cgroup").write_text(groups)
    found = container_limits(str(tmp_path / "cgroup"), str(tmp_path / "mount"))
    return sorted((limit.free_bytes, limit.name) for limit in found)


def test_groups_of_version_2_and_those_above_them_limit(tmp_path: Path) -> None:
    """What the page cache of files can give back counts as free."""
    group(tmp_path / "mount/job/task", version_2("max", 10 * MIB, 0))
    group(tmp_path / "mount/job", version_2(str(100 * MIB), 60 * MIB, 20 * MIB))
    group(tmp_path / "mount", version_2(str(500 * MIB), 100 * MIB, 0))
    found = limits_of(tmp_path, "0::/job/task\n")
    assert [free for free, _ in found] == [60 * MIB, 400 * MIB]
    assert str(100 * MIB) in found[0][1]


def test_groups_of_version_1_limit(tmp_path: Path) -> None:
    group(tmp_path / "mount/memory/job", version_1(100 * MIB, 60 * MIB, 5 * MIB))
    group(tmp_path / "mount/memory", version_1(1 << 62, 60 * MIB, 0))  # that is none
    assert [free for free, _ in limits_of(tmp_path, "4:cpu,cpuacct:/job\n7:memory:/job\n")] == [45 * MIB]


def test_the_smaller_of_both_versions_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path / "mount/job", version_2(str(900 * MIB), 0, 0))
    group(tmp_path / "mount/memory/job", version_1(100 * MIB, 60 * MIB, 0))
    (tmp_path / "cgroup").write_text("7:memory:/job\n0::/job\n")
    found = list(container_limits(str(tmp_path / "cgroup"), str(tmp_path / "mount")))
    monkeypatch.setattr(room, "container_limits", lambda: found)
    check_room(str(tmp_path), 20 * MIB, held_bytes=0, max_bytes=None, is_copy=False)
    with pytest.raises(bcp.CheckpointSaveError, match=f"limit of the container .{100 * MIB} bytes") as caught:
        check_room(str(tmp_path), 30 * MIB, held_bytes=0, max_bytes=None, is_copy=False)
    assert caught.value.kind == "no_space"
    assert "raise the limit" in str(caught.value)


def test_a_group_of_which_nothing_can_be_read_limits_nothing(tmp_path: Path) -> None:
    group(tmp_path / "mount/job", {"memory.max": "no number"})
    assert limits_of(tmp_path, "0::/job\n") == []
    assert list(container_limits(str(tmp_path / "missing"), str(tmp_path))) == []


@pytest.mark.parametrize(
    ("whole", "advice"),
    [(64 * MIB, "--shm-size"), (1 << 30, "bcp gc --memory")],
    ids=["the small /dev/shm of a container", "a full file system"],
)
def test_a_file_system_without_room_is_refused_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int, advice: str
) -> None:
    status = SimpleNamespace(f_bavail=40 * MIB // 4096, f_frsize=4096, f_blocks=whole // 4096)
    monkeypatch.setattr(room, "os", SimpleNamespace(statvfs=lambda _: status, fspath=os.fspath))
    with pytest.raises(bcp.CheckpointSaveError, match=f"file system of {whole} bytes") as caught:
        check_room(str(tmp_path), 25 * MIB, held_bytes=0, max_bytes=None, is_copy=False)
    assert caught.value.kind == "no_space"
    assert advice in str(caught.value)
    assert str(25 * MIB) in str(caught.value)
    check_room(str(tmp_path), 20 * MIB, held_bytes=0, max_bytes=None, is_copy=False)


def test_a_file_system_without_a_limit_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0)  # of a tmpfs with size=0, and of a ramfs
    monkeypatch.setattr(room, "os", SimpleNamespace(statvfs=lambda _: status))
    check_room(str(tmp_path), 20 * MIB, held_bytes=0, max_bytes=None, is_copy=False)
    with pytest.raises(bcp.CheckpointSaveError, match=r"Memory\(max_bytes"):
        check_room(str(tmp_path), 20 * MIB, held_bytes=0, max_bytes=10 * MIB, is_copy=False)
    for limits in ("_host_memory", "container_limits"):
        monkeypatch.setattr(room, limits, list)
    check_room(str(tmp_path), 20 * MIB, held_bytes=0, max_bytes=None, is_copy=False)


def test_a_full_root_refuses_the_save_and_keeps_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=tmp_path / "memory"))
    bcp.save(tmp_path / "ckpt", {"x": torch.ones(1000)}, step=1, options=options, to="memory")
    status = SimpleNamespace(f_bavail=20 * MIB // 4096, f_frsize=4096, f_blocks=1 << 20)
    monkeypatch.setattr(room, "os", SimpleNamespace(statvfs=lambda _: status))
    with pytest.raises(bcp.CheckpointSaveError, match="file system") as caught:
        bcp.save(tmp_path / "ckpt", {"x": torch.ones(5_000_000)}, step=2, options=options, to="memory")
    assert caught.value.kind == "no_space"
    state = {"x": torch.zeros(1000)}
    report = bcp.resume(tmp_path / "ckpt", state, options=options)
    assert report is not None
    assert report.step == 1
    assert bool((state["x"] == 1).all())
