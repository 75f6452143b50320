"""A training run of one rank or of several that goes on from memory, saves steps to memory and now and then to storage,
and kills itself: before a line of the modules that hold and resume, counted over all threads.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import bytecheckpoint as bcp
from bytecheckpoint.memory_tier import hold
from bytecheckpoint.storage.memory_root import slot_file
from faults.traced import Rank

PROGRAM = """
import sys
from faults.memory_run import run
run(*sys.argv[1:])
"""
NEVER = sys.maxsize
HOSTS = 2
SIZE = 40_000
TRACED = {
    str(path)
    for folder in (Path(hold.__file__).parent, Path(slot_file.__file__).parent)
    for path in folder.glob("*.py")
} | {str(Path(bcp.__file__).parent / "staging/memory_slots.py")}


def run(
    root: str, first_step: str, last_step: str, kill_at: str, rank: str, world_size: str, port: str, name: str
) -> None:
    """Resumes, says from which step, and saves the steps up to the last one; after each that is held it says so."""
    warnings.simplefilter("ignore")
    if int(world_size) > 1:
        Rank(int(rank), int(world_size), int(port), name).join()
    options = options_of(root, int(rank))
    counter = kill_before_line(int(kill_at))
    state = state_of(-1, int(rank))
    report = bcp.resume(f"{root}/ckpt", state, options=options)
    done = -1 if report is None else int(state["step"])
    say(f"resumed {done} {int(holds(state, done, int(rank)))}")
    for step in range(max(done + 1, int(first_step)), int(last_step) + 1):
        to = "storage" if step % 4 == 3 else "memory"
        say(f"begun {step}")
        handle = bcp.save(
            f"{root}/ckpt", state_of(step, int(rank)), step=step, async_save=step % 3 != 0, options=options, to=to
        )
        handle.held("process")
        say(f"held {step}")
        handle.result()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    say(f"lines {next(counter)}")


def options_of(root: str, rank: int) -> bcp.SaveOptions:
    memory = bcp.Memory(copies=1, root=f"{root}/memory{rank % HOSTS}")
    return bcp.SaveOptions(memory=memory, overwrite=True, timeout_s=20)


def state_of(step: int, rank: int) -> dict[str, Any]:
    own = torch.full((1000,), step * 10 + rank, dtype=torch.float32)
    return {"x": torch.full((SIZE,), step, dtype=torch.float32), "step": step, "own": bcp.RankLocal(own)}


def holds(state: dict[str, Any], step: int, rank: int) -> bool:
    """Returns True if all of the state is that of the step."""
    expected = state_of(step, rank)
    return bool(
        torch.equal(state["x"], expected["x"])
        and torch.equal(state["own"].value, expected["own"].value)
        and state["step"] == step
    )


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


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())
