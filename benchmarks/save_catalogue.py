"""What benchmarks/save.py measures: the workloads and the contestants, by name.

Imports no torch, so that the process that leads the benchmark stays small and out of the way. How a state is built
stands in save_workloads.py; how each contestant saves it, in save_own.py, save_torch.py, save_peers.py and
save_limits.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sync", "async", "limit"]


@dataclass(frozen=True)
class Workload:
    """A state, and the ranks that hold it."""

    name: str
    title: str
    num_ranks: int
    contents: Literal["model", "small"]
    """A model with its optimizer, or many small tensors."""
    layout: Literal["whole", "sharded", "replicated"]
    """How the ranks hold it."""
    scale: float = 1.0
    """Of the model's layers."""


@dataclass(frozen=True)
class Contestant:
    """Something that saves, or a limit that saving cannot beat."""

    name: str
    title: str
    kind: Kind
    crew: Literal["own", "peers"] = "own"
    """Which Python runs it: the one that runs the benchmark, or the one that --peers names."""
    rank_in_name: str | None = None
    """A regular expression that finds the rank that wrote a file in the file's name."""
    needs_ranks: bool = False
    """Is nothing where there is one rank only."""

    @property
    def is_limit(self) -> bool:
        return self.title.startswith("limit")


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "one process: bf16 parameters, fp32 master, two Adam states", 1, "model", "whole"),
        Workload("W2", "fully_shard on 4 gloo ranks: the state of W1", 4, "model", "sharded"),
        Workload("W3", "one process: 20,000 tensors of 1 to 64 KB", 1, "small", "whole"),
        Workload("W3x4", "4 gloo ranks: each holds a quarter of each of W3's tensors", 4, "small", "sharded"),
        Workload(
            "W4", "4 gloo ranks: each holds all of the state of W1 at half the size", 4, "model", "replicated", 0.5
        ),
    )
}

_BCP_RANK = r"-(\d{5})-\d+\.safetensors$"
_DCP_RANK = r"__(\d+)_\d+\.distcp$"

CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("bcp", "bytecheckpoint", "sync", rank_in_name=_BCP_RANK),
        Contestant("bcp-copy", "bytecheckpoint, async, copy", "async", rank_in_name=_BCP_RANK),
        Contestant("bcp-lazy", "bytecheckpoint, async, lazy", "async", rank_in_name=_BCP_RANK),
        Contestant("dcp", "torch DCP", "sync", rank_in_name=_DCP_RANK),
        Contestant("dcp-2", "torch DCP, 2 threads", "sync", rank_in_name=_DCP_RANK),
        Contestant("dcp-async", "torch DCP, async, default", "async", rank_in_name=_DCP_RANK),
        Contestant("dcp-cached", "torch DCP, async, staging memory kept", "async", rank_in_name=_DCP_RANK),
        Contestant("dcp-process", "torch DCP, async, in a process", "async", rank_in_name=_DCP_RANK),
        Contestant("torchsnapshot", "torchsnapshot", "sync", "peers"),
        Contestant("torchsnapshot-async", "torchsnapshot, async", "async", "peers"),
        Contestant("oss", "ByteCheckpoint (open source)", "sync", "peers", _DCP_RANK),
        Contestant("oss-async", "ByteCheckpoint (open source), fast_saving", "async", "peers", _DCP_RANK),
        Contestant("torch.save", "torch.save", "sync"),
        Contestant("safetensors", "safetensors", "sync"),
        Contestant("limit", "limit: O_DIRECT + fsync", "limit"),
        Contestant("memcpy", "limit: memcpy into warm memory", "limit"),
        # As asynchronous saves are timed: once a round, and ranks that have returned train while others have not.
        Contestant("agree", "limit: agreement of the ranks alone", "async", needs_ranks=True),
        Contestant("work", "limit: a millisecond of work in the call, then training", "async"),
        Contestant("memcpy-async", "limit: memcpy into warm memory, once, then training", "async"),
        Contestant("write-async", "limit: O_DIRECT + fsync beside training, of memory at hand", "async"),
    )
}
