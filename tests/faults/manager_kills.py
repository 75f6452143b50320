"""SIGKILL of a training run at every call that its manager makes while it deletes old steps, and while it copies steps
to a second root. The run is then started again, as its user would: what was kept and what was acknowledged loads, bit
by bit, and after one more save the work of the dead is finished. What else is left is what `bcp gc` removes.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import bytecheckpoint as bcp
from bytecheckpoint.manager.keep_policies import All
from bytecheckpoint.storage.layout import step_folder
from faults import managed_run
from faults.campaigns import Asked, Broken, Campaign, Outcome
from faults.launcher import Ended, Launcher, shared_launcher
from faults.managed_run import COPIES, DELETIONS, LIFE, NEVER, PINNED, PROGRAM, Scene, second_of
from faults.savers import WrongBytesError
from faults.seams import files_under, holds, state_of
from faults.survived import clean_up

LAST_LIFE = 9
WITHIN_S = 60.0
_BEGUN = re.compile(r"^begin (\d+) (\d+)$", re.MULTILINE)
_CALLS = re.compile(r"^calls (\d+)$", re.MULTILINE)
_BESIDE = ("manifest.bcp", "pin.json", "leases/")


class Root:
    """The roots of one trial, and what may stand there."""

    def __init__(self, scene: Scene, root: Path) -> None:
        self.scene, self.first, self.second = scene, root, second_of(root)
        self.values = {step: {float(step)} for step in range(1, scene.num_steps + 1)}
        """Values that the state of each step may have."""
        self.newest = scene.num_steps
        """Newest step of the branch that training is on."""
        self.restored = scene.restored or scene.num_steps
        """Step that the newest process restored."""
        self.has_garbage = False
        """True if the closed run had left something for `bcp gc`."""
        self._files: dict[str, dict[str, bytes]] = {}
        """The files of each checkpoint that stood in the first root, by save id."""

    def note(self, ended: Ended) -> str | None:
        """Takes in what a process said that was to be killed. Returns what is wrong with it."""
        if ended.exit_code not in {0, -signal.SIGKILL}:
            return f"the process ended otherwise than by the kill: {ended.output[-500:]}"
        found = _BEGUN.search(ended.output)
        if found is not None:
            step, value = int(found[1]), float(found[2])
            self.restored = step - 1
            is_done = f"done {step}\n" in ended.output
            before = self.values.get(step, set())
            self.values[step] = {value} if is_done else before | {value}
            if is_done or (step in bcp.steps(self.first) and value_at(self.first, step) == value):
                self.newest = step
                self.values[step] = {value}
        return None

    def keep_files(self) -> None:
        for step in bcp.steps(self.first):
            folder = self.first / step_folder(step)
            save_id = bcp.open(self.first, step=step).info.save_id
            self._files[save_id] = _files_of(folder)

    def wrong_before_restart(self) -> str | None:
        """Whatever does not hold before the run goes on: what is visible loads, and what is to stay is there."""
        steps = bcp.steps(self.first)
        stays = {self.newest, self.restored} | self.scene.held
        if not stays <= set(steps):
            return f"steps {sorted(stays - set(steps))} are gone; there are {steps}"
        if self.scene.has_second and self.scene.cool_down_keep is None:
            there = bcp.steps(self.second)
            if lost := set(range(1, self.newest + 1)) - {*steps, *there}:
                return f"steps {sorted(lost)} are in neither root: there are {steps} and {there}"
        return self._wrong_values(self.first) or self._wrong_copies()

    def wrong_after_restart(self) -> str | None:
        """Whatever does not hold when the run has gone on and has ended."""
        steps, expected = bcp.steps(self.first), {self.newest, self.restored} | self.scene.held
        if isinstance(self.scene.keep, All):
            expected |= set(range(1, self.newest))
        if set(steps) != expected:
            return f"steps {steps} are left, not {sorted(expected)}"
        there, wanted = bcp.steps(self.second), self._wanted_there()
        if set(there) != wanted:
            return f"steps {there} are in the second root, not {sorted(wanted)}"
        roots = [self.first, self.second] if self.scene.has_second else [self.first]
        self.has_garbage = any(_strangers(root) for root in roots)
        for root in roots:
            clean_up(root)
            if strangers := _strangers(root):
                return f"left in {root.name}: {', '.join(strangers)}"
        return self._wrong_values(self.first) or self._wrong_copies()

    def _wanted_there(self) -> set[int]:
        if not self.scene.has_second:
            return set()
        if self.scene.cool_down_keep is not None:
            return {self.newest, self.restored, PINNED}
        return set(range(1, self.newest + 1))

    def _wrong_values(self, root: Path) -> str | None:
        for step in bcp.steps(root):
            try:
                value = value_at(root, step)
            except (bcp.CheckpointError, WrongBytesError) as error:
                return f"step {step} of {root.name} does not load: {error}"
            if value not in self.values[step]:
                return f"step {step} of {root.name} is that of {value:g}, none of {sorted(self.values[step])}"
        return None

    def _wrong_copies(self) -> str | None:
        """Where a copy is not the checkpoint that stood in the first root, byte for byte."""
        for step in bcp.steps(self.second):
            save_id = bcp.open(self.second, step=step).info.save_id
            expected, found = self._files.get(save_id), _files_of(self.second / step_folder(step))
            if expected is None:
                return f"the copy of step {step} has the save id {save_id}, which no checkpoint had"
            missing = [name for name in expected if name not in found and name.startswith(("data/", "manifest"))]
            differing = [name for name, content in found.items() if expected.get(name, content) != content]
            if missing or differing:
                return f"the copy of step {step}: {missing} are missing, {differing} differ"
        return self._wrong_values(self.second)


def value_at(root: Path, step: int) -> float:
    """Returns the value of which the whole state of a step is, bit by bit."""
    state = state_of(0, -1.0)
    bcp.load(root, state, step=step)
    value = float(state["plain"]["value"])
    if not holds(state, 0, value):
        raise WrongBytesError(f"not all of it is of {value:g}")
    return value


def _files_of(folder: Path) -> dict[str, bytes]:
    names = [name for name in files_under(folder) if not name.startswith(("pin.json", "leases/"))]
    return {name: (folder / name).read_bytes() for name in names}


def _strangers(root: Path) -> list[str]:
    """Files that belong to no checkpoint that is there, nor to the manager that was closed."""
    steps = bcp.steps(root)
    owned = {step_folder(step): bcp.open(root, step=step).info.save_id for step in steps}
    strangers, names = [], files_under(root)
    newest_claim = max(name for name in names if name.startswith("manager/generations/"))
    for name in names:
        folder, _, rest = name.partition("/")
        if folder == "manager":
            is_stranger = name != newest_claim and rest != "branch.json"
        else:
            is_stranger = folder not in owned or not (rest.startswith(_BESIDE) or f"/{owned[folder]}" in rest)
        strangers += [name] if is_stranger else []
    return strangers


class Killed(NamedTuple):
    """What came of one trial."""

    scene: str
    first: int
    """Number of the call at which the first process was to die."""
    num_kills: int
    is_first_killed: bool
    has_garbage: bool
    is_wrong: str | None


def run_life(launcher: Launcher, root: Root, life: int, last: int) -> Ended:
    return launcher.wait(launcher.start(PROGRAM, root.scene.name, root.first, life, last), WITHIN_S)


def kill_once(launcher: Launcher, template: Path, root: Root, lasts: Sequence[int]) -> Killed:
    """Lets as many processes die as there are numbers of calls, one after the other, and starts the run again."""
    shutil.copytree(template, root.first)
    num_kills, is_first_killed, is_wrong = 0, False, None
    for life, last in enumerate(lasts, 1):
        root.keep_files()
        ended = run_life(launcher, root, life, last)
        is_killed = ended.exit_code == -signal.SIGKILL
        num_kills += is_killed
        is_first_killed |= is_killed and life == 1
        is_wrong = root.note(ended)
        root.keep_files()
        is_wrong = is_wrong or root.wrong_before_restart()
        if is_wrong is not None:
            break
    is_wrong = is_wrong or go_on(root)
    return Killed(root.scene.name, lasts[0], num_kills, is_first_killed, root.has_garbage, is_wrong)


def go_on(root: Root) -> str | None:
    """Starts the run again for one step. Returns what is wrong then."""
    state = state_of(0, -1.0)
    try:
        with root.scene.open(root.first) as manager:
            report = manager.restore(state)
            if report is None or report.step != root.newest:
                return f"step {root.newest} is the newest, and {report} was restored"
            root.restored, root.newest = root.newest, root.newest + 1
            value = float(root.newest + LIFE * LAST_LIFE)
            manager.save(root.newest, state_of(0, value))
            root.values[root.newest] = {value}
    except bcp.CheckpointError as error:
        return f"the run does not go on: {type(error).__name__}: {error}"
    root.keep_files()
    return root.wrong_after_restart()


def count_calls(launcher: Launcher, template: Path, root: Root) -> int:
    """Returns how many calls a process makes that is not killed."""
    shutil.copytree(template, root.first)
    ended = run_life(launcher, root, 1, NEVER)
    found = _CALLS.search(ended.output)
    if ended.exit_code != 0 or found is None:
        raise RuntimeError(f"a run that nothing disturbs has failed: {ended}")
    return int(found[1])


def run(asked: Asked, *, scenes: Sequence[Scene]) -> Outcome:
    """Trial n is of scene n modulo their number, and of the next call of it: there the first process dies. A second one
    dies at a call that is drawn, if it makes so many.
    """
    launcher = shared_launcher("faults.kill_times")
    templates, num_calls = {}, {}
    for scene in scenes:
        templates[scene.name] = asked.folder / f"template of {scene.name}"
        managed_run.build(scene, templates[scene.name])
        num_calls[scene.name] = count_calls(launcher, templates[scene.name], Root(scene, asked.folder / scene.name))
    killed, broken = [], []
    for trial in asked.due():
        scene = scenes[trial % len(scenes)]
        rng, first = asked.rng(trial), trial // len(scenes) % num_calls[scene.name]
        lasts = [first, *(rng.randrange(num_calls[scene.name]) for _ in range(scene.kills - 1))]
        root = Root(scene, asked.folder / str(trial))
        killed.append(kill_once(launcher, templates[scene.name], root, lasts))
        if killed[-1].is_wrong is None:
            shutil.rmtree(root.first)
            shutil.rmtree(root.second, ignore_errors=True)
        else:
            broken.append(Broken(trial, f"{killed[-1].is_wrong} ({scene.name}, killed at {lasts})"))
    struck = {(one.scene, one.first) for one in killed if one.is_first_killed}
    of_each = ", ".join(
        f"{sum(name == scene.name for name, _ in struck):,} of {num_calls[scene.name]:,} calls: {scene.name}"
        for scene in scenes
    )
    num_again, num_left = sum(one.num_kills > 1 for one in killed), sum(one.has_garbage for one in killed)
    return Outcome(
        sum(one.num_kills for one in killed),
        tuple(broken),
        f"first kill at {of_each}; {num_again:,} times the next process was killed, too; {num_left:,} times something "
        "stayed for `bcp gc`",
    )


_HOW = "os.kill of itself, at an operation of the store, a call that changes files or the middle of a write"

CAMPAIGNS = (
    Campaign(
        name="kill-deletions",
        fault="SIGKILL at every call while a manager deletes old steps, and in a third of the trials at one call of "
        "the next process; the run is started again",
        how=_HOW,
        unit="kills",
        run=partial(run, scenes=DELETIONS),
        trials=range(1050),
        quick=range(240, 243),
    ),
    Campaign(
        name="kill-copies",
        fault="SIGKILL at every call while a manager copies steps to a second root, and in a third of the trials at "
        "one call of the next process; the run is started again",
        how=_HOW,
        unit="kills",
        run=partial(run, scenes=COPIES),
        trials=range(1050),
        quick=range(240, 243),
    ),
)
