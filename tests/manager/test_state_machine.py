"""Saves, kills, restarts, deletions, pins, leases, reports and take-overs of one root, in any order.

A kill is the moment from which no operation of a manager reaches the store: the n-th of its operations from now on, in
whichever thread that comes.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from manager.steps import read_steps

import bytecheckpoint as bcp
from bytecheckpoint.manager import step_records
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.layout import step_folder

KEEP = bcp.keep_policies.Latest(2) | bcp.keep_policies.EverySteps(4) | bcp.keep_policies.Best(1, "loss")
OPERATIONS = ("write", "delete", "list", "read_into", "byte_length")
FAR = 1e6


class Life:
    """The life of one manager's process, as its stores see it."""

    def __init__(self) -> None:
        self.left: float = float("inf")
        self._lock = threading.Lock()

    def spend(self) -> None:
        with self._lock:
            self.left -= 1
            if self.left < 0:
                raise bcp.StorageError("the process is dead", kind="unavailable", path="")


class Run:
    """A manager, and all that belongs to its process."""

    def __init__(self, root: Path, machine: ManagerMachine) -> None:
        self.life = machine.lives[0] = Life()
        options = bcp.ManagerOptions(async_save=False, signals=())
        save = bcp.save_policies.EverySteps(1)
        self.manager = bcp.CheckpointManager(root, save=save, keep=KEEP, options=options)
        self.await_background()
        self.state = {"w": torch.zeros(40)}
        self.manager.restore(self.state)
        self.next_step = self.first_step = self.manager.next_step
        self.has_committed = False

    def await_background(self) -> None:
        """Returns when the background rests or the process is dead: what a rule finds must not depend on threads."""
        owned = self.manager._owned
        assert owned is not None
        work = owned.background._work
        while self.life.left >= 0 and work._num_done < work._num_asked:
            time.sleep(0.001)

    def end(self) -> None:
        """Ends what a dead process would not have: its thread."""
        self.life.left = 0
        owned = self.manager._owned
        assert owned is not None
        work = owned.background._work
        work.close()
        if work._thread is not None:
            work._thread.join(60)


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="bcp-machine-"))
        self.lives: list[Life] = [Life()]
        self.patch = pytest.MonkeyPatch()
        self.watch()
        self.runs: list[Run] = []
        """The owner of the root, or none."""
        self.superseded: list[Run] = []
        self.saved: dict[int, set[float]] = {}
        """Values that each step may have: of a save that was acknowledged, and of those that were killed since."""
        self.newest: int | None = None
        """Newest step that was acknowledged."""
        self.held: set[int] = set()
        """Pinned or leased steps."""
        self.num_values = 0

    def watch(self) -> None:
        made = LocalStore.__init__

        def make(store: Any, *arguments: Any, **options: Any) -> None:
            made(store, *arguments, **options)
            store.life = self.lives[0]

        self.patch.setattr(LocalStore, "__init__", make)
        for name in OPERATIONS:
            self.patch.setattr(LocalStore, name, _spending(getattr(LocalStore, name)))

    def use(self, run: Run) -> bcp.CheckpointManager:
        self.lives[0] = run.life
        return run.manager

    @property
    def run(self) -> Run:
        return self.runs[-1]

    @precondition(lambda self: not self.superseded)
    @rule()
    def open(self) -> None:
        """Starts a process, beside one that still runs if there is one."""
        self.superseded, self.runs = self.runs, []
        self.runs.append(Run(self.root, self))
        found = self.run.manager.latest()
        assert (found is None) == (self.newest is None and self.run.next_step == 0)
        if found is not None:
            assert self.run.next_step == found + 1
            assert self.newest is None or found >= self.newest
            assert float(self.run.state["w"][0]) in self.saved[found]

    @precondition(lambda self: self.runs)
    @rule(loss=st.one_of(st.none(), st.floats(0, 1), st.just(float("nan"))), pin=st.booleans())
    def save(self, loss: float | None, pin: bool) -> None:
        run = self.run
        self.num_values += 1
        value = float(self.num_values)
        step = run.next_step
        metrics = {} if loss is None else {"loss": loss}
        self.saved.setdefault(step, set()).add(value)
        try:
            self.use(run).save(step, {"w": torch.full((40,), value)}, metrics=metrics, force=True, pin=pin)
        except bcp.CheckpointError:
            assert run.life.left < 0, "a save failed in a process that lives"
            self.end_run()
            return
        self.saved[step] = {value}
        self.newest, run.next_step, run.has_committed = step, step + 1, True
        if pin:
            self.held.add(step)
        run.await_background()

    @precondition(lambda self: self.superseded)
    @rule()
    def save_of_the_superseded(self) -> None:
        run = self.superseded.pop()
        expected = (bcp.CheckpointSaveError, bcp.CheckpointExistsError, bcp.StorageError)
        with pytest.raises(expected) as caught:
            self.use(run).save(run.next_step, {"w": torch.full((40,), -1.0)}, force=True)
        assert run.life.left < 0 or caught.value.kind in {"superseded", "exists"}
        run.end()

    @precondition(lambda self: self.runs)
    @rule(calls=st.integers(0, 60))
    def kill(self, calls: int) -> None:
        """Lets the process die at one of its next operations; a save, a close or the background meets it."""
        self.run.life.left = min(self.run.life.left, calls)

    @precondition(lambda self: self.runs)
    @rule()
    def kill_at_once(self) -> None:
        self.run.life.left = 0
        self.end_run()

    @precondition(lambda self: self.runs and self.run.life.left == float("inf"))
    @rule(which=st.integers(0, 99), value=st.floats(0, 1), what=st.sampled_from(["pin", "unpin", "lease", "report"]))
    def touch(self, which: int, value: float, what: str) -> None:
        manager = self.use(self.run)
        steps = manager.steps()
        if not steps:
            return
        step = steps[which % len(steps)]
        if what == "lease":
            manager.lease(step, FAR)
        elif what == "report":
            manager.report(step, {"loss": value})
        else:
            getattr(manager, what)(step)
        if what in {"pin", "lease"}:
            self.held.add(step)
        if what == "unpin" and not self._is_leased(step):
            self.held.discard(step)

    def _is_leased(self, step: int) -> bool:
        return step_records.leased_until(self.reader(), step_folder(step)) > 0

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 99))
    def delete(self, which: int) -> None:
        """Another program deletes an old step by hand."""
        self.use_none()
        old = [step for step in bcp.steps(self.root) if step != self.newest and step not in self.held][:-1]
        if old:
            bcp.delete(self.root, old[which % len(old)])

    @precondition(lambda self: self.runs)
    @rule()
    def close(self) -> None:
        run = self.run
        self.use(run)
        if run.life.left < 1000:  # it may die meanwhile: nobody waits for it
            self.end_run()
            return
        run.manager.close()
        self.runs.pop()
        if run.has_committed and not self.superseded:
            self.check_nothing_else_is_left(run.first_step - 1)

    def end_run(self) -> None:
        self.runs.pop().end()
        self.use_none()

    def use_none(self) -> None:
        self.lives[0] = Life()

    def reader(self) -> LocalStore:
        self.use_none()
        return LocalStore(str(self.root), writer_threads=1)

    @invariant()
    def the_newest_committed_loads(self) -> None:
        self.use_none()
        latest = bcp.latest(self.root)
        if self.newest is not None:
            assert latest is not None
            assert latest >= self.newest
        if latest is not None:
            state = {"w": torch.zeros(40)}
            assert bcp.load(self.root, state).step == latest
            assert {float(value) for value in state["w"]} <= self.saved[latest]

    @invariant()
    def whatever_is_held_loads(self) -> None:
        self.use_none()
        for step in sorted(self.held):
            state = {"w": torch.zeros(40)}
            bcp.load(self.root, state, step=step)
            assert {float(value) for value in state["w"]} <= self.saved[step]

    def check_nothing_else_is_left(self, restored: int) -> None:
        store = self.reader()
        infos = read_steps(store)
        kept = KEEP.keeps(infos, 0.0)
        for info, is_kept in zip(infos, kept, strict=True):
            state = {"w": torch.zeros(40)}
            bcp.load(self.root, state, step=info.step)
            assert is_kept or info.step in self.held or info.step == restored, f"step {info.step} is left"
        own = {step_folder(info.step) for info in infos} | {"manager"}
        files = [path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file()]
        assert [name for name in files if name.partition("/")[0] not in own] == []
        for info in infos:
            left = [path.name for path in (self.root / step_folder(info.step)).rglob("*") if path.is_file()]
            others = [name for name in left if info.save_id not in name and name not in {"manifest.bcp", "pin.json"}]
            assert all(name.partition("-")[0].isdecimal() for name in others), f"{others} is left of step {info.step}"
        deleting = self.root / "manager" / "deleting"
        assert not deleting.exists() or not list(deleting.iterdir())

    def teardown(self) -> None:
        for run in (*self.runs, *self.superseded):
            run.end()
        self.patch.undo()
        shutil.rmtree(self.root, ignore_errors=True)


def _spending(operation: Any) -> Any:
    def call(store: Any, *arguments: Any, **options: Any) -> Any:
        store.life.spend()
        return operation(store, *arguments, **options)

    return call


def _run(max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            derandomize=max_examples < 100,
        ),
    )


def test_whatever_happens_the_newest_loads_and_nothing_else_is_left() -> None:
    _run(12, 12)


@pytest.mark.long
def test_whatever_happens_the_newest_loads_and_nothing_else_is_left_many_times() -> None:
    _run(400, 30)
