"""Streams in data loaders on ranks of their own: saved by four, and gone on with by two and by three."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from data.sample_sources import KINDS, passes, plain
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

KIND, LENGTHS = "packed after shuffling", range(8, 32, 2)


def make_sources() -> dict[str, Any]:
    return {
        f"s{number:02d}": KINDS[KIND](list(range(100 * number, 100 * number + length)))
        for number, length in enumerate(LENGTHS)
    }


def train(rank: int, world_size: int, root: Path, num_steps: int, num_lost: int) -> list[Any]:
    """Goes on from the last checkpoint, saves after some steps, and dies a few later."""
    streams = bcp.data.Streams(make_sources(), rank=rank, size=world_size, with_ids=True, endless=True)
    loader = DataLoader(streams, batch_size=2, collate_fn=list)
    state = {"data": bcp.DataLoaderState(loader, rank=rank, size=world_size)}
    last = bcp.latest(root)
    if last is not None:
        bcp.load(root, state)
    iterator = iter(loader)
    taken = [(each, plain(sample)) for batch in islice(iterator, num_steps) for each, sample in batch]
    bcp.save(root, state, step=(last or 0) + num_steps)
    for _ in range(num_lost):
        next(iterator)
    return taken


def test_documents_are_seen_once_on_any_number_of_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {}
    for world_size in (4, 2, 3, 1):
        for taken in workers.run(train, tmp_path, 9, 2, world_size=world_size):
            for stream_id, sample in taken:
                found.setdefault(stream_id, []).append(sample)
    for stream_id, source in make_sources().items():
        samples = found[stream_id]
        assert samples == passes(source, 1 + len(samples))[: len(samples)]
    stored = bcp.load_tree(tmp_path)["data"]["streams"]
    assert {each: len(samples) for each, samples in found.items()} == {each: stored[each]["samples"] for each in stored}
    assert isinstance(stored["s00"]["snapshot"]["state"]["tokens"], torch.Tensor)
