from __future__ import annotations

from pathlib import Path

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
