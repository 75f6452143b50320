"""A shared memory of the host that is full, as containers have it: 64 MB, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.launcher import Launcher
from faults.seams import loads_as

FULL = """
import ctypes, errno, os, subprocess, sys
from faults.seams import loads_as, state_of

NEW_NAMESPACE = 0x20000
if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACE):
    os._exit(77)
for command in ("mount --make-rprivate /", "mount -t tmpfs -o size=4k tmpfs /dev/shm"):
    if subprocess.run(command.split(), capture_output=True).returncode:
        os._exit(77)
full = os.open("/dev/shm/full", os.O_CREAT | os.O_WRONLY)
try:
    while os.write(full, bytes(4096)):
        pass
except OSError as error:
    assert error.errno == errno.ENOSPC

for step, snapshot in enumerate(("copy", "lazy"), 1):
    options = bcp.SaveOptions(snapshot=snapshot)
    for is_async in (False, True):
        path = f"{sys.argv[1]}/{snapshot}-{is_async}"
        state = state_of(0, float(step))
        handle = bcp.save(path, state, async_save=is_async, options=options)
        handle.result(20)
        assert loads_as(path, 0, float(step))
assert os.listdir("/dev/shm") == ["full"]
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.privileged
def test_saves_of_every_kind_need_no_shared_memory(launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.run(FULL, tmp_path)
    if ended.exit_code == 77:
        pytest.skip("a mount of its own cannot be had here")
    assert ended == (0, "done\n")
    assert not Path("/dev/shm/full").exists()  # it was full for that program alone
    for step, snapshot in enumerate(("copy", "lazy"), 1):
        for is_async in (False, True):
            assert loads_as(tmp_path / f"{snapshot}-{is_async}", 0, float(step))
