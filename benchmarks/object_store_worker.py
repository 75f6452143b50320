"""One rank of benchmarks/object_store.py: holds a part of a state, or as many bare bytes, and moves them when it is
told to. Knows nothing of rounds, tables or other ranks' answers.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import botocore.session
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from load_catalogue import WORKLOADS
from load_states import Held, held_by
from object_transfers import (
    KEY,
    REGION,
    SECRET,
    Transfer,
    boto3_transfer,
    obstore_transfer,
    s3fs_options,
    s3fs_transfer,
)
from rank_process import Obey, join, serve
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import bytecheckpoint as bcp

BUCKET = "bucket"
WORKLOAD = WORKLOADS["4to2"]
MAKERS: dict[str, Callable[[str, str, int, int], Transfer]] = {
    "s3fs": s3fs_transfer,
    "boto3": boto3_transfer,
    "obstore": obstore_transfer,
}


class Contestant(NamedTuple):
    """What goes up to a folder of the bucket and comes down from it."""

    up: Callable[[str], None]
    down: Callable[[str], None]
    check: Callable[[], None]


class Rank:
    """What this rank holds, and the contestants."""

    def __init__(self, side: str, size: float, endpoint: str) -> None:
        self.held = held_by(WORKLOAD, side, size)
        self.held.fill()
        self.endpoint = endpoint
        self.options = s3fs_options(endpoint)
        num_ranks = WORKLOAD.source.num_ranks
        self._num_objects = num_ranks // (1 if side == "source" else WORKLOAD.target.num_ranks)
        generator = np.random.default_rng(0)
        self._bytes = generator.integers(0, 256, self.held.num_bytes // num_ranks, np.uint8)
        self._buffers = [np.zeros_like(self._bytes) for _ in range(self._num_objects)] if side == "target" else []
        self._contestants: dict[str, Contestant] = {}

    def contestant(self, name: str) -> Contestant:
        if name not in self._contestants:
            self._contestants[name] = self._made(name)
        return self._contestants[name]

    def _made(self, name: str) -> Contestant:
        if name == "bcp":
            return self._checkpoint(
                lambda url: bcp.save(url, self.held.state, storage_options=self.options),
                lambda url: bcp.load(url, self.held.state, storage_options=self.options),
            )
        if name.startswith("dcp"):
            return self._dcp(num_threads=4 if name == "dcp-4" else 1)
        library, _, setting = name.partition(" ")
        part_mib, _, at_once = setting.partition("x")
        return self._bulk(MAKERS[library](self.endpoint, BUCKET, int(part_mib) << 20, int(at_once)))

    def _checkpoint(self, save: Callable[[str], Any], load: Callable[[str], Any]) -> Contestant:
        def up(folder: str) -> None:
            save(f"s3://{BUCKET}/{folder}")

        def down(folder: str) -> None:
            load(f"s3://{BUCKET}/{folder}")

        return Contestant(up, down, self.held.check)

    def _dcp(self, *, num_threads: int) -> Contestant:
        """Syncing means nothing to an object store, and DCP would sync all disks instead."""

        def save(url: str) -> None:
            writer = FsspecWriter(url, sync_files=False, thread_count=num_threads, **self.options)
            dcp.save(self.held.tensors, storage_writer=writer)

        def load(url: str) -> None:
            dcp.load(self.held.tensors, storage_reader=FsspecReader(url, **self.options))

        return self._checkpoint(save, load)

    def _bulk(self, transfer: Transfer) -> Contestant:
        def keys(folder: str) -> list[str]:
            first = self.held.rank * self._num_objects
            return [f"{folder}/{number}" for number in range(first, first + self._num_objects)]

        def up(folder: str) -> None:
            for key in keys(folder):
                transfer.put(key, memoryview(self._bytes))

        def down(folder: str) -> None:
            for key, buffer in zip(keys(folder), self._buffers, strict=True):
                transfer.get(key, memoryview(buffer))

        def check() -> None:
            if not all(np.array_equal(buffer, self._bytes) for buffer in self._buffers):
                raise ValueError("other bytes came down than went up")

        return Contestant(up, down, check)

    def spoil(self) -> None:
        self.held.spoil()
        for buffer in self._buffers:
            buffer.fill(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["source", "target"], required=True)
    parser.add_argument("--size", type=float, required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    serve(lambda: begin(arguments))


def begin(arguments: argparse.Namespace) -> tuple[dict[str, Any], Obey]:
    """The rank, what it holds, and how it obeys."""
    layout = WORKLOAD.source if arguments.side == "source" else WORKLOAD.target
    torch.set_num_threads(1)
    join(arguments.rank, layout.num_ranks, arguments.port)
    rank = Rank(arguments.side, arguments.size, arguments.endpoint)

    def obey(command: dict[str, str]) -> dict[str, Any]:
        contestant, folder = rank.contestant(command["contestant"]), command["folder"]
        match command["task"]:
            case "check":
                rank.spoil()
                rank.held.barrier()
                contestant.down(folder)
                contestant.check()
            case "remove":
                if rank.held.rank == 0:
                    remove(arguments.endpoint, folder)
            case task:
                return {"seconds": timed(contestant.up if task == "up" else contestant.down, folder, rank.held)}
        return {}

    return {"state_bytes": rank.held.num_bytes}, obey


def timed(move: Callable[[str], None], folder: str, held: Held) -> float:
    gc.collect()
    held.barrier()
    started = time.perf_counter()
    move(folder)
    return time.perf_counter() - started


def remove(endpoint: str, folder: str) -> None:
    client = botocore.session.Session().create_client(
        "s3", endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION
    )
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{folder}/")
    for entry in listed.get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])


if __name__ == "__main__":
    main()
