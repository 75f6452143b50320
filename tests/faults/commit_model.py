"""What may be visible after each step of several jobs, and what must be: a record of every save, of what was told of
it, and of which checkpoint stood where. It looks at the store as any reader does, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import bytecheckpoint as bcp
from bytecheckpoint.manifest import decode_manifest
from bytecheckpoint.storage import layout
from faults.commit_job import NOTHING, Call, Ended, opened_by, state_of, value_of
from faults.object_world import Stored, World, WorldStore, save_id_in

MAY_BE_COMMITTED = "whether the checkpoint was committed"
IS_KEPT = "is kept in its local stage"
MANIFEST = "/manifest.bcp"


class BrokenPromiseError(AssertionError):
    """Something did not hold."""


class Place(NamedTuple):
    """Where one checkpoint can be."""

    root: str
    step: int | None

    @property
    def folder(self) -> str:
        return self.root if self.step is None else f"{self.root}/{layout.step_folder(self.step)}"

    @classmethod
    def of(cls, call: Call) -> Place:
        return cls(call.root, call.step)


@dataclass
class Save:
    """One that was begun, known by its value, which no other has."""

    call: Call
    began: int
    """The number of the step in which it did."""
    told: str = ""
    """`acknowledged`, `failed`, `may be` or `kept`; empty while it is under way, and if it was killed."""
    was_visible: bool = False
    is_durable: bool = False
    """In the local stage."""

    @property
    def place(self) -> Place:
        return Place.of(self.call)

    @property
    def may_appear(self) -> bool:
        return self.told != "failed" and not (self.told == "acknowledged" and not self.was_visible)


@dataclass
class Cause:
    """What a step may change."""

    commits: set[float] = field(default_factory=set)
    """Values of saves that it may make visible."""
    deletes: set[Place] = field(default_factory=set)


class Model:
    """All that is known."""

    def __init__(self, world: World, places: Iterable[Place]) -> None:
        self._world = world
        self._places = list(places)
        self._looked: dict[Place, tuple[dict[str, int], float]] = {}
        """What a checkpoint was made of when it was loaded, and its value."""
        self._save_ids: dict[int, str] = {}
        """By version of the manifest."""
        self.saves: dict[float, Save] = {}
        self.visible: dict[Place, float] = {}
        self.num_steps = 0
        self._history: list[tuple[int, Place, float | None]] = []
        """Every change: in which step, where, and what stood there from then on."""
        self.num_loads = 0

    def begin(self, call: Call) -> None:
        self.saves[call.value] = Save(call, self.num_steps)

    def look(self, cause: Cause) -> None:
        """After a step: everything visible is whole, and nothing has changed that the step may not change."""
        self.num_steps += 1
        changed = set()
        for place in self._places:
            before, now = self.visible.get(place), self._value_at(place)
            if now != before:
                self._judge(place, before, now, cause)
                self._history.append((self.num_steps, place, now))
                self.visible = {at: value for at, value in {**self.visible, place: now}.items() if value is not None}
                changed.add(place.root)
        for root in changed:
            self._check_latest(root)

    def _judge(self, place: Place, before: float | None, now: float | None, cause: Cause) -> None:
        if now is None:
            must(place in cause.deletes, f"the checkpoint of {before} at {place} is gone, and nobody deleted it")
            return
        save = self.saves.get(now)
        if save is None:
            raise BrokenPromiseError(f"{now} is visible at {place}, and was never saved")
        must(save.place == place, f"{now} was saved to {save.place} and is visible at {place}")
        must(now in cause.commits, f"{now} became visible at {place} in a step that does not commit it")
        must(save.may_appear, f"{now} became visible at {place} after its save was told {save.told!r}")
        must(before is None or save.call.overwrite, f"{now} has replaced {before} at {place} unasked")
        save.was_visible = True

    def _value_at(self, place: Place) -> float | None:
        """Of the checkpoint that is committed there; read again where anything about it has changed."""
        if place.folder + MANIFEST not in self._world.objects:
            return None
        parts = {name: stored.version for name, stored in self._parts_of(place).items()}
        known = self._looked.get(place)
        if known is None or known[0] != parts:
            known = self._looked[place] = (parts, self.load(place.root, place.step))
        return known[1]

    def _parts_of(self, place: Place) -> dict[str, Stored]:
        """The manifest, and the data of the save that it is of."""
        folder, objects = place.folder, self._world.objects
        save_id = self.save_id_at(place)
        parts = {name: each for name, each in self._world.below(folder).items() if save_id_in(name) == save_id}
        data = {name: stored for name, stored in parts.items() if name.startswith(f"{folder}/data/")}
        return {folder + MANIFEST: objects[folder + MANIFEST], **data}

    def save_id_at(self, place: Place) -> str:
        stored = self._world.objects[place.folder + MANIFEST]
        if stored.version not in self._save_ids:
            self._save_ids[stored.version] = decode_manifest(stored.content).save_id
        return self._save_ids[stored.version]

    def load(self, root: str, step: int | None) -> float:
        """As any reader does it. What does not load is torn."""
        self.num_loads += 1
        state = state_of(NOTHING)
        try:
            with opened_by(self._open):
                bcp.load(root, state, step=step)
        except bcp.CheckpointError as error:
            raise BrokenPromiseError(f"{root} (step {step}) is visible and does not load: {error}") from error
        value = value_of(state)
        if value is None:
            raise BrokenPromiseError(f"{root} (step {step}) has loaded values of several saves: {state}")
        return value

    def _open(self, root: str) -> WorldStore:
        return WorldStore(root, self._world.carry_out)

    def _check_latest(self, root: str) -> None:
        steps = sorted(place.step for place in self.visible if place.root == root and place.step is not None)
        store = self._open(root)
        found = layout.committed_steps(store)
        must(found == steps, f"steps of {root} are {found}, not {steps}")
        latest = next(layout.newest_steps(store), None)
        must(latest == max(steps, default=None), f"latest of {root} is {latest} with {steps} committed")

    def stood_at(self, place: Place, since: int) -> set[float | None]:
        """What has been visible there since a step; None for nothing."""
        before = [value for at, where, value in self._history if where == place and at <= since]
        return {before[-1] if before else None} | {
            value for at, where, value in self._history if where == place and at > since
        }

    def save_ended(self, value: float, ended: Ended, *, met_faults: bool) -> None:
        """What was told of it, against what was to be seen."""
        save = self.saves[value]
        others = self.stood_at(save.place, save.began) - {value}
        error = ended.error
        if error is None:
            must(save.was_visible, f"{value} was acknowledged, and was not to be seen at {save.place}")
            save.told = "acknowledged"
            return
        if error.kind == "exists":
            disturbed = len(others) > 1 or (others != {None} and not save.call.overwrite)
            must(disturbed, f"{value} met a false conflict at {save.place}: {error.message}")
        else:
            must(met_faults, f"the save of {value} met no fault and failed: {error}")
        if MAY_BE_COMMITTED in error.message:
            save.told = "may be"
        elif IS_KEPT in error.message:
            save.told = "kept"
        else:
            must(not save.was_visible, f"{value} was committed at {save.place}, against what was told: {error.message}")
            save.told = "failed"

    def load_ended(self, call: Call, ended: Ended, *, since: int, met_faults: bool) -> None:
        places = [place for place in self._places if place.root == call.root and call.step in {None, place.step}]
        stood: set[float | None] = set().union(*(self.stood_at(place, since) for place in places))
        if ended.error is None:
            must(ended.value in stood - {None}, f"a load of {call} gave {ended.value}, and {stood} stood there")
            return
        undisturbed = all(len(self.stood_at(place, since)) == 1 for place in places)
        if undisturbed and not met_faults:
            must(stood == {None}, f"a load that met no fault failed, of {call}, where {stood} stood: {ended.error}")


def must(holds: bool, what: str) -> None:
    if not holds:
        raise BrokenPromiseError(what)
