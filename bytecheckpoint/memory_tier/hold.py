"""The commit of a memory checkpoint. Two rounds of messages: each rank reports its slot, and the coordinator sends the
manifest to one rank of every host; when every host has written it, the checkpoint is complete.

No slot of the version before is taken until then, so at any moment one complete version is on all hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import msgspec

from bytecheckpoint.distributed.ranks import COORDINATOR, RankFailedError, Ranks, together
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointSaveError
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.memory_tier.divergence import (
    DivergentFile,
    DivergentReplica,
    StagedFile,
    divergent_files,
    name_divergent,
    staged_file,
    warn_of_divergence,
)
from bytecheckpoint.memory_tier.protect import protect
from bytecheckpoint.options import Memory
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.saving.prepare import PreparedSave
from bytecheckpoint.saving.report import TimedReport, encode_manifest_and_info, encode_report, reported_files
from bytecheckpoint.saving.write import SaveFiles, write_files
from bytecheckpoint.staging.memory_slots import JobMemory, TierOfSave
from bytecheckpoint.storage.memory_root import version_files
from bytecheckpoint.storage.memory_root.version_files import VersionRecord
from bytecheckpoint.storage.object_io import take_blocks
from bytecheckpoint.storage.store import Access, FillHook

logger = logging.getLogger("bytecheckpoint")


class RankHolding(msgspec.Struct, frozen=True, array_like=True):
    """The slot of one rank, in its message to the coordinator."""

    report: bytes
    host: str
    """Id of the memory root."""
    failure_domain: str | None
    process: str
    """Name of its LivingProcess."""
    since_ns: int
    others: list[tuple[str, int]]
    """Name and `since_ns` of the other living processes of the job on the host."""
    generation: int
    number: int
    """Highest version number that the rank knows."""
    opens_generation: bool
    """True for the first memory save of the process, and for the first one after a load."""
    staged: list[StagedFile]
    """Data files that the rank owns, and those of other ranks that it has staged as well."""


class _HoldReply(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's answer to one rank."""

    record: VersionRecord
    info: bytes
    """Encoded CheckpointInfo."""
    num_on_host: int
    """Number of ranks on the host."""
    manifest: bytes = b""
    """Empty except on the first rank of each host."""
    divergent: list[DivergentFile] = []
    """Files of other ranks of which this rank has staged other bytes."""


class HeldSave(NamedTuple):
    """A save that is complete in memory on all hosts, before its copies or parity are made."""

    info: CheckpointInfo
    record: VersionRecord
    records_for_host: bool
    """True on the one rank of each host that records what the host holds."""


_THREADS = 3


class _NoStore:
    """Takes the bytes of data files and leaves them where they are, in a slot, while their digests are computed."""

    access = Access(0.0, 1.0)

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        """Opens and closes each block, on as many threads as writes to a disk take."""
        del name, replace
        take_blocks(blocks, _leave_in_place, num_threads=_THREADS)

    def read_into(
        self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None
    ) -> NoReturn:
        del name, byte_offset, buffer, on_filled
        raise TypeError("what a slot holds is read from the slot")

    def list(self, folder: str) -> Mapping[str, int | None]:
        del folder
        return {}

    def delete(self, name: str) -> None:
        """Does nothing."""


def hold(prepared: PreparedSave, tier: TierOfSave, metadata: Mapping[str, Any]) -> CheckpointInfo:
    """Holds a save in memory and nowhere else. Raises on every rank what `save` documents; also if a copy fails, and
    then the save stays complete in memory, without its copies.
    """
    call, target = prepared.call, prepared.target
    prepared.progress.never_reach("storage", f"the save to {target.path} goes to memory only: it is never committed")
    prepared.agree()
    with closing(prepared.snapshot):
        held = hold_in_memory(prepared, tier, metadata)
        error = _protect(prepared, tier, held)
        call.ranks.close()
    if error is not None:
        raise error
    call.timer.end_stall()
    if call.ranks.rank == COORDINATOR:
        logger.info("memory holds %s after %.2f s", target.path, call.timer.total)
    return _timed(held.info, call.timer)


def hold_and_finish(
    prepared: PreparedSave, tier: TierOfSave, metadata: Mapping[str, Any], finish: Callable[[], CheckpointInfo]
) -> CheckpointInfo:
    """Holds a save in memory, then commits it with `finish`. Raises like `hold` and `finish`, but not for copies that
    failed: the coordinator's log warns of them, and `SaveHandle.held("host")` raises the error.
    """
    prepared.agree()
    with closing(prepared.snapshot):
        held = hold_in_memory(prepared, tier, metadata)
        error = _protect(prepared, tier, held)
        if error is not None and prepared.call.ranks.rank == COORDINATOR:
            logger.warning("%s goes on to storage without copies in memory: %s", prepared.target.path, error.message)
        info = finish()
    tier.slots.note_commit(prepared.target.step or 0)
    return info


def hold_in_memory(prepared: PreparedSave, tier: TierOfSave, metadata: Mapping[str, Any]) -> HeldSave:
    """Makes a save complete in memory, in the course of a save that may go on to storage."""
    agreed, target, slots = prepared.agree(), prepared.target, tier.slots
    ranks, about, timer = prepared.call
    prepared.snapshot.wait()
    doing = f"holding {target.path} in memory"
    with together(ranks, doing, about=about), timer.phase("hold"):
        staged = _StagedFiles(prepared, slots)
        holding = _holding(slots, staged, prepared.options.memory)
        reduce = partial(_agree, prepared, metadata)
        reply = msgspec.msgpack.decode(ranks.reduce_scatter(msgspec.msgpack.encode(holding), reduce), type=_HoldReply)
        if reply.manifest:
            version_files.add_pending(slots.job, reply.record, reply.manifest)
        divergent = msgspec.msgpack.encode(staged.drop(reply.divergent))
    may_be_complete = ranks.rank != COORDINATOR

    def answer(payloads: Sequence[bytes]) -> Sequence[bytes]:
        nonlocal may_be_complete
        may_be_complete = True
        return _warn_of_all(prepared, payloads)

    try:
        with together(ranks, doing, about=about), timer.phase("hold"):
            slots.doubt(agreed.save_id)
            try:
                ranks.reduce_scatter(divergent, answer)
            except RankFailedError:  # in place of the answer, which no rank gets
                may_be_complete = False
                raise
            slots.note_complete(reply.record)
            with _tidying(slots):
                slots.settle(agreed.save_id)
            if reply.manifest:
                _tidy(slots, agreed.save_id, reply.num_on_host)
    except CheckpointError as error:
        if error.kind != "rank_missing" or not may_be_complete:  # else other ranks may have completed it
            slots.note_failure()
        raise
    prepared.generation = reply.record.generation
    info = msgspec.msgpack.decode(reply.info, type=CheckpointInfo)
    held = HeldSave(_timed(info, timer), reply.record, bool(reply.manifest))
    prepared.progress.reach("process", held.info)
    return held


def _protect(prepared: PreparedSave, tier: TierOfSave, held: HeldSave) -> CheckpointError | None:
    """Protects the save by copies or parity in other failure domains. Returns the error with which that failed, the
    same on all ranks; else None, also if the options want no copies or there are too few failure domains for them.
    """
    memory, progress = prepared.options.memory, prepared.progress
    ranks, about, timer = prepared.call
    if memory is None or (memory.copies == 1 and not memory.parity):
        why = "its options have Memory(copies=1), so each byte is in the memory of one host"
        progress.never_reach("host", f"the save to {prepared.target.path} never survives a host: {why}")
        with _tidying(tier.slots):
            tier.slots.settle(held.record.save_id, is_protected=True)
        tier.slots.keep_copies_of(held.record.save_id)
        return None
    with together(ranks, f"copying {about.path} to other hosts", about=about), timer.phase("copy"):
        done = protect(ranks, tier.slots, held.record, memory, timeout_s=prepared.options.timeout_s)
    if done.error is None:
        _note_protected(tier.slots, held)
    if done.refusal:
        progress.never_reach("host", done.refusal)
        tier.slots.warn_once(done.refusal, is_reporter=ranks.rank == COORDINATOR)
    elif done.error is not None:
        progress.miss("host", done.error)
    else:
        progress.reach("host", _timed(held.info, timer))
    return done.error


def _note_protected(slots: JobMemory, held: HeldSave) -> None:
    """Notes on this host that no earlier save is needed against the loss of a host: this one survives it, or none can
    because copies or parity were refused. Frees the slots of the earlier save that was kept for that loss.
    """
    save_id = held.record.save_id
    with _tidying(slots):
        if held.records_for_host:
            version_files.note_protected(slots.job, save_id)
        slots.settle(save_id, is_protected=True)


def _tidy(slots: JobMemory, save_id: str, num_ranks_on_host: int) -> None:
    """Notes on this host that the save is complete, and frees slots that are no longer needed, but leaves two for each
    of the host's ranks.
    """
    with _tidying(slots):
        version_files.mark_complete(slots.job, save_id)
        version_files.remove_stale_temporaries(slots.job)  # no other rank of this host writes manifests
        slots.trim(num_ranks_on_host)


@contextmanager
def _tidying(slots: JobMemory) -> Iterator[None]:
    """Logs an OSError of the block. It costs no checkpoint, and if one rank raised it here, the others would not know:
    they may have left the call, or wait for this rank in the next phase.
    """
    try:
        yield
    except OSError as error:
        logger.warning("older memory checkpoints in %s could not be tidied up: %s", slots.job.path, error)


def _timed(info: CheckpointInfo, timer: PhaseTimer) -> CheckpointInfo:
    return replace(info, tier="memory", seconds={**timer.seconds, "total": timer.total})


def _leave_in_place(content: memoryview, byte_offset: int) -> None:
    del content, byte_offset


class _StagedFiles:
    """The data files in the slot of this rank: its own, and those of other ranks that it mirrors. Making the object
    computes their digests and marks them in the slot as whole.
    """

    def __init__(self, prepared: PreparedSave, slots: JobMemory) -> None:
        agreed, ranks, plan = prepared.agree(), prepared.call.ranks, prepared.agree().rank_plan
        self._slots = slots
        self._rank = ranks.rank
        self._mirrors = {(mirror.owner, mirror.number): mirror for mirror in plan.mirrors}
        nowhere = prepared.target._replace(store=_NoStore(), stage=None)
        written = write_files(SaveFiles(nowhere, agreed.save_id, ranks.rank, plan.staged), prepared, reuse=None)
        own = written[: len(plan.files)]
        self.report = encode_report(agreed, own)
        prepared.extent_digests = [file.extent_digests for file, _ in own]
        names = [*((self._rank, number) for number in range(len(own))), *self._mirrors]
        self._files = {name: each.file for name, each in zip(names, written, strict=True)}
        self.files = [staged_file(*name, file) for name, file in self._files.items()]
        self._mark_whole = partial(slots.mark_whole, agreed.save_id, prepared.target.step or 0, self._rank)
        self._mark_whole(names)

    def drop(self, divergent: Sequence[DivergentFile]) -> list[DivergentReplica]:
        """Marks the `divergent` files in the slot as not valid, and returns their tensors that differ."""
        if not divergent:
            return []
        divergent_by_name = {(each.owner, each.number): each for each in divergent}
        self._mark_whole(
            [(-1, number) if (owner, number) in divergent_by_name else (owner, number) for owner, number in self._files]
        )
        return [
            replica
            for name, owned in divergent_by_name.items()
            for replica in name_divergent(self._rank, self._mirrors[name], self._files[name], owned)
        ]


def _warn_of_all(prepared: PreparedSave, payloads: Sequence[bytes]) -> Sequence[bytes]:
    found = [each for sent in payloads for each in msgspec.msgpack.decode(sent, type=list[DivergentReplica])]
    warn_of_divergence(found, prepared.target.path, prepared.call.ranks.global_ranks)
    return [b""] * len(payloads)


def _holding(slots: JobMemory, staged: _StagedFiles, memory: Memory | None) -> RankHolding:
    (generation, number), process = slots.seen(), slots.process
    return RankHolding(
        report=staged.report,
        host=slots.job.host,
        failure_domain=memory.failure_domain if memory is not None else None,
        process=process.name,
        since_ns=process.since_ns,
        others=[(other.name, other.since_ns) for other in slots.others()],
        generation=generation,
        number=number,
        opens_generation=slots.opens_generation,
        staged=staged.files,
    )


def _agree(prepared: PreparedSave, metadata: Mapping[str, Any], payloads: Sequence[bytes]) -> Sequence[bytes]:
    """Makes the manifest, and returns the encoded `_HoldReply` to each rank. Called on the coordinator only."""
    call, target = prepared.call, prepared.target
    holdings = [msgspec.msgpack.decode(payload, type=RankHolding) for payload in payloads]
    refuse_other_jobs(holdings, call.ranks, target.path)
    refuse_mixed_domains(holdings, call.ranks)
    generation = max(each.generation for each in holdings) + any(each.opens_generation for each in holdings)
    number = max(each.number for each in holdings) + 1
    agreed = prepared.agree()
    record = VersionRecord(agreed.save_id, generation, target.step or 0, number, target.folder)
    content, info = encode_manifest_and_info(
        agreed,
        [TimedReport(each.report, {}) for each in holdings],
        call,
        target,
        metadata=metadata,
        generation=generation,
    )
    ranks_of = _ranks_by_host(holdings)
    divergent = divergent_files([each.staged for each in holdings], lambda rank: reported_files(holdings[rank].report))
    return [
        msgspec.msgpack.encode(
            _HoldReply(record, info, len(here), content if here[0] == rank else b"", divergent[rank])
        )
        for rank, here in enumerate(ranks_of[each.host] for each in holdings)
    ]


def _ranks_by_host(holdings: Sequence[RankHolding]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(holdings):
        found.setdefault(each.host, []).append(rank)
    return found


def refuse_other_jobs(holdings: Sequence[RankHolding], ranks: Ranks, path: str) -> None:
    """Raises CheckpointSaveError (superseded) if a living process on a host of these ranks is not among them, and has
    worked on the job for longer than all ranks there.
    """
    own = {each.process for each in holdings}
    for ranks_here in _ranks_by_host(holdings).values():
        here = [holdings[rank] for rank in ranks_here]
        since = min(each.since_ns for each in here)
        older = {name for each in here for name, other_ns in each.others if name not in own and other_ns < since}
        if older:
            raise CheckpointSaveError(
                f"{len(older)} living processes on the host of rank {ranks.global_ranks[ranks_here[0]]} hold "
                f"memory checkpoints of {path} already, and are not among the ranks of this save; nothing was held, "
                "and their checkpoints are as they were: end the other job, or save to another path",
                kind="superseded",
                path=path,
            )


def refuse_mixed_domains(holdings: Sequence[RankHolding], ranks: Ranks) -> None:
    """Raises CheckpointMismatchError (conflict) if ranks of one host name different failure domains."""
    first: dict[str, int] = {}
    for rank, each in enumerate(holdings):
        other = first.setdefault(each.host, rank)
        if holdings[other].failure_domain != each.failure_domain:
            raise CheckpointMismatchError(
                f"ranks {ranks.global_ranks[other]} and {ranks.global_ranks[rank]} share a memory root, so they are on "
                f"one host, but say failure_domain={holdings[other].failure_domain!r} and {each.failure_domain!r}; "
                "nothing was held: give all ranks of a host the same label",
                kind="conflict",
                ranks=(ranks.global_ranks[other], ranks.global_ranks[rank]),
            )
