"""Programs that save once while strace stands by: it tells which system calls they make on the files of a checkpoint,
and kills them at one of these or lets it fail.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import bytecheckpoint as bcp
from faults.launcher import Ended, Launcher
from faults.savers import SAVERS, Training

PROGRAM = """
import sys
from faults.traced import save_once
save_once(*sys.argv[1:])
"""
BEFORE, SAVED = 1, 2
"""Steps that were done in the checkpoint that is there before, and in the one that is saved."""
WITHIN_S = 90.0
_LINE = re.compile(r"^(?:\d+ +)?(\w+)\((.*)$")


class Rank(NamedTuple):
    """One of several programs that save together. They meet at a store that the campaign holds."""

    rank: int
    world_size: int
    port: int
    meeting: str

    def join(self) -> None:
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(self.meeting, store), rank=self.rank, world_size=self.world_size
        )


def save_once(saver_name: str, root: str, place: str, gate: str, *of_group: str) -> None:
    """Says `ready`, waits until it may go on, saves, and says `done` or with which error it failed."""
    if of_group:
        rank, world_size, port, meeting = of_group
        Rank(int(rank), int(world_size), int(port), meeting).join()
    training = Training(steps=SAVED)
    opened = os.open(gate, os.O_RDWR)
    _say("ready")
    os.read(opened, 1)
    save_and_tell(Path(root), training, saver_name=saver_name, in_place=place == "in place")


def save_and_tell(
    root: Path,
    training: Training,
    *,
    saver_name: str,
    in_place: bool,
    before_telling: Callable[[], object] = lambda: None,
) -> None:
    """Ends the program after that."""
    try:
        SAVERS[saver_name].save(root, training, in_place=in_place)
        told = "done"
    except bcp.CheckpointError as error:
        told = f"failed with {type(error).__name__}[{error.kind}] {error}"
    except Exception as error:  # noqa: BLE001  # what must not come out is told, too
        told = f"crashed with {type(error).__name__}: {error}"
    before_telling()
    _say(told)
    os._exit(0)


def _say(text: str) -> None:
    sys.stdout.write(f"{' '.join(text.split())}\n")
    sys.stdout.flush()


class Traced:
    """A program that has stopped before its save, with strace attached to its main thread."""

    def __init__(
        self,
        launcher: Launcher,
        root: Path,
        *,
        saver_name: str,
        in_place: bool,
        options: Sequence[str],
        output: Path | None = None,
        rank: Rank | None = None,
    ) -> None:
        """`options` are strace's; none for a program without it. What it tells goes to `output`."""
        self._launcher = launcher
        name = root.name if rank is None else f"{root.name}-{rank.rank}"
        self._gate = root.with_name(f"{name}.gate")
        os.mkfifo(self._gate)
        place = "in place" if in_place else "steps"
        self.pid = launcher.start(PROGRAM, saver_name, root, place, self._gate, *([] if rank is None else rank))
        self._options = ["-o", str(output or os.devnull), *options]
        self._is_traced = bool(options)
        self.tracer: subprocess.Popen[str] | None = None

    def attach(self) -> None:
        self._launcher.wait_for_output(self.pid, "ready", timeout_s=WITHIN_S)
        if self._is_traced:
            command = ["strace", "-p", str(self.pid), *self._options]
            self.tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            assert self.tracer.stderr
            first = self.tracer.stderr.readline()
            if "attached" not in first:
                raise OSError(f"strace: {first}")

    def go_on(self) -> None:
        opened = os.open(self._gate, os.O_RDWR)  # which does not wait for a reader, who may be dead
        os.write(opened, b"!")
        if self.tracer is not None:
            self.tracer.communicate(timeout=WITHIN_S)  # it ends with the program
        os.close(opened)

    def has_ended(self) -> bool:
        return self._launcher.has_ended(self.pid)

    def wait(self, timeout_s: float = WITHIN_S) -> Ended:
        """Where it has not ended by then, it is killed, and has no exit code."""
        ended = self._launcher.wait(self.pid, timeout_s=timeout_s)
        self._gate.unlink()
        return ended


def save_traced(
    launcher: Launcher,
    root: Path,
    *,
    saver_name: str,
    in_place: bool,
    options: Sequence[str],
    output: Path | None = None,
) -> Ended:
    """One program alone, to its end."""
    program = Traced(launcher, root, saver_name=saver_name, in_place=in_place, options=options, output=output)
    program.attach()
    program.go_on()
    return program.wait()


class FileCall(NamedTuple):
    """A system call on a file or folder of the checkpoint."""

    name: str
    number: int
    """Among all calls of this name that the program makes while it saves, from 1 on."""
    text: str
    """What strace says of it, with the paths of descriptors."""

    @property
    def is_commit(self) -> bool:
        """Whether it gives the manifest its name."""
        return self.name.startswith(("link", "rename")) and '/manifest.bcp"' in self.text


CENSUS = ("-y", "-e", "trace=%file,%desc")
CHANGING = {"mkdir", "fallocate", "pwrite64", "pwritev", "pwritev2", "write", "writev", "fsync", "fdatasync"}
CHANGING |= {
    "link",
    "linkat",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    "ftruncate",
    "truncate",
}


def file_calls(told: str, root: Path) -> list[FileCall]:
    """Those that were made on anything below the root, in their order, from what strace told."""
    counts: Counter[str] = Counter()
    calls = []
    for line in told.splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        name, text = found.groups()
        counts[name] += 1
        if re.search(rf'{re.escape(str(root))}[/">]', text):  # not the gate beside it
            calls.append(FileCall(name, counts[name], text))
    return calls


@functools.cache
def missing_for_traces() -> str | None:
    """What this machine lacks to trace and inject."""
    strace = shutil.which("strace")
    if strace is None:
        return "strace"
    injected = [strace, "-o", os.devnull, "-e", "trace=fsync", "-e", "inject=fsync:error=EIO", "true"]
    done = subprocess.run(injected, check=False, capture_output=True, text=True)
    return None if done.returncode == 0 else f"the right to trace processes ({done.stderr.strip()})"


@contextmanager
def meeting_place() -> Iterator[int]:
    """A store for the rendezvous of programs, which no program's death takes along; gives its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield int(store.port)
    del store
