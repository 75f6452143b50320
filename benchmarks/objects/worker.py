"""One rank of the object store benchmark: holds a part of a state, or as many bare bytes, and moves them on command."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import botocore.session
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import bytecheckpoint as bcp
from objects.transfers import (
    KEY,
    REGION,
    SECRET,
    Transfer,
    boto3_transfer,
    obstore_transfer,
    s3fs_options,
    s3fs_transfer,
)
from shared.rank_process import Obey, join
from shared.states import HeldState, held_by
from shared.workloads import WORKLOADS

BUCKET = "bucket"
WORKLOAD = WORKLOADS["4to2"]
MAKERS: dict[str, Callable[[str, str, int, int], Transfer]] = {
    "s3fs": s3fs_transfer,
    "boto3": boto3_transfer,
    "obstore": obstore_transfer,
}


class ObjectCandidate(NamedTuple):
    """Functions that upload to a folder of the bucket, download from it and compare."""

    up: Callable[[str], None]
    down: Callable[[str], None]
    check: Callable[[], None]


class ObjectRank:
    """The state or bytes of this rank, and its candidates."""

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
        self._candidates: dict[str, ObjectCandidate] = {}

    def candidate(self, name: str) -> ObjectCandidate:
        if name not in self._candidates:
            self._candidates[name] = self._made(name)
        return self._candidates[name]

    def _made(self, name: str) -> ObjectCandidate:
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

    def _checkpoint(self, save: Callable[[str], Any], load: Callable[[str], Any]) -> ObjectCandidate:
        def up(folder: str) -> None:
            save(f"s3://{BUCKET}/{folder}")

        def down(folder: str) -> None:
            load(f"s3://{BUCKET}/{folder}")

        return ObjectCandidate(up, down, self.held.check)

    def _dcp(self, *, num_threads: int) -> ObjectCandidate:
        """Does not sync: that means nothing to an object store, and DCP would sync all disks instead."""

        def save(url: str) -> None:
            writer = FsspecWriter(url, sync_files=False, thread_count=num_threads, **self.options)
            dcp.save(self.held.tensors, storage_writer=writer)

        def load(url: str) -> None:
            dcp.load(self.held.tensors, storage_reader=FsspecReader(url, **self.options))

        return self._checkpoint(save, load)

    def _bulk(self, transfer: Transfer) -> ObjectCandidate:
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

        return ObjectCandidate(up, down, check)

    def spoil(self) -> None:
        self.held.spoil()
        for buffer in self._buffers:
            buffer.fill(0)


def begin(rank: int, port: int, *, side: str, size: float, endpoint: str) -> tuple[dict[str, Any], Obey]:
    """Returns the facts of this rank, and what obeys."""
    layout = WORKLOAD.source if side == "source" else WORKLOAD.target
    torch.set_num_threads(1)
    join(rank, layout.num_ranks, port)
    member = ObjectRank(side, size, endpoint)

    def obey(command: dict[str, str]) -> dict[str, Any]:
        candidate, folder = member.candidate(command["candidate"]), command["folder"]
        match command["task"]:
            case "check":
                member.spoil()
                member.held.barrier()
                candidate.down(folder)
                candidate.check()
            case "remove":
                if rank == 0:
                    remove(endpoint, folder)
            case task:
                return {"seconds": timed(candidate.up if task == "up" else candidate.down, folder, member.held)}
        return {}

    return {"state_bytes": member.held.num_bytes}, obey


def timed(move: Callable[[str], None], folder: str, held: HeldState) -> float:
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
