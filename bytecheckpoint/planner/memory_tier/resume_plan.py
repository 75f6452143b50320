"""Decides which version, the checkpoint of one save, a resume takes, and who holds each of its data files: memory,
copies, parity, a local stage or storage. It knows what all hosts show, and reads nothing: a holder that proves damaged
is left out of the next plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from bytecheckpoint.errors import and_more

HolderKind = Literal["memory", "peer", "parity", "local", "storage"]
_COSTS: Sequence[HolderKind] = ("memory", "peer", "parity", "local", "storage")
_MAX_NAMED = 4


class ParityMember(msgspec.Struct, frozen=True, array_like=True):
    """One host of a parity group. Its bytes are those of its data files, one after the other."""

    host: str
    files: list[tuple[str, int]]
    """Name and length in bytes of each data file, in the order in which they count."""


class HeldParity(msgspec.Struct, frozen=True, array_like=True):
    """A block of parity on a host: the XOR of one segment of every other member of the group."""

    members: list[ParityMember]
    """All hosts of the group."""
    position: int
    """The host that has the block, as a number in `members`."""


class SeenVersion(msgspec.Struct, frozen=True, array_like=True):
    """One version, as the memory root and the disk of one host show it."""

    save_id: str
    generation: int
    """Number of the branch of training that saved it: a new process, or a load, begins another."""
    step: int
    number: int
    """Rises with each memory save of a job: the later one of equal generation and step counts."""
    needed: dict[str, int] | None
    """All data files of the checkpoint, by name, with lengths in bytes; None where no readable manifest is here."""
    memory: dict[str, int]
    """Data files in slots that ranks of this host have staged."""
    copies: dict[str, int]
    """Data files held for other hosts."""
    local: dict[str, int]
    """Data files in the local stage of this host."""
    parity: list[HeldParity]


class SeenByRank(msgspec.Struct, frozen=True, array_like=True):
    """The versions that one rank sees. All ranks of a host may report the same ones."""

    host: str
    """Id of the memory root."""
    versions: list[SeenVersion]


class StoredVersion(msgspec.Struct, frozen=True, array_like=True):
    """One version at the path."""

    save_id: str
    generation: int | None
    """None where it was saved without a memory tier: it counts as of the newest generation there is."""
    step: int
    files: dict[str, int]
    """Data files at the path, by name, with lengths in bytes."""
    is_committed: bool
    """If False, its files serve a version in memory with the same save id, and nothing else."""


class FileHolder(msgspec.Struct, frozen=True, array_like=True):
    """A place that has a data file."""

    kind: HolderKind
    host: str
    """Id of the memory root beside which it is; empty for storage, which every rank reads, and for a rebuild."""


class DamagedHolding(msgspec.Struct, frozen=True, array_like=True):
    """A holder of a data file that did not have the right bytes. A block of parity has no file name, but a host; a
    rebuild that failed has a file name and no host.
    """

    save_id: str
    file: str
    holder: FileHolder


class VersionPlan(msgspec.Struct, frozen=True, array_like=True):
    """A version all of whose files are held."""

    save_id: str
    generation: int
    step: int
    manifest_hosts: list[str]
    """Hosts whose root has a readable manifest; the empty string stands for the path."""
    files: dict[str, list[FileHolder]]
    """The holders of each data file, cheapest first."""


class PassedOver(msgspec.Struct, frozen=True, array_like=True):
    """A version that cannot be resumed."""

    save_id: str
    generation: int
    step: int
    what: str
    """The reason, as text."""


class ResumePlan(msgspec.Struct, frozen=True, array_like=True):
    """The versions to try, newest first, and those that lack something."""

    versions: list[VersionPlan]
    passed_over: list[PassedOver]


def plan_resume(
    seen: Sequence[SeenByRank], stored: Sequence[StoredVersion], damaged: Collection[DamagedHolding]
) -> ResumePlan:
    """Plans a resume from what all ranks see, what is at the path, and what earlier tries of this resume found damaged.

    Files of different saves are never mixed. The order is that of generation and step; of equal generation and step, a
    save that some host shows, in memory or a local stage, counts before one that is only at the path. A save that is at
    the path without being committed, and that no host shows, is left out.
    """
    views: dict[str, dict[str, list[SeenVersion]]] = {}
    for rank in seen:
        for version in rank.versions:
            views.setdefault(version.save_id, {}).setdefault(rank.host, []).append(version)
    by_id = {version.save_id: version for version in stored if version.is_committed or version.save_id in views}
    newest = max(_generations(views, stored), default=0)
    bad = frozenset(damaged)
    candidates = [
        _Candidate(save_id, views.get(save_id, {}), by_id.get(save_id), newest=newest, damaged=bad)
        for save_id in {**views, **by_id}
    ]
    candidates.sort(key=lambda candidate: candidate.order, reverse=True)
    plans = [candidate.plan() for candidate in candidates]
    return ResumePlan(
        [plan for plan in plans if isinstance(plan, VersionPlan)],
        [plan for plan in plans if isinstance(plan, PassedOver)],
    )


def files_read_at(version: VersionPlan, host: str) -> list[str]:
    """Returns the data files of which this host is one of the cheapest holders. Memory is equally cheap on all hosts;
    storage and rebuilds from parity belong to no host.
    """
    return [
        name
        for name, holders in version.files.items()
        if any(holder.host == host for holder in holders if _tier(holder) == _tier(holders[0]))
    ]


def _tier(holder: FileHolder) -> str:
    return "memory" if holder.kind == "peer" else holder.kind


def _generations(
    views: Mapping[str, Mapping[str, Sequence[SeenVersion]]], stored: Iterable[StoredVersion]
) -> Iterator[int]:
    yield from (version.generation for hosts in views.values() for of_host in hosts.values() for version in of_host)
    yield from (version.generation for version in stored if version.generation is not None and version.is_committed)


class _Candidate:
    """One save, with all that is held of it."""

    def __init__(
        self,
        save_id: str,
        by_host: Mapping[str, Sequence[SeenVersion]],
        stored: StoredVersion | None,
        *,
        newest: int,
        damaged: frozenset[DamagedHolding],
    ) -> None:
        self._save_id = save_id
        self._damaged = damaged
        self._by_host = {host: by_host[host] for host in sorted(by_host)}
        self._stored = stored
        of_all = [version for of_host in self._by_host.values() for version in of_host]
        # Before the manifest is there, generation and number are not decided.
        first = min(of_all, key=lambda version: version.needed is None, default=None)
        if first is not None:
            self.order = (first.generation, first.step, first.number, save_id)
        elif stored is not None:
            self.order = (newest if stored.generation is None else stored.generation, stored.step, -1, save_id)
        self._manifest_hosts, self._needed = self._manifests()
        self._held: dict[str, list[FileHolder]] = {name: [] for name in self._needed}
        self._find_holders()

    def plan(self) -> VersionPlan | PassedOver:
        """Returns the plan of this version, or the reason why there is none."""
        generation, step, *_ = self.order
        if not self._manifest_hosts:
            what = "no host that is here has a readable manifest of it"
            return PassedOver(self._save_id, generation, step, what)
        self._add_rebuilds()
        missing = [name for name, holders in self._held.items() if not holders]
        if missing:
            what = (
                f"{len(missing)} of {len(self._needed)} data files ({and_more(missing, _MAX_NAMED)}) are whole in no "
                "memory, local stage or storage that the ranks here see, and too little is left to rebuild them"
            )
            return PassedOver(self._save_id, generation, step, what)
        return VersionPlan(self._save_id, generation, step, self._manifest_hosts, self._held)

    def _manifests(self) -> tuple[list[str], Mapping[str, int]]:
        """Returns all holders of the manifest ("" is the path), and the lengths of the data files that it lists."""
        listed = {
            host: version.needed
            for host, versions in self._by_host.items()
            for version in versions
            if version.needed is not None
        }
        if self._stored is not None and self._stored.is_committed:
            listed[""] = self._stored.files
        return list(listed), next(iter(listed.values()), {})

    def _find_holders(self) -> None:
        """Notes every holder of each data file, except parity."""
        for host, versions in self._by_host.items():
            for version in versions:
                self._note(FileHolder("memory", host), version.memory)
                self._note(FileHolder("peer", host), version.copies)
                self._note(FileHolder("local", host), version.local)
        if self._stored is not None:
            self._note(FileHolder("storage", ""), self._stored.files)
        for holders in self._held.values():
            holders.sort(key=lambda holder: _COSTS.index(holder.kind))

    def _note(self, holder: FileHolder, files: Mapping[str, int]) -> None:
        for name, byte_length in files.items():
            is_whole = self._needed.get(name) == byte_length and holder not in self._held[name]
            if is_whole and not self._is_damaged(name, holder):
                self._held[name].append(holder)

    def _is_damaged(self, name: str, holder: FileHolder) -> bool:
        return DamagedHolding(self._save_id, name, holder) in self._damaged

    def _add_rebuilds(self) -> None:
        """Adds parity as a holder of every file of a host if each other member of its group has its own block of parity
        and all of its own files in memory.
        """
        for members, blocks in self._parity_groups():
            lacking = {member.host for member in members if not self._is_whole_at(member)}
            for member in members:
                others = {other.host for other in members} - {member.host}
                if others and blocks >= others and lacking <= {member.host}:
                    self._note_rebuild(member)

    def _note_rebuild(self, member: ParityMember) -> None:
        rebuild = FileHolder("parity", "")
        for name in (name for name, _ in member.files if name in self._held):
            if not self._is_damaged(name, rebuild):
                self._held[name].append(rebuild)
                self._held[name].sort(key=lambda holder: _COSTS.index(holder.kind))

    def _parity_groups(self) -> list[tuple[list[ParityMember], set[str]]]:
        """Returns the members of each group, with the hosts that hold their own block, not found damaged; leaves out
        groups without such a host.
        """
        groups: dict[tuple[str, ...], tuple[list[ParityMember], set[str]]] = {}
        blocks = (
            (host, block)
            for host, versions in self._by_host.items()
            for version in versions
            for block in version.parity
        )
        for host, block in blocks:
            is_own = block.members[block.position].host == host
            if is_own and not self._is_damaged("", FileHolder("parity", host)):
                key = tuple(member.host for member in block.members)
                groups.setdefault(key, (block.members, set()))[1].add(host)
        return list(groups.values())

    def _is_whole_at(self, member: ParityMember) -> bool:
        """Returns True if all of a member's data files are in its own memory."""
        own = FileHolder("memory", member.host)
        return all(own in self._held.get(name, ()) for name, _ in member.files)
