"""The columns of a manifest, from the chunk locations that ranks report."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bytecheckpoint.planner.save_plan import PlannedTensor
from bytecheckpoint.saving import chunk_locations
from bytecheckpoint.saving.chunk_locations import ChunkLocations, pack_locations
from bytecheckpoint.staging.compress import ChunkLocation

NUM_RANKS, NUM_ITEMS = 5, 7


def reported(codecs: tuple[str, ...], seed: random.Random) -> list[list[tuple[int, ChunkLocation]]]:
    """By rank and item: the number of the file among the rank's two, and a location that no other chunk has."""
    return [
        [
            (item % 2, ChunkLocation(1000 * rank + 10 * item, 3 + seed.randrange(5), seed.choice(codecs)))
            for item in range(NUM_ITEMS)
        ]
        for rank in range(NUM_RANKS)
    ]


@pytest.mark.parametrize("codecs", [("none",), ("none", "zstd")], ids=str)
@pytest.mark.parametrize("chunks_at_once", [1, 12, 1 << 20])
@pytest.mark.parametrize("are_alike", [True, False])
def test_each_chunk_is_where_its_rank_has_reported_it(
    monkeypatch: pytest.MonkeyPatch, codecs: tuple[str, ...], chunks_at_once: int, *, are_alike: bool
) -> None:
    monkeypatch.setattr(chunk_locations, "_CHUNKS_AT_ONCE", chunks_at_once)
    seed = random.Random(0)
    of_ranks = reported(codecs, seed)
    plan = cast("Any", SimpleNamespace(num_items=NUM_ITEMS, parts=[]))
    packed = [
        pack_locations(
            [(cast("Any", SimpleNamespace(item=item, region=None)), *each) for item, each in enumerate(of_rank)], plan
        )
        for of_rank in of_ranks
    ]
    tensors = []
    for item in range(NUM_ITEMS):
        ranks = list(range(NUM_RANKS)) if are_alike else seed.sample(range(NUM_RANKS), 1 + item % NUM_RANKS)
        tensors.append(PlannedTensor(f"t{item}", "uint8", (len(ranks),), (1,), (), ranks, [item] * len(ranks)))
    starts = [[100_000 * rank, 100_000 * rank + 50_000] for rank in range(NUM_RANKS)]
    columns = ChunkLocations(packed).columns(tensors, starts)
    expected = [
        (2 * rank + of_ranks[rank][slot][0], starts[rank][of_ranks[rank][slot][0]], of_ranks[rank][slot][1])
        for tensor in tensors
        for rank, slot in zip(tensor.ranks, tensor.slots, strict=True)
    ]
    assert columns.files.tolist() == [file for file, _, _ in expected]
    assert columns.byte_offsets.tolist() == [start + location.byte_offset for _, start, location in expected]
    if len(codecs) > 1:
        assert columns.byte_lengths.tolist() == [location.byte_length for _, _, location in expected]
        names = [columns.codec_names[codec] for codec in columns.codecs.tolist()]
        assert names == [location.codec for _, _, location in expected]
