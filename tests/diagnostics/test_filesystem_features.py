from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from bytecheckpoint.diagnostics import filesystem_features
from bytecheckpoint.diagnostics.filesystem_features import probe_filesystem


def test_files_of_an_earlier_probe_change_nothing(tmp_path: Path) -> None:
    expected = probe_filesystem(str(tmp_path))
    for name in ("probe", "probe-link"):
        (tmp_path / name).write_bytes(b"left behind")
    found = probe_filesystem(str(tmp_path))
    assert (found.hard_links, found.direct_writes, found.preallocation, found.locks) == (
        expected.hard_links,
        expected.direct_writes,
        expected.preallocation,
        expected.locks,
    )
    assert found.hard_links
    assert not list(tmp_path.iterdir())


def test_mount_points_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = b"disk / ext4 rw 0 0\ndisk /\xff\xfe\r xfs rw 0 0\nserver %s nfs4 rw 0 0\n"
    folder = tmp_path / "a b\tc\\d"
    folder.mkdir()
    escaped = os.fsencode(folder).replace(b"\\", b"\\134").replace(b" ", b"\\040").replace(b"\t", b"\\011")

    monkeypatch.setattr(filesystem_features, "open", lambda *_: io.BytesIO(mounts % escaped), raising=False)
    assert filesystem_features._file_system(str(folder)) == "nfs4"
