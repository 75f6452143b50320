"""Simulates thousands of ranks: what each items to write, and reports to have written. Their messages and files are
real, and travel as those of a process group do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import zstandard

from bytecheckpoint.adapters.shard_columns import ShardBlocks
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.distributed.blocks import COORDINATOR
from bytecheckpoint.distributed.key_value_ranks import GroupRanks
from bytecheckpoint.distributed.ranks import BLOCK_RANKS
from bytecheckpoint.distributed.waiting import CallStore, WaitingClients
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.planner.write_items import WriteItem, pack_items
from bytecheckpoint.runtime.threads import map_jobs, run_jobs
from bytecheckpoint.saving import global_plan
from bytecheckpoint.saving.global_plan import AgreedPlan, LocalSavePlan
from bytecheckpoint.saving.plans.messages import PlanReply
from bytecheckpoint.saving.plans.rank_plan import PlanCache, RankPlan
from bytecheckpoint.saving.report import ReportedFile, WrittenFile, encode_report
from bytecheckpoint.storage import layout

STEP = 1000
VOCABULARY = 128_256
_TIMEOUT_S = 600.0
AT_ONCE = 16
"""Ranks that are at work together: each message waits for another thread, as everywhere."""
POWERS_OF_TEN = 10 ** np.arange(1, 19)


class NamedShape(NamedTuple):
    """Name and global shape of a tensor that all ranks hold by rows."""

    fqn: str
    shape: tuple[int, ...]


class Setting(NamedTuple):
    """Setting of one line of the table."""

    tensors: Sequence[NamedShape]
    num_ranks: int
    root: Path
    """Parent folder of the checkpoint."""

    @property
    def described(self) -> str:
        return f"{self.folder} (step={STEP})"

    @property
    def folder(self) -> Path:
        return self.root / layout.step_folder(STEP)


def member(clients: WaitingClients, rank: int, num_ranks: int) -> GroupRanks:
    """Returns a rank of a group of so many, which meets the others in the store of these clients."""
    return GroupRanks(
        lambda: CallStore(clients),
        rank,
        range(num_ranks),
        _TIMEOUT_S,
        block_ranks=BLOCK_RANKS,
        call="save",
        watch=None,
    )


class SimulatedRanks:
    """All ranks but the coordinator."""

    def __init__(self, setting: Setting, port: int) -> None:
        self._setting = setting
        clients = WaitingClients(dist.TCPStore("127.0.0.1", port, is_master=False), setting.num_ranks)
        self._ranks = [member(clients, rank, setting.num_ranks) for rank in range(1, setting.num_ranks)]
        self.request_bytes = 0
        """Bytes of the requests of all of them."""

    def ask(self) -> None:
        """Sends what each rank items."""
        self._send(list(requests(self._setting)))

    def write(self) -> None:
        """Receives what each rank is to write, writes and reports it, and acknowledges the end."""
        orders = map_jobs(lambda rank: rank.broadcast(b""), self._ranks, num_threads=AT_ONCE)
        self._send(list(reports(self._setting, orders)))
        run_jobs(lambda rank: rank.close(), self._ranks, num_threads=AT_ONCE)

    def _send(self, payloads: Sequence[bytes]) -> None:
        self.request_bytes = self.request_bytes or sum(map(len, payloads))
        each = list(zip(self._ranks, payloads, strict=True))
        # The leader of a block comes last: it forwards the messages of the others.
        for are_leaders in (False, True):
            some = [pair for pair in each if (pair[0].rank % BLOCK_RANKS == 0) == are_leaders]
            run_jobs(lambda pair: pair[0].gather(pair[1]), some, num_threads=AT_ONCE)


def model(num_tensors: int, *, width: int, with_adam: bool) -> list[NamedShape]:
    """Returns layers of a transformer: an embedding, then four matrices and two norms each."""
    layer = [("wq", (width, width)), ("wo", (width, width)), ("up", (3 * width, width)), ("down", (width, 3 * width))]
    layer += [("norm1", (width,)), ("norm2", (width,))]
    tensors = [NamedShape("model.embed.weight", (VOCABULARY, width))]
    for index in range(num_tensors - 1):
        name, shape = layer[index % len(layer)]
        tensors.append(NamedShape(f"model.layers.{index // len(layer)}.{name}.weight", shape))
    if not with_adam:
        return tensors
    states = [
        NamedShape(fqn.replace("model.", "optimizer.state.", 1) + f".{state}", shape)
        for fqn, shape in tensors
        for state in ("exp_avg", "exp_avg_sq")
    ]
    return tensors + states


def items_of(tensors: Sequence[NamedShape], rank: int, num_ranks: int) -> list[WriteItem]:
    """Returns what a rank of FSDP2 holds: rows, as torch.chunk cuts them."""
    items = []
    for fqn, shape in tensors:
        part = -(-shape[0] // num_ranks)
        first = min(rank * part, shape[0])
        num_rows = min(part, shape[0] - first)
        rest = shape[1:]
        items.append(WriteItem(fqn, "float32", shape, (first, *[0] * len(rest)), (num_rows, *rest)))
    return items


def local_plan_of_rank(setting: Setting, items: list[WriteItem]) -> LocalSavePlan:
    options = SaveOptions()
    shards = [
        LocalShard(item.fqn, item.dtype, item.shape, item.region, torch.empty(item.lengths, device="meta"))
        for item in items
    ]
    return LocalSavePlan(
        setting.described, ShardBlocks([shards]), {}, {}, {}, options.max_file_bytes, options.codec, PlanCache()
    )


def rows_of(tensors: Sequence[NamedShape], num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns first row and number of rows of each tensor (column) on each rank (row)."""
    lengths = np.array([shape[0] for _, shape in tensors])
    parts = -(-lengths // num_ranks)
    firsts = np.minimum(np.arange(num_ranks)[:, None] * parts, lengths)
    return firsts, np.minimum(parts, lengths - firsts)


def requests(setting: Setting) -> Iterator[bytes]:
    """Yields what every rank but the coordinator sends it, made fast from what the first one sends."""
    tensors, num_ranks, _ = setting
    items = items_of(tensors, COORDINATOR, num_ranks)
    request = global_plan._whole_message(
        local_plan_of_rank(setting, items), member(WaitingClients(dist.HashStore(), num_ranks), COORDINATOR, num_ranks)
    )
    numbers = np.array([number for item in items for number in (*item.offsets, *item.lengths)], "<i8")
    num_dims = np.array([len(shape) for _, shape in tensors])
    at = np.cumsum(2 * num_dims) - 2 * num_dims
    firsts, counts = rows_of(tensors, num_ranks)
    for rank in range(num_ranks):
        numbers[at], numbers[at + num_dims] = firsts[rank], counts[rank]
        packed = msgspec.structs.replace(request.items, coordinates=zstandard.compress(numbers.tobytes(), 1))
        if rank in {COORDINATOR, num_ranks // 2} and packed != pack_items(items_of(tensors, rank, num_ranks)):
            raise ValueError("a rank is not simulated as it would be")
        if rank != COORDINATOR:
            yield msgspec.msgpack.encode(msgspec.structs.replace(request, items=packed))


def reports(setting: Setting, orders: Sequence[bytes]) -> Iterator[bytes]:
    """Yields what every rank but the coordinator sends after it has written. Ranks with files of the same lengths plan
    and describe them once.
    """
    tensors, num_ranks, _ = setting
    known: dict[tuple[bytes, bytes], tuple[RankPlan, list[object]]] = {}
    firsts, counts = rows_of(tensors, num_ranks)
    for rank, payload in enumerate(orders, 1):
        digits = [
            np.searchsorted(POWERS_OF_TEN, each, side="right") for each in (firsts[rank], firsts[rank] + counts[rank])
        ]
        key = counts[rank].tobytes(), np.add(*digits).tobytes()
        if key not in known:
            order = msgspec.msgpack.decode(payload, type=PlanReply)
            plan = global_plan._rank_plan(
                order, local_plan_of_rank(setting, items_of(tensors, rank, num_ranks)), (), num_ranks
            )
            report = encode_report(
                AgreedPlan(order.save_id, plan, True, False, {}, {}), write_files(setting, plan, rank)
            )
            known[key] = plan, msgspec.msgpack.decode(report)[1:]
            yield report
        else:
            plan, rest = known[key]
            files = [ReportedFile.of(each.file) for each in write_files(setting, plan, rank)]
            yield msgspec.msgpack.encode([files, *rest])


def write_files(setting: Setting, known: RankPlan, rank: int) -> list[WrittenFile]:
    """Writes sparse files of the right lengths, with random checksums."""
    rng = np.random.default_rng(rank)
    (setting.folder / layout.DATA_FOLDER).mkdir(parents=True, exist_ok=True)
    files = []
    for number, planned in enumerate(known.files):
        name = layout.data_file_name(known.plan_id, rank, number)
        with (setting.folder / name).open("xb") as file:
            file.truncate(planned.byte_length)
        digests = rng.integers(0, 1 << 64, len(planned.extent_lengths), np.uint64).tolist()
        files.append(WrittenFile(DataFile(name, planned.byte_length, planned.extent_lengths, digests), None))
    return files
