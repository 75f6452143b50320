"""Ranks that are only played: what each of thousands would offer to write, and would report to have written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import zstandard

from bytecheckpoint import agreement
from bytecheckpoint.agreement import Agreed, Target, Wish
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.plan_cache import KnownPlan
from bytecheckpoint.planner.offers import Offer, pack_offers
from bytecheckpoint.reporting import WrittenFile, encode_report
from bytecheckpoint.storage import layout

TARGET = Target("/benchmarks/planning", 1000, overwrite=False)
WIDTH, VOCABULARY = 8192, 128_256


class Tensor(NamedTuple):
    """One that all ranks hold by rows."""

    fqn: str
    shape: tuple[int, ...]


class ManyRanks:
    """The ranks of a group, as the coordinator sees them; what it gathers was put there before."""

    rank = 0

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.names = range(num_ranks)
        self.payloads: list[bytes] = []
        self.scattered: list[bytes] = []

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload, *self.payloads]

    def scatter(self, payloads: list[bytes]) -> bytes:
        self.scattered = payloads
        return payloads[0]

    def broadcast(self, payload: bytes) -> bytes:
        return payload


def model(num_tensors: int, *, with_adam: bool) -> list[Tensor]:
    """Layers of a transformer: an embedding, then four matrices and two norms each."""
    layer = [("wq", (WIDTH, WIDTH)), ("wo", (WIDTH, WIDTH)), ("up", (3 * WIDTH, WIDTH)), ("down", (WIDTH, 3 * WIDTH))]
    layer += [("norm1", (WIDTH,)), ("norm2", (WIDTH,))]
    tensors = [Tensor("model.embed.weight", (VOCABULARY, WIDTH))]
    for index in range(num_tensors - 1):
        name, shape = layer[index % len(layer)]
        tensors.append(Tensor(f"model.layers.{index // len(layer)}.{name}.weight", shape))
    if not with_adam:
        return tensors
    states = [
        Tensor(fqn.replace("model.", "optimizer.state.", 1) + f".{state}", shape)
        for fqn, shape in tensors
        for state in ("exp_avg", "exp_avg_sq")
    ]
    return tensors + states


def offers_of(tensors: list[Tensor], rank: int, num_ranks: int) -> list[Offer]:
    """What a rank of FSDP2 holds: rows, as torch.chunk cuts them."""
    offers = []
    for fqn, shape in tensors:
        part = -(-shape[0] // num_ranks)
        first = min(rank * part, shape[0])
        num_rows = min(part, shape[0] - first)
        rest = shape[1:]
        offers.append(Offer(fqn, "float32", shape, (first, *[0] * len(rest)), (num_rows, *rest)))
    return offers


def wish_of_rank(offers: list[Offer]) -> Wish:
    options = SaveOptions()
    return Wish(TARGET, (), lambda: offers, {}, {}, options.max_file_bytes, options.codec)


def rows_of(tensors: list[Tensor], num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """First row and number of rows of each tensor (column) on each rank (row)."""
    lengths = np.array([shape[0] for _, shape in tensors])
    parts = -(-lengths // num_ranks)
    firsts = np.minimum(np.arange(num_ranks)[:, None] * parts, lengths)
    return firsts, np.minimum(parts, lengths - firsts)


def requests(tensors: list[Tensor], ranks: ManyRanks) -> Iterator[bytes]:
    """What every rank but the coordinator sends it: made of what the first one sends, which is fast."""
    offers = offers_of(tensors, 0, ranks.num_ranks)
    request = agreement._whole_request(wish_of_rank(offers), ranks)
    numbers = np.array([number for offer in offers for number in (*offer.offsets, *offer.lengths)], "<i8")
    num_dims = np.array([len(shape) for _, shape in tensors])
    at = np.cumsum(2 * num_dims) - 2 * num_dims
    firsts, counts = rows_of(tensors, ranks.num_ranks)
    for rank in range(ranks.num_ranks):
        numbers[at], numbers[at + num_dims] = firsts[rank], counts[rank]
        packed = msgspec.structs.replace(request.offers, coordinates=zstandard.compress(numbers.tobytes(), 1))
        if rank in {0, ranks.num_ranks // 2} and packed != pack_offers(offers_of(tensors, rank, ranks.num_ranks)):
            raise ValueError("a rank is not played as it would be")
        if rank:
            yield msgspec.msgpack.encode(msgspec.structs.replace(request, offers=packed))


def reports(tensors: list[Tensor], orders: Iterator[bytes], num_ranks: int) -> Iterator[bytes]:
    """What every rank sends after it has written. Ranks whose files are as long plan and describe them once."""
    known: dict[tuple[bytes, bytes], tuple[KnownPlan, list[object]]] = {}
    rng = random.Random(0)
    firsts, counts = rows_of(tensors, num_ranks)
    for rank, payload in enumerate(orders):
        digits = [np.char.str_len(numbers.astype(str)) for numbers in (firsts[rank], firsts[rank] + counts[rank])]
        key = counts[rank].tobytes(), np.add(*digits).tobytes()
        if key not in known:
            order = msgspec.msgpack.decode(payload, type=agreement._Order)
            plan = agreement._planned(order, wish_of_rank(offers_of(tensors, rank, num_ranks)))
            report = encode_report(Agreed(order.save_id, plan, True, False, {}, {}), written(plan, rank, rng))
            known[key] = plan, msgspec.msgpack.decode(report)[1:]
        plan, rest = known[key]
        yield msgspec.msgpack.encode([[each.file for each in written(plan, rank, rng)], *rest])


def written(known: KnownPlan, rank: int, rng: random.Random) -> list[WrittenFile]:
    return [
        WrittenFile(
            DataFile(
                layout.data_file_name(known.plan_id, rank, number),
                planned.byte_length,
                planned.extent_lengths,
                [rng.getrandbits(64) for _ in planned.extent_lengths],
            ),
            None,
        )
        for number, planned in enumerate(known.files)
    ]
