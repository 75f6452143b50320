"""Loads the newest version that memory and storage hold, with all ranks together. Damaged holders are left out, and the
next holder or the next older version is tried, until one loads: planner/memory_tier/resume_plan.py decides which.
"""

from __future__ import annotations

# ruff: noqa: TRY400 - the message says all that a user needs, without a traceback
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, Subject, check_same, join_ranks, together
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    StorageError,
)
from bytecheckpoint.info import LoadReport
from bytecheckpoint.loading.read import Source
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.memory_tier.damage import choose_good_places, damaged_files
from bytecheckpoint.memory_tier.part_of_save import memory_of
from bytecheckpoint.memory_tier.rebuild import RebuildInput, needs_rebuild, rebuild
from bytecheckpoint.memory_tier.seen import (
    HostView,
    VersionAtPath,
    look_at_host,
    look_at_path,
    look_for_branches,
    newest_not_left,
)
from bytecheckpoint.memory_tier.sources import SOURCES, Use, count_sources
from bytecheckpoint.name_maps.load import CheckpointFolder, mapped_manifest
from bytecheckpoint.options import LoadOptions, NameMap, SaveOptions
from bytecheckpoint.planner.memory_tier.resume_plan import (
    DamagedHolding,
    FileHolder,
    PassedOver,
    SeenByRank,
    VersionPlan,
    files_read_at,
    plan_resume,
)
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.storage.credentials import showable_url, shown_path
from bytecheckpoint.storage.layout import parse_manifest, root_of, step_folder
from bytecheckpoint.storage.memory_root.held_store import HeldStore, StoredAt
from bytecheckpoint.storage.memory_root.slot_file import FilePlace
from bytecheckpoint.storage.open_store import open_store, real_location
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_FEW_STEPS, _MANY_STEPS = 4, 32
"""Steps at the path that are compared with those in memory: at first, and once something was damaged."""


class ResumeLoads(NamedTuple):
    """The loads that a resume makes."""

    at_path: Callable[..., LoadReport]
    """Loads `step` at the path, a number or "latest"."""
    opened: Callable[..., LoadReport]
    """Loads the Source that its argument `opened` returns for ranks and options."""


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """The message of one rank."""

    location: str
    seen: SeenByRank
    folders: dict[str, str]
    damaged: list[DamagedHolding]
    failed: str
    """Id of the save that was tried last and did not load; empty before the first try."""


class _Choice(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's answer to one rank."""

    version: VersionPlan | None
    """None where nothing was found."""
    folder: str = ""
    manifest_from: int = COORDINATOR
    """Rank that has the manifest."""
    hosts: list[str] = []
    """Host of each rank."""
    is_stored_only: bool = False
    """True if only the path has files of the version, and it is committed there."""
    stored_step: int | None = None
    """Step at the path to load where nothing was found; None for none in a managed run, else for the newest checkpoint,
    also one of another program."""


class ResumeCall:
    """One call of `resume` on one rank."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: SaveOptions,
        *,
        process_group: dist.ProcessGroup | None,
        role: str | None,
        storage_options: Mapping[str, Any] | None,
        abandoned: Collection[int] | None,
    ) -> None:
        """`abandoned` are the steps of a managed run that are not loaded from its path; None without a manager."""
        self._path, self._role = path, role
        self._is_managed, self._abandoned = abandoned is not None, abandoned or ()
        self._options = options
        self._group = process_group
        self._about = Subject(shown_path(path), None, is_save=False, call="resume")
        self._storage_options = storage_options
        self._store: Store | None = None
        self._memory: JobMemory | None = None
        self._view: HostView | None = None
        self._damaged: list[DamagedHolding] = []
        self._given_up: dict[str, str] = {}
        """Saves that did not load though no holder was found damaged, with the reason; on the coordinator."""
        self._num_damaged = 0
        """Damaged holdings of all ranks, before the last try; on the coordinator."""
        self._failed = self._failure = ""
        self._was_rebuilt = False
        """True if a rebuild was tried after the last load that failed."""
        self._stored: dict[str, VersionAtPath] = {}
        self._held: HeldStore | None = None
        self._rebuilt: dict[str, set[str]] = {}
        """Data files of each save that were rebuilt, or were to be."""

    def run(self, calls: ResumeLoads) -> LoadReport | None:
        """Loads the newest version that can be loaded. Returns None if memory and path hold none, and raises
        CheckpointCorruptError if they hold some, but none that can be loaded.
        """
        while True:
            choice, content = self._choose()
            version = choice.version
            if version is None:
                return self._load_stored(calls, choice.stored_step)
            if needs_rebuild(version):
                self._rebuild(version, content)
                continue
            try:
                if choice.is_stored_only:
                    report = calls.at_path(step=version.step)
                else:
                    report = calls.opened(opened=partial(self._open, version=version, choice=choice, content=content))
            except CheckpointError as error:
                if not _is_damage(error):
                    raise
                logger.error("step %d is not resumed from what was tried: %s", version.step, error.message)
                self._note_damage(version, choice.hosts, content, error)
            else:
                return replace(report, sources=self._settle(version, is_stored_only=choice.is_stored_only))

    def _choose(self) -> tuple[_Choice, bytes]:
        """Agrees with all ranks on the version to load next. Returns it with its encoded manifest, which is empty if
        there is no version, or if it is read from the path alone.
        """
        ranks = join_ranks(self._group, self._options.timeout_s, about=self._about)
        doing = f"looking for what memory and storage hold of {self._about.path}"
        with together(ranks, doing, about=self._about):
            store, memory = self._open_job()
            stage = self._options.local_stage
            view = look_at_host(memory.job, None if stage is None else str(stage), store)
            self._view = view
            message = _Seen(
                real_location(store, ""),
                SeenByRank(memory.job.host, view.versions),
                view.folders,
                self._damaged,
                self._failed,
            )
            reply = ranks.reduce_scatter(msgspec.msgpack.encode(message), partial(self._plan, ranks, store))
            choice = msgspec.msgpack.decode(reply, type=_Choice)
            content = b""
            if choice.version is not None and not choice.is_stored_only:
                content = self._share_manifest(ranks, choice, choice.version.save_id)
                if view.others:
                    files = parse_manifest(content, path=choice.folder, check_all=False).files
                    choose_good_places(view, choice.version.save_id, files)
        ranks.close()
        return choice, content

    def _open_job(self) -> tuple[Store, JobMemory]:
        """Returns store and job; the first call waits for saves in flight, and registers this process with the job."""
        if self._store is None or self._memory is None:
            if self._options.memory is None:
                raise CheckpointMismatchError(
                    "resume was given options without memory; nothing was changed: pass the options of the saves, with "
                    "SaveOptions(memory=bcp.Memory()), or call load",
                    kind="conflict",
                )
            process = process_state()
            process.saves.wait_until_ended()
            root, timeout_s = root_of(self._path, self._role), self._options.timeout_s
            self._store = open_store(root, storage_options=self._storage_options, writer_threads=1, timeout_s=timeout_s)
            self._about = self._about._replace(path=showable_url(root))  # the role included
            self._memory = memory_of(process, self._options.memory, self._store)
            self._memory.register()
        return self._store, self._memory

    def _plan(self, ranks: Ranks, store: Store, payloads: Sequence[bytes]) -> Sequence[bytes]:
        """Decides, on the coordinator, which version is loaded next. Raises `_nothing_left` if all have failed."""
        messages = [msgspec.msgpack.decode(payload, type=_Seen) for payload in payloads]
        check_same("resume from", [message.location for message in messages], ranks.global_ranks)
        damaged = {holding for message in messages for holding in message.damaged}
        folders = {save_id: folder for message in messages for save_id, folder in message.folders.items()}
        if self._failed and len(damaged) == self._num_damaged and not self._was_rebuilt:  # else it would never end
            self._given_up[self._failed] = self._failure
        self._num_damaged = len(damaged)
        seen = [message.seen for message in messages]
        try:
            max_steps = _MANY_STEPS if self._failed else _FEW_STEPS
            found = look_at_path(store, folders, max_steps=max_steps, abandoned=self._abandoned)
            if not any(map(_has_copies, plan_resume(seen, [each.version for each in found], damaged).versions[:1])):
                found += look_for_branches(store, found, self._abandoned)
        except StorageError as error:
            found = []
            if not plan_resume(seen, [], damaged).versions:
                raise
            logger.warning("only memory is looked at, because the path is out of reach: %s", error.message)
        self._stored = {each.version.save_id: each for each in found}
        plan = plan_resume(seen, [each.version for each in found], damaged)
        versions = [version for version in plan.versions if version.save_id not in self._given_up]
        known = {version.save_id for rank in seen for version in rank.versions if version.needed is not None}
        lacking = [each for each in plan.passed_over if each.save_id in known]
        hosts = [message.seen.host for message in messages]
        if not versions:
            if lacking or self._given_up:
                raise self._nothing_left(lacking)
            stored_step = newest_not_left(store, self._abandoned) if self._is_managed else None
            return [msgspec.msgpack.encode(_Choice(None, stored_step=stored_step))] * ranks.num_ranks
        version = versions[0]
        is_stored_only = not _has_copies(version)
        choice = _Choice(
            version,
            folders.get(version.save_id, step_folder(version.step)),
            next((rank for rank, host in enumerate(hosts) if host in version.manifest_hosts), COORDINATOR),
            hosts,
            is_stored_only and version.save_id in self._stored and self._stored[version.save_id].version.is_committed,
        )
        return [msgspec.msgpack.encode(choice)] * ranks.num_ranks

    def _nothing_left(self, lacking: Sequence[PassedOver]) -> CheckpointCorruptError:
        named = [f"step {each.step} (save {each.save_id}): {each.what}" for each in lacking]
        named += [f"save {save_id}: {why}" for save_id, why in self._given_up.items()]
        state = "The state is undefined now: loads into it were begun" if self._failed else "The state is unchanged"
        return CheckpointCorruptError(
            f"nothing of what memory and storage hold of {self._about.path} can be resumed: {'; '.join(named)}. "
            f"{state}. Resume where all hosts of the saves are, load an older checkpoint, or begin anew without "
            "resume",
            kind="missing_file" if not self._failed else "checksum",
            path=self._about.path,
        )

    def _share_manifest(self, ranks: Ranks, choice: _Choice, save_id: str) -> bytes:
        """Returns on every rank the manifest that one rank has."""
        content = b""
        if ranks.rank == choice.manifest_from:
            content = self._view.manifests.get(save_id, b"") if self._view is not None else b""
            if not content and save_id in self._stored:
                content = self._stored[save_id].content
        if choice.manifest_from != COORDINATOR:
            gathered = ranks.gather(content)
            content = gathered[choice.manifest_from] if ranks.rank == COORDINATOR else b""
        return ranks.broadcast(content)

    def _open(
        self, ranks: Ranks, options: LoadOptions, *, version: VersionPlan, choice: _Choice, content: bytes
    ) -> Source:
        """Returns the version as this rank can read it."""
        store, _ = self._open_job()
        path = join_name(str(store), choice.folder)
        manifest = parse_manifest(content, path=path, check_all=False)
        host = choice.hosts[ranks.rank]
        places = self._places(version, host)
        is_storage = {name for name, holders in version.files.items() if holders[0].kind == "storage"}
        readable = {*places, *is_storage}
        elsewhere = {file.name: file.byte_length for file in manifest.files if file.name not in readable}
        held = HeldStore(
            places, content, shown=f"memory of {path}", elsewhere=elsewhere, stored=StoredAt(store, choice.folder)
        )
        self._held = held
        options = replace(options, verify=True)  # what a process left when it was killed is never trusted
        is_exchanged = ranks.num_ranks > 1 and (len(set(choice.hosts)) > 1 or options.exchange == "on")
        source = Source(held, "", _mapped(manifest, held, options), options, is_exchanged=is_exchanged, path=path)
        source.held_files = frozenset(number for number, file in enumerate(manifest.files) if file.name in places)
        return source

    def _places(self, version: VersionPlan, host: str) -> dict[str, FilePlace]:
        """Returns the cheapest place on this host of each file of which it is one of the cheapest holders."""
        found = self._view.places if self._view is not None else {}
        places = {}
        for name in files_read_at(version, host):
            kinds = [holder.kind for holder in version.files[name] if holder.host == host]
            place = next(
                (found[version.save_id, kind].get(name) for kind in kinds if (version.save_id, kind) in found), None
            )
            if place is not None:
                places[name] = place
        return places

    def _rebuild(self, version: VersionPlan, content: bytes) -> None:
        """Rebuilds, with all ranks, what only parity has; the next plan finds it, or passes the version over."""
        save_id, view, self._was_rebuilt = version.save_id, self._view, True
        lost = {name for name, holders in version.files.items() if holders[0].kind == "parity"}
        if lost <= self._rebuilt.get(save_id, set()):  # it was tried, and is not there
            self._damaged += (DamagedHolding(save_id, name, FileHolder("parity", "")) for name in lost)
            return
        self._rebuilt.setdefault(save_id, set()).update(lost)
        _, memory = self._open_job()
        if view is None or self._options.memory is None:
            raise TypeError("the host was not looked at before the rebuild")
        files = {file.name: file for file in parse_manifest(content, path="", check_all=False).files}
        inputs = RebuildInput(
            version, view.places.get((save_id, "memory"), {}), view.parity.get(save_id), files, version.step
        )
        ranks = join_ranks(self._group, self._options.timeout_s, about=self._about)
        with together(ranks, f"rebuilding {self._about.path} from parity", about=self._about):
            max_bytes, timeout_s = self._options.memory.max_bytes, self._options.timeout_s
            self._damaged += rebuild(ranks, memory, inputs, timeout_s=timeout_s, max_bytes=max_bytes)
            ranks.barrier()  # tells a rank whose part is done if another one fails
        ranks.close()

    def _note_damage(self, version: VersionPlan, hosts: Sequence[str], content: bytes, error: CheckpointError) -> None:
        """Notes for the next plan that the version did not load, and which files on this host are damaged: its ranks
        divide the files. `hosts` has the host of each rank.
        """
        held = self._held
        self._failed, self._failure, self._was_rebuilt = version.save_id, error.message, False
        if held is None or not content:
            return
        rank = dist.get_rank(self._group) if len(hosts) > 1 else 0
        host_ranks = [other for other, name in enumerate(hosts) if name == hosts[rank]]
        places = self._places(version, hosts[rank])
        files = {file.name: file for file in parse_manifest(content, path="", check_all=False).files}
        own = [files[name] for name in sorted(places)][host_ranks.index(rank) :: len(host_ranks)]
        for name in damaged_files(held, own):
            holder = next(each for each in version.files[name] if each.host == hosts[rank])
            self._damaged.append(DamagedHolding(version.save_id, name, holder))
        self._held = None

    def _load_stored(self, calls: ResumeLoads, step: int | None) -> LoadReport | None:
        """Loads this step at the path; for None the newest there, or nothing in a managed run, whose path then has no
        step. Returns None if nothing was loaded. Raises the error if the step cannot be loaded.
        """
        if step is None and self._is_managed:
            return None
        try:
            report = calls.at_path(step="latest" if step is None else step)
        except CheckpointNotFoundError as error:
            if step is None and error.kind in {"not_found", "not_committed"}:
                return None
            raise
        return replace(report, sources=dict.fromkeys(SOURCES, 0))

    def _settle(self, version: VersionPlan, *, is_stored_only: bool) -> dict[str, int]:
        """Keeps the slots of the resumed version. Returns the number of its data files by the source from which all
        ranks together read them.
        """
        ranks = join_ranks(self._group, self._options.timeout_s, about=self._about)
        with together(ranks, f"resuming {self._about.path}", about=self._about):
            _, memory = self._open_job()
            memory.settle(version.save_id)
            memory.note_load()
            wanted = sorted(self._held.wanted) if self._held is not None else []
            use = msgspec.msgpack.encode(Use(memory.job.host, wanted))
            rebuilt = self._rebuilt.get(version.save_id, set())
            count = partial(count_sources, version, rebuilt, is_stored_only=is_stored_only)
            reply = ranks.reduce_scatter(use, count)
        ranks.close()
        return msgspec.msgpack.decode(reply, type=dict[str, int])


def _mapped(manifest: Manifest, held: HeldStore, options: LoadOptions) -> Manifest:
    if not isinstance(options.name_map, NameMap):
        return manifest
    return mapped_manifest(manifest, CheckpointFolder(held, ""), options.name_map)


def _has_copies(version: VersionPlan) -> bool:
    """Returns True if anything but storage has files of the version."""
    return any(holders[0].kind != "storage" for holders in version.files.values())


def _is_damage(error: CheckpointError) -> bool:
    """Returns True if the error is about the bytes of the version, so that another holder or version may load."""
    is_damage = isinstance(error, CheckpointCorruptError) or error.kind == "missing_file"
    return is_damage and error.kind != "unsupported_version"
