"""`bcp memory ls`, `bcp memory flush` and `bcp gc --memory`, after a job has ended."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from forked_python import forked_python

import bytecheckpoint as bcp
from bytecheckpoint.memory_tier import flush
from bytecheckpoint.memory_tier.flush import jobs_in_memory
from bytecheckpoint.storage.memory_root import slot_file
from bytecheckpoint.storage.memory_root.job_folder import JobFolder, find_jobs, open_job
from bytecheckpoint.storage.memory_root.version_files import read_versions
from bytecheckpoint.tools import gc_command
from bytecheckpoint.tools.main import cli

pytestmark = pytest.mark.filterwarnings("ignore:the memory root")

_PROGRAM = """
import sys, warnings, torch, os
import bytecheckpoint as bcp
warnings.simplefilter("ignore")
root, memory = sys.argv[1:]
options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=memory), max_file_bytes=1 << 20)
for step in range(3):
    state = {str(n): torch.full((250_000,), float(step)) for n in range(4)}
    bcp.save(root, {"x": state}, step=step, options=options, to="memory")
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def killed(tmp_path: Path) -> tuple[str, str]:
    """The root and the memory root of a job that was killed after three steps."""
    root, memory = str(tmp_path / "ckpt"), str(tmp_path / "memory")
    subprocess.run([forked_python(), "-c", _PROGRAM, root, memory], check=False)
    return root, memory


def bcp_(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def pend_newest(memory: str) -> JobFolder:
    """Takes back what the host noted last: that its newest version is on all hosts."""
    ((job, _),) = find_jobs(memory)
    newest = read_versions(job)[-1].record.save_id
    (Path(job.versions) / f"{newest}.manifest").rename(Path(job.versions) / f"{newest}.pending")
    return job


def test_a_version_of_which_the_host_did_not_hear_that_it_is_complete_is_flushed_as_it_would_be_resumed(
    killed: tuple[str, str],
) -> None:
    root, memory = killed
    pend_newest(memory)
    done = bcp_("memory", "flush", root, "--memory-root", memory)
    assert done.exit_code == 0, done.output
    assert bcp.load(root, {"x": {str(number): torch.zeros(250_000) for number in range(4)}}).step == 2


def test_what_the_trainer_holds_last_before_it_ends_is_flushed(
    killed: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root, memory), real = killed, flush._locked

    def train_and_lock(*args: Any) -> Any:
        subprocess.run([forked_python(), "-c", _PROGRAM.replace("range(3)", "range(3, 5)"), root, memory], check=False)
        return real(*args)

    monkeypatch.setattr(flush, "_locked", train_and_lock)
    flushed = flush.flush(root, [memory])
    assert (flushed.step, flushed.is_committed, bcp.steps(root)) == (4, True, [4])


def test_the_complete_version_is_flushed_too_where_the_pending_one_after_it_is_not_whole(
    killed: tuple[str, str],
) -> None:
    root, memory = killed
    job = pend_newest(memory)
    for slot in slot_file.scan(job.slots):
        if slot.header is not None and slot.header.step == 2:
            Path(slot.path).unlink()
    done = bcp_("memory", "flush", root, "--memory-root", memory)
    assert done.exit_code == 0, done.output
    assert bcp.load(root, {"x": {str(number): torch.zeros(250_000) for number in range(4)}}).step == 1


def test_what_memory_holds_is_listed_and_flushed_without_a_trainer(killed: tuple[str, str]) -> None:
    root, memory = killed
    listed = json.loads(bcp_("memory", "ls", "--memory-root", memory, "--json").output)["checkpoints"]
    assert [(each["step"], each["is_complete"], each["num_here"]) for each in listed][-1] == (2, True, 4)
    assert "complete" in bcp_("memory", "ls", "--memory-root", memory).output
    done = bcp_("memory", "flush", root, "--memory-root", memory)
    assert done.exit_code == 0, done.output
    assert "4 files uploaded" in done.output
    state = {"x": {str(number): torch.zeros(250_000) for number in range(4)}}
    assert bcp.load(root, state).step == 2
    assert all(bool((tensor == 2).all()) for tensor in state["x"].values())
    again = bcp_("memory", "flush", root, "--memory-root", memory)
    assert (again.exit_code, "0 files uploaded" in again.output) == (0, True)


def test_a_memory_root_that_is_given_twice_counts_once(killed: tuple[str, str], tmp_path: Path) -> None:
    root, memory = killed
    (tmp_path / "link").symlink_to(memory)
    thrice = [part for each in (memory, f"{memory}/", tmp_path / "link") for part in ("--memory-root", str(each))]
    listed = json.loads(bcp_("memory", "ls", *thrice, "--json").output)["checkpoints"]
    assert listed == json.loads(bcp_("memory", "ls", "--memory-root", memory, "--json").output)["checkpoints"]
    flushed = bcp_("memory", "flush", root, *thrice, "--json")
    assert flushed.exit_code == 0, flushed.output
    found = json.loads(bcp_("gc", "--memory", *thrice, "--json").output)["jobs"]
    assert len(found) == 1


def test_a_flush_that_lacks_files_names_them_and_ends_with_3(killed: tuple[str, str]) -> None:
    root, memory = killed
    ((job, _),) = find_jobs(memory)
    for path in Path(job.slots).iterdir():
        content = bytearray(path.read_bytes())
        content[-9000] ^= 1
        path.write_bytes(content)
    done = bcp_("memory", "flush", root, "--memory-root", memory)
    assert done.exit_code == 3
    assert "not committed" in done.output
    assert "-3.safetensors" in done.output
    assert bcp.steps(root) == []


def test_a_flush_where_nothing_is_held_says_where_to_look(tmp_path: Path) -> None:
    done = bcp_("memory", "flush", str(tmp_path / "ckpt"), "--memory-root", str(tmp_path / "memory"))
    assert done.exit_code == 3
    assert "--memory-root" in done.output


def test_a_living_job_is_left_alone(tmp_path: Path) -> None:
    root, memory = str(tmp_path / "ckpt"), str(tmp_path / "memory")
    options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=memory))
    bcp.save(root, {"x": torch.zeros(10)}, step=1, options=options, to="memory")
    code = f"from bytecheckpoint.memory_tier.flush import flush; flush({root!r}, [{memory!r}])"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "processes of the job" in done.stderr
    ended = bcp_("gc", "--memory", "--memory-root", memory, "--older-than", "0h", "--delete")
    assert "lives" in ended.output
    assert len(find_jobs(memory)) == 1


_RESUMES = """
import sys, torch, subprocess, warnings
import bytecheckpoint as bcp
warnings.simplefilter("ignore")
root, memory = sys.argv[1:]
options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=memory))
state = {"x": {str(n): torch.zeros(250_000) for n in range(4)}}
assert bcp.resume(root, state, options=options).step == 2
code = "from bytecheckpoint.tools.main import cli; cli()"
gc = [sys.executable, "-c", code, "gc", root, "--memory", "--memory-root", memory, "--older-than", "0h", "--delete"]
print(subprocess.run(gc, check=False, capture_output=True, text=True).stdout)
assert bcp.resume(root, state, options=options).step == 2
"""


def test_gc_leaves_the_memory_of_a_process_that_has_resumed_and_not_saved_yet(killed: tuple[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", _RESUMES, *killed], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "lives" in done.stdout
    assert len(find_jobs(killed[1])) == 1
    gone = bcp_("gc", killed[0], "--memory", "--memory-root", killed[1], "--older-than", "0h", "--delete")
    assert gone.exit_code == 0
    assert find_jobs(killed[1]) == []  # its process has ended


def test_a_process_that_only_resumed_keeps_no_other_from_saving(tmp_path: Path) -> None:
    root, memory = str(tmp_path / "ckpt"), str(tmp_path / "memory")
    options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=memory))
    assert bcp.resume(root, {"x": torch.zeros(10)}, options=options) is None
    code = (
        f"import bytecheckpoint as bcp, torch; options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root={memory!r}));"
        f"bcp.save({root!r}, {{'x': torch.zeros(10)}}, step=1, options=options, to='memory')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_gc_frees_the_memory_of_ended_jobs(killed: tuple[str, str]) -> None:
    root, memory = killed
    young = bcp_("gc", root, "--memory", "--memory-root", memory, "--delete")
    assert "young" in young.output
    dry = bcp_("gc", root, "--memory", "--memory-root", memory, "--older-than", "0h")
    assert "to be removed with --delete" in dry.output
    assert len(find_jobs(memory)) == 1
    gone = bcp_("gc", root, "--memory", "--memory-root", memory, "--older-than", "0h", "--delete", "--json")
    assert json.loads(gone.output)["jobs"][0]["is_dead"] is True
    assert find_jobs(memory) == []
    shutil.rmtree(memory)


_TAKES = """
import sys
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
((job, _),) = find_jobs(sys.argv[1])
held = job.join()
print("joined", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_gc_says_what_a_process_has_taken_since_it_was_listed(
    killed: tuple[str, str], monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    root, memory = killed
    listed = jobs_in_memory([memory], None)
    monkeypatch.setattr(gc_command, "jobs_in_memory", lambda *_: listed)
    arguments = ("gc", root, "--memory", "--memory-root", memory, "--older-than", "0h", "--delete", *option)
    taker = subprocess.Popen([sys.executable, "-c", _TAKES, memory], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with taker:
        assert taker.stdout is not None
        taker.stdout.readline()
        done = bcp_(*arguments)
    assert done.exit_code == 4
    if option:
        said = json.loads(done.output)
        assert (said["deleted"], said["jobs"][0]["state"]) == (False, "taken meanwhile")
        assert "taken by a process of its job, a flush or another gc meanwhile" in said["failures"][0]
    else:
        assert "0 ended jobs, 0 B, removed" in done.output
        assert "(taken meanwhile)" in done.output
    assert len(find_jobs(memory)) == 1


def test_gc_does_not_fail_for_memory_that_another_gc_has_removed(
    killed: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, memory = killed
    listed = jobs_in_memory([memory], None)
    monkeypatch.setattr(gc_command, "jobs_in_memory", lambda *_: listed)
    arguments = ("gc", root, "--memory", "--memory-root", memory, "--older-than", "0h", "--delete")
    assert "1 ended job," in bcp_(*arguments).output
    again = bcp_(*arguments)
    assert again.exit_code == 0
    assert "0 ended jobs, 0 B, removed" in again.output
    assert "(removed by another process)" in again.output
    said = json.loads(bcp_(*arguments, "--json").output)
    assert (said["deleted"], said["failures"]) == (True, [])


def test_memory_that_vanishes_while_it_is_removed_is_gone(
    killed: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((job, description),) = find_jobs(killed[1])
    shutil.rmtree(job.path)
    monkeypatch.setattr(flush, "find_jobs", lambda _: [(job, description)])
    assert flush.remove_job(killed[1], job.path) == "gone"


def test_a_flush_of_memory_that_was_removed_since_it_was_looked_at_says_so(
    killed: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with a traceback."""
    root, memory = killed
    look = flush.find_job

    def look_and_lose(*args: str) -> JobFolder | None:
        found = look(*args)
        assert found is not None
        assert flush.remove_job(memory, found.path) == "removed"
        return found

    monkeypatch.setattr(flush, "find_job", look_and_lose)
    flushed = bcp_("memory", "flush", root, "--memory-root", memory)
    assert flushed.exit_code == 3, flushed.output
    assert f"another process has just removed what {memory} held of {root}" in flushed.output


@pytest.mark.parametrize("removed", ["versions", "slots", "alive", "job"])
def test_gc_frees_what_a_killed_gc_has_left_and_lists_other_jobs(
    killed: tuple[str, str], tmp_path: Path, removed: str
) -> None:
    root, memory = killed
    left = Path(open_job(memory, str(tmp_path / "other")).path) / removed
    shutil.rmtree(left) if left.is_dir() else left.unlink()
    listed = bcp_("memory", "ls", "--memory-root", memory, "--json")
    assert listed.exit_code == 0
    assert {each["root"] for each in json.loads(listed.output)["checkpoints"]} == {root}
    gone = bcp_("gc", "--memory", "--memory-root", memory, "--older-than", "0h", "--delete")
    assert gone.exit_code == 0, gone.output
    assert "2 ended jobs" in gone.output
    assert find_jobs(memory) == []


@pytest.mark.parametrize("is_left_over", [False, True])
def test_a_process_that_begins_while_gc_looks_at_its_job_keeps_its_memory(
    killed: tuple[str, str], monkeypatch: pytest.MonkeyPatch, is_left_over: bool
) -> None:
    _, memory = killed
    ((job, description),) = find_jobs(memory)
    join = JobFolder.join
    begun: list[Any] = []

    def begin_after(joined: JobFolder) -> Any:
        try:
            return join(joined)
        finally:
            if not begun:
                begun.append(join(open_job(memory, description.location)))

    if is_left_over:
        shutil.rmtree(Path(job.path) / "alive")
    monkeypatch.setattr(JobFolder, "join", begin_after)
    assert flush.remove_job(memory, job.path) == "lives"
    ((lock, process),) = begun
    assert [each.name for each in job.living()] == [process.name]
    assert read_versions(job)
    lock.release()
    assert flush.remove_job(memory, job.path) == "removed"


def test_a_flush_that_fails_before_it_begins_keeps_no_job(killed: tuple[str, str], tmp_path: Path) -> None:
    root, memory = killed
    ((job, _),) = find_jobs(memory)
    other = open_job(str(tmp_path / "other"), root)
    (Path(other.path) / "alive").rmdir()
    (Path(other.path) / "alive").touch()
    with pytest.raises(NotADirectoryError):
        flush.flush(root, [memory, str(tmp_path / "other")])
    assert job.living() == []


def test_what_a_killed_gc_has_left_is_flushed(killed: tuple[str, str]) -> None:
    root, memory = killed
    ((job, _),) = find_jobs(memory)
    shutil.rmtree(Path(job.path) / "alive")
    assert flush.flush(root, [memory]).is_committed


def test_gc_without_a_root_needs_memory() -> None:
    done = bcp_("gc")
    assert done.exit_code == 2
    assert "--memory" in done.output
