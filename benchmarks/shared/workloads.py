"""The states that benchmarks save and load, and the ranks that hold them. Imports no torch: states.py builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Layout(NamedTuple):
    """Distribution of a state over ranks."""

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
    """Factor on the model's layers."""

    @property
    def is_reshard(self) -> bool:
        return self.source != self.target and self.target.kind != "slice"

    @property
    def conditions(self) -> tuple[str, ...]:
        """States of the page cache in which a load is timed."""
        return ("slow",) if self.storage == "slow" else ("cold", "warm")


_WHOLE, _FSDP4, _DDP4 = Layout("whole", 1), Layout("fsdp", 4), Layout("replicated", 4)
_COLUMNS4 = Layout("columns", 4)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "one process: bf16 parameters, fp32 master, two Adam states", _WHOLE, _WHOLE),
        Workload("W2", "fully_shard on 4 gloo ranks: the state of W1", _FSDP4, _FSDP4),
        Workload("W3", "one process: 20,000 tensors of 1 to 64 KB", _WHOLE, _WHOLE, "small"),
        Workload("W3x10", "one process: 200,000 tensors of 1 to 64 KB", _WHOLE, _WHOLE, "small", scale=10.0),
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
SAVED = {name: WORKLOADS[name] for name in ("W1", "W2", "W3", "W3x10", "W3x4", "W4")}
"""Workloads of the save benchmark, which uses the source layout."""

SLOW = {"latency_s": 0.02, "bytes_per_s": 100e6}
"""Cost of a request to the slow store."""
