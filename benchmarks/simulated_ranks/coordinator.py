"""Times the coordinator of a save by many ranks, from its state to the commit, and a rank that loads its part. Each
runs in a process of its own, calls what `save` and `load` call, and holds tensors whose memory is never touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

# Registers the backend "fake": a DTensor asks for a group as large as its mesh, and none of it is used.
from torch.testing._internal.distributed.fake_pg import FakeStore

from bytecheckpoint.adapters.collect import collect_all, entries_of
from bytecheckpoint.distributed.blocks import COORDINATOR
from bytecheckpoint.distributed.ranks import SoleRank, Subject
from bytecheckpoint.distributed.waiting import WaitingClients
from bytecheckpoint.loading.mismatches import merge_findings
from bytecheckpoint.loading.name_scope import NameScope, WantedState, match_named
from bytecheckpoint.loading.read import Source
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.saving.commit import commit_together
from bytecheckpoint.saving.global_plan import LocalSavePlan, exchange_plans, make_local_plan
from bytecheckpoint.saving.plans.rank_plan import PlanCache
from bytecheckpoint.saving.report import TimedReport, encode_manifest_and_info, encode_report
from bytecheckpoint.saving.target import SaveCall, open_target
from bytecheckpoint.saving.write import SaveFiles
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store
from simulated_ranks.ranks import STEP, Setting, items_of, member, write_files


class Cost(NamedTuple):
    """Cost of the coordinator of a save. Seconds are of processor time."""

    plan_s: float
    manifest_s: float
    again_s: float
    commit_s: float
    num_chunks: int
    manifest_bytes: int
    peak_mb: float
    """Peak memory beyond what it had before."""


def coordinate(connection: Connection, setting: Setting) -> None:
    """Runs the coordinator. Waits for a message before each part, so that no other rank is at work meanwhile."""
    with state_of_rank(setting, COORDINATOR) as state:
        before = memory_mb()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        connection.send(store.port)
        ranks = member(WaitingClients(store, setting.num_ranks), COORDINATOR, setting.num_ranks)

        connection.recv()
        started = time.process_time()
        contents = collect_all(entries_of(state, "auto"))
        local_plan = make_local_plan(ranks, setting.described, contents, SaveOptions(), plans=PlanCache())
        agreed = exchange_plans(ranks, local_plan)
        plan_s = time.process_time() - started
        _check_simulation(setting, COORDINATOR, local_plan)

        call = SaveCall(ranks, Subject(str(setting.folder), STEP, is_save=True), PhaseTimer())
        target = open_target(setting.root, step=STEP, role=None, storage_options=None, options=SaveOptions())
        files = SaveFiles(target, agreed.save_id, COORDINATOR, agreed.rank_plan.files)
        written = write_files(setting, agreed.rank_plan, COORDINATOR)
        connection.send(None)

        connection.recv()
        started = time.process_time()
        reports = [TimedReport(report, {}) for report in ranks.gather(encode_report(agreed, written))]
        content, info = encode_manifest_and_info(agreed, reports, call, target, metadata={})
        manifest_s = time.process_time() - started
        started = time.process_time()
        content, info = encode_manifest_and_info(agreed, reports, call, target, metadata={})
        again_s = time.process_time() - started
        started = time.process_time()
        commit_together(call, files, content, info)
        commit_s = time.process_time() - started
        peak = peak_mb() - before
        num_chunks = sum(len(tensor.ranks) for tensor in agreed.rank_plan.global_plan.tensors)
        connection.send(Cost(plan_s, manifest_s, again_s, commit_s, num_chunks, len(content), peak))


def load(connection: Connection, setting: Setting) -> None:
    """Runs a rank that loads what the middle one of as many saved: from the manifest's bytes to a plan of all reads."""
    rank = setting.num_ranks // 2
    with state_of_rank(setting, rank) as state:
        store = open_store(setting.root, storage_options=None, writer_threads=1)
        content = layout.read_manifest_bytes(store, setting.folder.name)
        before = memory_mb()
        started = time.process_time()
        manifest = layout.parse_manifest(content, path=str(setting.folder), check_all=False)
        source = Source(store, setting.folder.name, manifest, LoadOptions(), is_exchanged=False)
        scope = NameScope(manifest, rank, setting.num_ranks, None, None, None)
        # Alone: what each rank found the others get in one small message.
        _, stored, match, _ = match_named(scope, WantedState(state, "auto", cast=False, strict=True))
        merge_findings(
            SoleRank(),
            match,
            stored,
            state.keys(),
            strict=True,
            ignored=(),
            other_name="",
            has_experts=False,
            sums=(),
            sums_in_files=False,
            foreign_format="",
        )
        fetches = source.plan(match.shards, match.stored_fqns)
        seconds = time.process_time() - started
        wanted_bytes = sum(shard.tensor.nbytes for shard in match.shards)
        planned_bytes = sum(part.byte_length for fetch in fetches for part in fetch.all_parts)
        if planned_bytes != wanted_bytes:
            raise ValueError(f"the plan reads {planned_bytes} bytes for {wanted_bytes}")
        connection.send((seconds, peak_mb() - before))


@contextmanager
def state_of_rank(setting: Setting, rank: int) -> Iterator[dict[str, Any]]:
    """Yields the state of a rank, as a model and optimizer of FSDP2 hold it."""
    tensors, num_ranks, _ = setting
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        mesh = init_device_mesh("cpu", (num_ranks,))
        state: dict[str, Any] = {}
        for item in items_of(tensors, rank, num_ranks):
            entry, _, name = item.fqn.partition(".")
            local, stride = torch.empty(item.lengths), (*item.shape[1:], 1)
            tensor = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(item.shape), stride=stride
            )
            state.setdefault(entry, {})[name] = tensor
        yield state
    finally:
        dist.destroy_process_group()


def _check_simulation(setting: Setting, rank: int, local_plan: LocalSavePlan) -> None:
    if local_plan.items() != items_of(setting.tensors, rank, setting.num_ranks):
        raise ValueError("the simulated ranks hold something else than a state gives")


def memory_mb() -> float:
    """Returns the resident memory now."""
    return _status_mb("VmRSS")


def peak_mb() -> float:
    """Returns the peak. getrusage would count the parent's memory before the fork as well."""
    return _status_mb("VmHWM")


def _status_mb(field: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6
