"""The plan of a recovery: for each save that a dead process left in local stages, the verdict and the ranks that
act.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from bytecheckpoint.errors import and_more

_MAX_NAMED = 10
_SUPERSEDED = "a later save to the same place is finished instead"
_LEFT_TO_CLEAN_UP = "what it has brought to the path is left to `bcp gc`, because its manifest may be on its way there"


class StagedPart(msgspec.Struct, frozen=True, array_like=True):
    """The data that one rank of a save left on a disk, as described by a rank that sees the disk."""

    name: str
    """Name of the folder in the local stage: ranks that share a disk find the same."""
    save_id: str
    rank: int
    num_ranks: int
    folder: str
    """Folder of the checkpoint, inside the store."""
    step: int | None
    overwrite: bool
    replaces: list[str]
    """Ids of saves that were at the path, or on their way there, when this save began."""
    host: str
    started_at: float
    is_alive: bool
    """True if the process that saves is still alive."""
    here: dict[str, int]
    """The data files that are whole on this disk: name in the checkpoint and length in bytes."""
    needed: dict[str, int] | None
    """All data files of the checkpoint, like `here`; None if the process is alive, or no readable manifest of it is on
    this disk."""
    is_complete: bool
    """True if every file of the rank was durable. A rank that did not get so far has reported nothing."""
    damage: str = ""
    """The reason why the manifest on this disk cannot be read."""


class TargetFolder(NamedTuple):
    """The folder that a save goes to, as it is now."""

    save_id: str | None
    """Save id of the committed checkpoint; empty if there is none, None if it cannot be read."""
    sizes: Mapping[str, int]
    """Bytes of data files, by name in the checkpoint."""
    in_the_way: str = ""
    """Path of a committed checkpoint beside which no other may be committed; empty if there is none."""


class RecoveryTask(msgspec.Struct, frozen=True, array_like=True):
    """One rank's work on one folder of its local stage. The folder is removed in the end, unless its save is kept."""

    name: str
    save_id: str
    folder: str
    uploads: list[str]
    """Names of the data files that the rank uploads from the folder."""
    commits: bool
    """True if the rank commits the manifest in the folder."""
    overwrite: bool
    committed_save_id: str
    """Save id of the checkpoint that is at the path and may be replaced; empty where there is none."""


class RecoveryVerdict(msgspec.Struct, frozen=True, array_like=True):
    """The outcome for one save."""

    save_id: str
    folder: str
    step: int | None
    outcome: str
    """The outcome, as in `RecoveredSave`."""
    what: str
    """The reason for the outcome, as text."""
    manifest_may_arrive: bool
    """True if its manifest may have been sent without an answer, and may still be committed: its files have to stay."""
    superseded_by: str = ""
    """Id of the later save that is finished in its place; if that proves to be damaged, this one is still wanted."""


class RecoveryPlan(NamedTuple):
    """The work of each rank, and the verdict on each save, oldest save first."""

    tasks: Sequence[Sequence[RecoveryTask]]
    verdicts: Sequence[RecoveryVerdict]


def plan_recovery(parts_by_rank: Sequence[Sequence[StagedPart]], targets: Mapping[str, TargetFolder]) -> RecoveryPlan:
    """Plans a recovery from the parts that each rank sees. `targets` has, by its name inside the store, each folder
    that a save of these parts goes to.
    """
    tasks: list[list[RecoveryTask]] = [[] for _ in parts_by_rank]
    loads = [0] * len(parts_by_rank)
    verdicts: list[RecoveryVerdict] = []
    busy = {part.folder for of_rank in parts_by_rank for part in of_rank if part.is_alive}
    seers: dict[str, list[int]] = {}
    """Part name -> ranks that see it."""
    for rank, of_rank in enumerate(parts_by_rank):
        for part in of_rank:
            seers.setdefault(part.name, []).append(rank)
    claimed: dict[str, str] = {}
    """Folder -> id of the save that is chosen for it."""
    by_root: dict[str, tuple[bool, str]] = {}
    """Root -> True if steps are finished below it, False if a checkpoint at it; and the folder of the first of them."""
    for parts in _newest_first(parts_by_rank):
        folder, is_step = parts[0].folder, parts[0].step is not None
        root = folder.rpartition("/")[0] if is_step else folder
        are_steps, beside = by_root.get(root, (is_step, ""))
        save = _Save(
            parts, targets[folder], in_the_way=targets[folder].in_the_way or (beside if are_steps != is_step else "")
        )
        verdict = save.verdict(claimed_by=claimed.get(folder, ""), is_busy=folder in busy)
        if verdict.outcome == "committed":
            claimed[folder] = verdict.save_id
            by_root.setdefault(root, (is_step, folder or "the path itself"))
        verdicts.append(verdict)
        for part, uploads, commits in save.work(verdict):
            rank = min(seers[part.name], key=loads.__getitem__)
            loads[rank] += sum(part.here[name] for name in uploads)
            committed = targets[folder].save_id or ""
            task = RecoveryTask(part.name, part.save_id, folder, uploads, commits, part.overwrite, committed)
            tasks[rank].append(task)
    return RecoveryPlan(tasks, verdicts[::-1])


def _newest_first(parts_by_rank: Sequence[Sequence[StagedPart]]) -> list[list[StagedPart]]:
    """Returns the parts of each save, newest save first: each part once, in ascending order of rank."""
    saves: dict[str, dict[str, StagedPart]] = {}
    for part in (part for of_rank in parts_by_rank for part in of_rank):
        saves.setdefault(part.save_id, {})[part.name] = part
    by_rank = [sorted(parts.values(), key=lambda part: part.rank) for parts in saves.values()]
    return sorted(by_rank, key=lambda parts: (parts[0].started_at, parts[0].save_id), reverse=True)


class _Save:
    """The parts of one save, with the folder that it goes to."""

    def __init__(self, parts: Sequence[StagedPart], target: TargetFolder, *, in_the_way: str) -> None:
        self._parts = parts
        self._target = target
        self._in_the_way = in_the_way
        self._with_manifest = next((part for part in parts if part.needed is not None), None)
        """The part whose disk has the manifest; None if no part that is seen has a readable one."""
        self._damage = next((part.damage for part in parts if part.damage), "")
        self._here = {name for part in parts for name in part.here}

    def verdict(self, *, claimed_by: str, is_busy: bool) -> RecoveryVerdict:
        """Returns the verdict. `claimed_by` is the id of the later save that is finished in this folder, empty if there
        is none; `is_busy` is True if a living process saves to the folder.
        """
        first = self._parts[0]
        outcome, what = self._outcome(is_claimed=bool(claimed_by), is_busy=is_busy)
        superseded_by = claimed_by if what == _SUPERSEDED else ""
        may_arrive = self._manifest_may_arrive()
        if outcome == "removed" and may_arrive and self._target.save_id != first.save_id:
            what = f"{what}; {_LEFT_TO_CLEAN_UP}"
        return RecoveryVerdict(first.save_id, first.folder, first.step, outcome, what, may_arrive, superseded_by)

    def _manifest_may_arrive(self) -> bool:
        """Returns True if the manifest may have been sent already: no save sends it before all data is at the path."""
        if self._with_manifest is not None:
            needed = self._with_manifest.needed or {}
            return all(self._target.sizes.get(name) == byte_length for name, byte_length in needed.items())
        own = f"/{self._parts[0].save_id}-"
        # Hazard: a stage without room for the manifest does not have it, and the save goes on all the same.
        return all(part.is_complete for part in self._parts) and any(own in name for name in self._target.sizes)

    def _outcome(self, *, is_claimed: bool, is_busy: bool) -> tuple[str, str]:
        """Returns the outcome for the save, and the reason as text."""
        alive = [part for part in self._parts if part.is_alive]
        if alive:
            return "under_way", f"a living process on {alive[0].host} has it"
        if self._target.save_id == self._parts[0].save_id:
            return "removed", "it had been committed"
        if self._damage:
            return "kept", self._damage
        if self._with_manifest is None:
            return self._without_manifest()
        if is_claimed:
            return "removed", _SUPERSEDED
        if self._target.save_id is None:
            return "kept", "a checkpoint stands there whose manifest cannot be read: see `bcp verify`"
        if self._target.save_id and not (
            self._with_manifest.overwrite and self._target.save_id in self._with_manifest.replaces
        ):
            return "removed", f"another checkpoint (save {self._target.save_id}) has been committed there since"
        if self._in_the_way:
            return "kept", (
                f"a checkpoint is committed at {self._in_the_way}, and a path is one checkpoint or the root of steps, "
                "never both: move that one away and call recover again, or remove this one with `bcp gc`"
            )
        if is_busy:
            return "kept", "another save to the same place is under way: call recover again when it has ended"
        missing = self._missing(self._with_manifest.needed or {})
        if missing:
            return "kept", missing
        return "committed", "every rank's data was there"

    def _without_manifest(self) -> tuple[str, str]:
        if self._parts[0].rank == 0:
            return "removed", "it was cut short before every rank's data was durable"
        return "kept", (
            f"the local stage of rank 0 of {self._parts[0].num_ranks}, which would have the manifest, is not seen by "
            f"any rank here: {self._seen()}"
        )

    def _missing(self, needed: Mapping[str, int]) -> str:
        missing = [name for name in needed if name not in self._here and self._target.sizes.get(name) != needed[name]]
        if not missing:
            return ""
        shown = and_more(missing, _MAX_NAMED)
        return (
            f"{len(missing)} of {len(needed)} data files are neither at the path nor in a local stage here ({shown}): "
            f"{self._seen()}"
        )

    def _seen(self) -> str:
        ranks = and_more([str(part.rank) for part in self._parts], _MAX_NAMED)
        return f"only the parts of ranks {ranks} of {self._parts[0].num_ranks} are visible; run it where the others are"

    def work(self, verdict: RecoveryVerdict) -> list[tuple[StagedPart, list[str], bool]]:
        """Returns all parts of a save that is committed or removed, whose folders are then removed; else none. With
        each are the names of the files to upload from it first, and True if its manifest is to be committed.
        """
        if verdict.outcome not in {"committed", "removed"}:
            return []
        if verdict.outcome == "removed" or self._with_manifest is None:
            return [(part, [], False) for part in self._parts]
        needed = self._with_manifest.needed or {}
        open_names = {name for name in needed if self._target.sizes.get(name) != needed[name]}
        work = []
        for part in self._parts:
            uploads = sorted(open_names & part.here.keys())
            open_names -= part.here.keys()
            work.append((part, uploads, part is self._with_manifest))
        return work
