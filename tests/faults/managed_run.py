"""Training runs with a manager that die while it works after a commit: what lies in the root before, the program that
restores, saves one step and closes, and the moments at which it can be killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bytecheckpoint as bcp
from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.after_commit.background import Background
from bytecheckpoint.manager.keep_policies import All, KeepPolicy, Latest
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.layout import step_folder
from faults.seams import state_of

PROGRAM = """
import sys
from faults.managed_run import live
live(*sys.argv[1:])
"""
NEVER = -1
LIFE = 1000
"""Between the values that two processes of one run save at the same step."""
PINNED, LEASED, LEASED_BEFORE, REPORTED = 2, 3, 4, 5
OPERATIONS = ("write", "delete", "list", "read_into", "read_whole", "byte_length", "inventory")
CALLS = ("unlink", "rmdir", "link", "rename", "mkdir")


class Scene(NamedTuple):
    """What a manager has to do when its process dies."""

    name: str
    num_steps: int
    """Steps 1 to this one stand in the root before."""
    keep: KeepPolicy
    threads: frozenset[str]
    """Threads that die at one of their calls."""
    restored: int | None = None
    """Step to which the first process goes back; the newest if None."""
    has_second: bool = False
    """Whether steps are copied to a second root."""
    cool_down_keep: KeepPolicy | None = None
    kills: int = 1
    """Processes that are killed, one after the other."""

    @property
    def held(self) -> set[int]:
        """Steps that stay whatever the policy says."""
        return {step for step in (PINNED, LEASED) if step <= self.num_steps}

    def options(self, second: Path) -> bcp.ManagerOptions:
        return bcp.ManagerOptions(
            async_save=False,
            signals=(),
            cool_down=second if self.has_second else None,
            cool_down_keep=self.cool_down_keep,
        )

    def open(self, root: Path) -> bcp.CheckpointManager:
        every = bcp.save_policies.EverySteps(1)
        return bcp.CheckpointManager(root, save=every, keep=self.keep, options=self.options(second_of(root)))


_DELETING = frozenset({"bcp-manager", "bytecheckpoint"})
_COPYING = frozenset({"bcp-cool-down"})
DELETIONS = (
    Scene("old steps", 7, Latest(2), _DELETING),
    Scene("a branch that was left", 7, Latest(2), _DELETING, restored=4),
    Scene("what a killed deletion left", 7, Latest(2), _DELETING, kills=2),
)
COPIES = (
    Scene("all steps copied", 3, All(), _COPYING, has_second=True),
    Scene("old steps moved", 4, Latest(1), _COPYING, has_second=True, cool_down_keep=Latest(2)),
    Scene("what a killed copy left", 3, Latest(1), _COPYING | _DELETING, has_second=True, kills=2),
)
SCENES = {scene.name: scene for scene in (*DELETIONS, *COPIES)}


def second_of(root: Path) -> Path:
    """The second root of a run."""
    return root.with_name(f"{root.name}-second")


def build(scene: Scene, root: Path) -> None:
    """Writes what stands in the root before."""
    every, options = bcp.save_policies.EverySteps(1), bcp.ManagerOptions(async_save=False, signals=())
    with bcp.CheckpointManager(root, save=every, options=options) as manager:
        for step in range(1, scene.num_steps + 1):
            manager.save(step, state_of(0, float(step)), metrics={"loss": 1 / step}, pin=step == PINNED)
        manager.lease(LEASED, 1e6)
        if scene.num_steps >= REPORTED:
            step_records.lease(manager._store, step_folder(LEASED_BEFORE), until=1.0)
            manager.report(REPORTED, {"score": 0.5})


def live(scene_name: str, root: str, life: str, last: str) -> None:
    """Goes on with the run for one step, and says what it does. Dies at the call with the number `last`."""
    scene = SCENES[scene_name]
    moments = Moments(int(last), scene.threads, is_open=scene.has_second)
    moments.watch()
    with scene.open(Path(root)) as manager:
        manager.restore(state_of(0, -1.0), step=scene.restored if scene.restored and life == "1" else "latest")
        step = manager.next_step
        value = step + LIFE * int(life)
        say(f"begin {step} {value}")
        manager.save(step, state_of(0, float(value)))
        say(f"done {step}")
    say(f"calls {moments.num_passed}")
    os._exit(0)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Moments:
    """Counts what some threads do to a store: its operations, the calls that change files, and the middle of each
    write. The process dies at one of them.
    """

    def __init__(self, last: int, threads: frozenset[str], *, is_open: bool) -> None:
        """`is_open` counts from now on, otherwise from the commit on."""
        self._last = last
        self._threads = threads
        self._is_open = is_open
        self._lock = threading.Lock()
        self.num_passed = 0

    def watch(self) -> None:
        for name in OPERATIONS:
            setattr(LocalStore, name, self._counted(getattr(LocalStore, name)))
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        os.pwritev = self._torn(os.pwritev)  # type: ignore[assignment]
        Background.add = self._opening(Background.add)  # type: ignore[method-assign]

    def pass_one(self) -> bool:
        """Dies if this is the moment. Returns True if the next one is a moment of this thread, and the last one."""
        if not self._is_open or threading.current_thread().name not in self._threads:
            return False
        with self._lock:
            if self.num_passed == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.num_passed += 1
            return self.num_passed == self._last

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.pass_one()
            return function(*arguments, **options)

        return call

    def _torn(self, write: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, buffers: list[memoryview], byte_offset: int) -> int:
            if self.pass_one() and len(buffers[0]) > 1:
                write(fd, [buffers[0][: len(buffers[0]) // 2]], byte_offset)
            self.pass_one()
            return write(fd, buffers, byte_offset)

        return call

    def _opening(self, add: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self._is_open = True
            add(*arguments)

        return call
