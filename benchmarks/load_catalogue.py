"""What benchmarks/load.py measures: the workloads and the contestants, by name.

Imports no torch, as save_catalogue.py. How states are built and spread stands in load_states.py; how each contestant
loads, in load_own.py, load_torch.py, load_peers.py and load_limits.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Layout(NamedTuple):
    """How ranks hold a state."""

    kind: Literal["whole", "replicated", "fsdp", "columns", "tp-fsdp", "slice"]
    """`columns`: every matrix is cut by columns. `tp-fsdp`: as Megatron cuts them, in two, then FSDP2. `slice`: a tenth
    of the rows of one tensor."""
    num_ranks: int


@dataclass(frozen=True)
class Workload:
    """A state, saved in one layout and loaded in another, or in the same."""

    name: str
    title: str
    source: Layout
    target: Layout
    contents: Literal["model", "small", "tensor"] = "model"
    """A model with its optimizer, many small tensors, or one large one."""
    storage: Literal["disk", "slow"] = "disk"
    scale: float = 1.0
    """Of the model's layers."""

    @property
    def is_reshard(self) -> bool:
        return self.source != self.target and self.target.kind != "slice"

    @property
    def conditions(self) -> tuple[str, ...]:
        """In which the files are found."""
        return ("slow",) if self.storage == "slow" else ("cold", "warm")


@dataclass(frozen=True)
class Contestant:
    """Something that loads, or a limit that loading cannot beat."""

    name: str
    title: str
    checkpoint: str
    """Whose checkpoint it loads: contestants that load the same share one."""
    crew: Literal["own", "peers"] = "own"
    """Which Python runs it: the one that runs the benchmark, or the one that --peers names."""
    reshards: bool = False
    takes_slices: bool = True
    takes_urls: bool = False
    needs_ranks: bool = False
    """Does what the plain contestant does where there is one rank only."""
    is_limit: bool = False

    def takes(self, workload: Workload) -> bool:
        return (
            (self.reshards or self.is_limit or not workload.is_reshard)
            and (self.takes_slices or workload.target.kind != "slice")
            and (self.takes_urls or workload.storage != "slow")
            and (not self.needs_ranks or workload.target.num_ranks > 1)
        )


_WHOLE, _FSDP4, _DDP4 = Layout("whole", 1), Layout("fsdp", 4), Layout("replicated", 4)
_COLUMNS4 = Layout("columns", 4)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "one process: bf16 parameters, fp32 master, two Adam states", _WHOLE, _WHOLE),
        Workload("W2", "fully_shard on 4 gloo ranks: the state of W1", _FSDP4, _FSDP4),
        Workload("W3", "one process: 20,000 tensors of 1 to 64 KB", _WHOLE, _WHOLE, "small"),
        Workload("W3x4", "4 gloo ranks: each holds a quarter of each of W3's tensors", _FSDP4, _FSDP4, "small"),
        Workload(
            "W4", "DDP on 4 gloo ranks: each holds all of the state of W1 at half the size", _DDP4, _DDP4, scale=0.5
        ),
        Workload("4to1", "saved by fully_shard on 4 ranks, loaded by one process", _FSDP4, _WHOLE),
        Workload("4to2", "saved by fully_shard on 4 ranks, loaded on 2", _FSDP4, Layout("fsdp", 2)),
        Workload("4to8", "saved by fully_shard on 4 ranks, loaded on 8", _FSDP4, Layout("fsdp", 8)),
        Workload("1to4", "saved by one process, loaded by fully_shard on 4 ranks", _WHOLE, _FSDP4),
        Workload("columns", "saved in rows by fully_shard on 4 ranks, loaded in columns by TP 4", _FSDP4, _COLUMNS4),
        Workload("tp-fsdp", "saved by TP 2 x FSDP 2, loaded by fully_shard on 4 ranks", Layout("tp-fsdp", 4), _FSDP4),
        Workload("slice", "a tenth of one tensor, read by one process", _WHOLE, Layout("slice", 1), "tensor"),
        Workload("slow-ddp", "W4 from a slow store", _DDP4, _DDP4, storage="slow", scale=0.5),
        Workload("slow-columns", "rows to columns from a slow store", _FSDP4, _COLUMNS4, storage="slow"),
    )
}

SLOW = {"latency_s": 0.02, "bytes_per_s": 100e6}
"""Of a request to the slow store."""

CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("bcp", "bytecheckpoint", "bcp", reshards=True, takes_urls=True),
        Contestant("bcp-on", "bytecheckpoint, exchange=on", "bcp", reshards=True, takes_urls=True, needs_ranks=True),
        Contestant("bcp-off", "bytecheckpoint, exchange=off", "bcp", reshards=True, takes_urls=True, needs_ranks=True),
        Contestant("dcp", "torch DCP", "dcp", reshards=True, takes_urls=True),
        Contestant("torchsnapshot", "torchsnapshot", "torchsnapshot", "peers"),
        Contestant("oss", "ByteCheckpoint (open source)", "oss", "peers", reshards=True, takes_slices=False),
        Contestant(
            "oss-fast", "ByteCheckpoint (open source), fast_loading", "oss", "peers", reshards=True, takes_slices=False
        ),
        Contestant("torch.load", "torch.load", "torch"),
        Contestant("torch.load-mmap", "torch.load, mmap", "torch"),
        Contestant("safetensors", "safetensors", "safetensors"),
        Contestant("limit-2", "limit: preadv into place, 2 threads", "raw", is_limit=True),
        Contestant("limit-8", "limit: preadv into place, 8 threads", "raw", is_limit=True),
        Contestant("checked-2", "limit: preadv into place and xxh3, 2 threads", "raw", is_limit=True),
        Contestant("checked-8", "limit: preadv into place and xxh3, 8 threads", "raw", is_limit=True),
        Contestant("agree-3", "limit: three agreements of the ranks alone", "raw", is_limit=True, needs_ranks=True),
    )
}
