"""Candidates of the load benchmark, by name. Imports no torch, as the registry of saves. Their functions are in
library.py, torch_candidates.py, peers.py and limits.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.rounds import AGAINST, PoolName, with_against
from shared.workloads import Workload


@dataclass(frozen=True)
class LoadCandidate:
    """A way to load, or a limit that no load can beat."""

    name: str
    title: str
    format: str
    """Format of the checkpoint: candidates of one format share one."""
    pool: PoolName = "own"
    reshards: bool = False
    takes_slices: bool = True
    takes_urls: bool = False
    needs_ranks: bool = False
    """True if it does the same as the plain candidate where there is one rank only."""
    is_limit: bool = False

    @property
    def checkpoint(self) -> str:
        """Name of the folder of its checkpoint: each checkout loads what it has saved."""
        return self.format + AGAINST if self.pool == "against" else self.format

    def takes(self, workload: Workload) -> bool:
        return (
            (self.reshards or self.is_limit or not workload.is_reshard)
            and (self.takes_slices or workload.target.kind != "slice")
            and (self.takes_urls or workload.storage != "slow")
            and (not self.needs_ranks or workload.target.num_ranks > 1)
        )


CANDIDATES = with_against(
    [
        LoadCandidate("bcp", "bytecheckpoint", "bcp", reshards=True, takes_urls=True),
        LoadCandidate("bcp-on", "bytecheckpoint, exchange=on", "bcp", reshards=True, takes_urls=True, needs_ranks=True),
        LoadCandidate(
            "bcp-off", "bytecheckpoint, exchange=off", "bcp", reshards=True, takes_urls=True, needs_ranks=True
        ),
        LoadCandidate("dcp", "torch DCP", "dcp", reshards=True, takes_urls=True),
        LoadCandidate("torchsnapshot", "torchsnapshot", "torchsnapshot", "peers"),
        LoadCandidate("oss", "ByteCheckpoint (open source)", "oss", "peers", reshards=True, takes_slices=False),
        LoadCandidate(
            "oss-fast", "ByteCheckpoint (open source), fast_loading", "oss", "peers", reshards=True, takes_slices=False
        ),
        LoadCandidate("torch.load", "torch.load", "torch"),
        LoadCandidate("torch.load-mmap", "torch.load, mmap", "torch"),
        LoadCandidate("safetensors", "safetensors", "safetensors"),
        LoadCandidate("limit-2", "limit: preadv into place, 2 threads", "raw", is_limit=True),
        LoadCandidate("limit-8", "limit: preadv into place, 8 threads", "raw", is_limit=True),
        LoadCandidate("checked-2", "limit: preadv into place and xxh3, 2 threads", "raw", is_limit=True),
        LoadCandidate("checked-8", "limit: preadv into place and xxh3, 8 threads", "raw", is_limit=True),
        LoadCandidate("agree-3", "limit: three agreements of the ranks alone", "raw", is_limit=True, needs_ranks=True),
    ]
)
