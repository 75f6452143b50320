"""One life of a job of one rank or several that goes on from memory and saves steps to memory, and now and then to
storage, in processes forked from one that has imported torch. A rank may die before any of its system calls, before any
line of what holds and resumes, or at any time. Between hosts they send by sockets, though all are on this one.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
from bytecheckpoint.memory_tier import hold
from bytecheckpoint.storage.memory_root import slot_file
from distributed.played_hosts import on_host
from faults.system_calls import NEVER, be_traced, follow
from faults.traced import Rank

SHAPE = (48, 65)
"""Of a tensor that ranks share in rows: 1 to 4 of them get as many each."""
STORED_EVERY = 4
_SAID = re.compile(r"[a-z]+ -?\d+")
"""One thing that a rank says; the rest is what Python writes of an error."""
TIMEOUT_S = 20.0
WITHIN_S = 60.0
TRACED = {
    str(path)
    for folder in (Path(hold.__file__).parent, Path(slot_file.__file__).parent)
    for path in folder.glob("*.py")
} | {str(Path(bcp.__file__).parent / "staging" / name) for name in ("memory_slots.py", "copy_slots.py")}


def warm_up() -> None:
    """Imports once what each rank would import with its first sharded tensor, save and resume: a second of processor
    time, and half of the system calls of a life, none of which is the library's.
    """
    importlib.import_module("torch._dynamo")
    importlib.import_module("faults.memory_kills")
    with tempfile.TemporaryDirectory() as folder:
        for life in (0, 1):
            job = Job(Path(folder), (0,), {"copies": 1}, life, STORED_EVERY)
            end_of(fork(functools.partial(_live_and_tell, job), job.said(0)), WITHIN_S)
        told = [line.split() for line in job.said(0).read_text().splitlines()]
    for name in [words[1] for words in told if words[0] == "imports"]:
        with suppress(ImportError):
            importlib.import_module(name)
    for record in list(msgspec.Struct.__subclasses__()):
        with suppress(TypeError):  # one that nobody decodes
            msgspec.msgpack.Decoder(record)


def _live_and_tell(job: Job) -> None:
    known = set(sys.modules)
    be(job, 0, None, Death(0, "none"))
    os.write(1, "".join(f"imports {name}\n" for name in sys.modules if name not in known).encode())


class Job(NamedTuple):
    """A job as it was started."""

    folder: Path
    hosts: tuple[int, ...]
    """The host of each rank."""
    memory: dict[str, Any]
    life: int
    """Rises with each start; its saves have it in their values."""
    num_saves: int
    name: str = "ckpt"
    lane: int = 0
    """Number of the lane, of those that run side by side."""

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def said(self, rank: int) -> Path:
        """Returns the file to which a rank says what was acknowledged."""
        return self.folder / f"said-{self.name}-{self.life}-{rank}"


class Death(NamedTuple):
    """The end of a rank."""

    rank: int
    kind: Literal["call", "line", "time", "none"] = "call"
    number: int = NEVER
    """Of the system call or line before which it dies; NEVER for none."""
    after_s: float = 0.0
    others_after_s: float | None = 0.0
    """Seconds from then on until all other ranks are killed, too; None where they live on."""


class Said(NamedTuple):
    """What the ranks of one life said."""

    resumed: set[int]
    """Values from which they went on; -1 for none, -2 for mixed ones."""
    begun: set[int]
    held: set[int]
    safe: set[int]
    """Those that survive a host."""
    stored: set[int]


class Lived(NamedTuple):
    """A life that has ended."""

    said: Said
    num_killed: int
    is_struck: bool
    """True if the rank that was to die did."""
    num_points: int
    """System calls or lines of that rank."""
    failed: list[str]
    """The last words of ranks that ended otherwise than by a kill or with all saves done."""


def root_of(folder: Path, host: int) -> Path:
    return folder / f"host{host}"


def live(job: Job, port: int, death: Death) -> Lived:
    """Runs one life of all ranks, to its end."""
    meeting = f"{job.folder.name}-{job.name}-{job.life}-{time.monotonic_ns()}"
    world_size = len(job.hosts)
    joined = [Rank(rank, world_size, port, meeting) if world_size > 1 else None for rank in range(world_size)]
    pids = [fork(lambda rank=rank: be(job, rank, joined[rank], death), job.said(rank)) for rank in range(world_size)]
    victim, codes, num_points = pids[death.rank], dict[int, int](), 0
    if death.kind == "call":
        codes[victim], num_points, others = follow(victim, death.number, job.lane)
        codes |= others
    else:
        if death.kind == "time":
            time.sleep(death.after_s)
            os.kill(victim, signal.SIGKILL)
        codes[victim] = end_of(victim, WITHIN_S)
    is_struck = codes[victim] == -signal.SIGKILL
    if is_struck and death.others_after_s is not None:
        time.sleep(death.others_after_s)
        for pid in set(pids) - set(codes):
            os.kill(pid, signal.SIGKILL)
    for pid in set(pids) - set(codes):
        codes[pid] = end_of(pid, WITHIN_S)
    texts = [job.said(rank).read_text() for rank in range(world_size)]
    words = [line.split() for text in texts for line in text.splitlines() if _SAID.fullmatch(line)]
    num_points = next((int(word[1]) for word in words if word[0] == "lines"), num_points)
    failed = [text[-1500:] for pid, text in zip(pids, texts, strict=True) if codes[pid] not in {0, -signal.SIGKILL}]
    said = Said(*({int(word[1]) for word in words if word[0] == what} for what in Said._fields))
    return Lived(said, sum(code == -signal.SIGKILL for code in codes.values()), is_struck, num_points, failed)


def fork(work: Callable[[], object], said: Path) -> int:
    """Starts a process that does the work and says to a file, beside what else it says, with which error it failed."""
    said.touch()  # the process may be killed before it opens the file
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the one process reports any end of the other
        os.write(1, traceback.format_exc().encode())
    finally:
        os._exit(code)


def end_of(pid: int, within_s: float) -> int:
    """Returns the exit code of a process; 1 for one that had to be killed because it did not end."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 1


def be(job: Job, rank: int, joined: Rank | None, death: Death) -> None:
    """Lives as one rank."""
    warnings.simplefilter("ignore")
    gc.disable()
    if joined is not None:
        joined.join()
        mesh_of(joined.world_size)
    if death.kind == "call" and death.rank == rank:
        be_traced(job.lane)
    lines = kill_before_line(death.number) if death.kind == "line" and death.rank == rank else None
    with on_host(job.hosts[rank]):
        run_saves(job, options_of(job, rank))
    sys.settrace(None)
    if lines is not None:
        threading.settrace(None)  # type: ignore[arg-type]
        say("lines", next(lines))
    if joined is not None:
        with suppress(RuntimeError):  # one that was killed when it had done all its saves
            dist.barrier()


def run_saves(job: Job, options: bcp.SaveOptions) -> None:
    """Resumes, and saves some steps; says each thing that is acknowledged."""
    state = state_of(job, -1)
    report = bcp.resume(job.path, state, options=options)
    first = 0 if report is None else report.step + 1
    say("resumed", -1 if report is None else value_of(job, state))
    for step in range(first, first + job.num_saves):
        value = 100 * step + job.life
        to = "storage" if step % STORED_EVERY == STORED_EVERY - 1 else "memory"
        say("begun", value)
        saved = state_of(job, value)
        handle = bcp.save(job.path, saved, step=step, async_save=step % 2 == 0, options=options, to=to)
        handle.held("process")
        say("held", value)
        handle.result()
        if is_protected(job):
            handle.held("host")
            say("safe", value)
        if to == "storage":
            say("stored", value)


def is_protected(job: Job) -> bool:
    num_hosts = len({*job.hosts})
    return num_hosts > 2 if job.memory.get("parity") else num_hosts >= job.memory["copies"] > 1


def options_of(job: Job, rank: int) -> bcp.SaveOptions:
    memory = bcp.Memory(root=root_of(job.folder, job.hosts[rank]), **job.memory)
    return bcp.SaveOptions(memory=memory, overwrite=True, timeout_s=TIMEOUT_S)


def state_of(job: Job, value: int) -> dict[str, Any]:
    whole = torch.full(SHAPE, value, dtype=torch.float32)
    if len(job.hosts) == 1:
        return {"w": whole, "x": torch.full((700,), value, dtype=torch.float32), "value": value}
    # No collective of torch's: a rank that waits in one for a dead rank would end with torch's error.
    own = whole.tensor_split(len(job.hosts))[dist.get_rank()].contiguous()
    sharded = DTensor.from_local(own, mesh_of(len(job.hosts)), [Shard(0)], run_check=False)
    return {"w": sharded, "x": torch.full((700,), value, dtype=torch.float32), "value": value}


@functools.cache
def mesh_of(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def value_of(job: Job, state: dict[str, Any]) -> int:
    """Returns the value of which all of the state is; -2 if there is none."""
    value = state["value"]
    w = state["w"] if len(job.hosts) == 1 else state["w"].to_local()
    is_whole = bool((w == value).all()) and bool((state["x"] == value).all())
    return int(value) if is_whole else -2


def kill_before_line(number: int) -> itertools.count[int]:
    """Counts lines of the traced modules on all threads, and kills this process before the one with this number."""
    counter = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line" and next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    return counter


def say(what: str, value: int) -> None:
    os.write(1, f"{what} {value}\n".encode())
