"""Ranks that are only played: what each of thousands would offer to write, and would report to have written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from bytecheckpoint import agreement
from bytecheckpoint.agreement import Agreed, Target, Wish
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.plan_cache import KnownPlan
from bytecheckpoint.planner.offers import Offer
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
    return Wish(TARGET, (), offers, {}, {}, options.max_file_bytes, options.codec)


def requests(tensors: list[Tensor], ranks: ManyRanks) -> Iterator[bytes]:
    """What every rank but the coordinator sends it."""
    for rank in range(1, ranks.num_ranks):
        request = agreement._whole_request(wish_of_rank(offers_of(tensors, rank, ranks.num_ranks)), ranks)
        yield msgspec.msgpack.encode(request)


def reports(tensors: list[Tensor], orders: Iterator[bytes], num_ranks: int) -> Iterator[bytes]:
    """What every rank sends after it has written. Ranks whose files have the same lengths plan them once."""
    known: dict[tuple[bytes, bytes], KnownPlan] = {}
    rng = random.Random(0)
    for rank, payload in enumerate(orders):
        order = msgspec.msgpack.decode(payload, type=agreement._Order)
        offers = offers_of(tensors, rank, num_ranks)
        lengths = np.array([offer.lengths[0] for offer in offers])
        num_digits = [len(f"{offer.offsets[0]}:{offer.offsets[0] + offer.lengths[0]}") for offer in offers]
        key = lengths.tobytes(), bytes(num_digits)
        if key not in known:
            known[key] = agreement._planned(order, wish_of_rank(offers))
        yield encode_report(Agreed(order.save_id, known[key], True, False, {}, {}), written(known[key], rank, rng))


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
