"""Candidates of the save benchmark, by name. Imports no torch, so that the process that leads the benchmark stays
small. Their functions are in library.py, torch_candidates.py, peers.py and limits.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.rounds import PoolName, with_against

_BCP_RANK = r"-(\d{5})-\d+\.safetensors$"
_DCP_RANK = r"__(\d+)_\d+\.distcp$"


@dataclass(frozen=True)
class SaveCandidate:
    """A way to save, or a limit that no save can beat."""

    name: str
    title: str
    kind: Literal["sync", "async", "limit"]
    pool: PoolName = "own"
    rank_in_name: str | None = None
    """Regular expression that finds the rank that wrote a file in the file's name."""
    needs_ranks: bool = False
    """True if it is left out where there is one rank only."""

    @property
    def is_limit(self) -> bool:
        return self.title.startswith("limit")


CANDIDATES = with_against(
    [
        SaveCandidate("bcp", "bytecheckpoint", "sync", rank_in_name=_BCP_RANK),
        SaveCandidate("bcp-copy", "bytecheckpoint, async, copy", "async", rank_in_name=_BCP_RANK),
        SaveCandidate("bcp-lazy", "bytecheckpoint, async, lazy", "async", rank_in_name=_BCP_RANK),
        SaveCandidate("dcp", "torch DCP", "sync", rank_in_name=_DCP_RANK),
        SaveCandidate("dcp-2", "torch DCP, 2 threads", "sync", rank_in_name=_DCP_RANK),
        SaveCandidate("dcp-async", "torch DCP, async, default", "async", rank_in_name=_DCP_RANK),
        SaveCandidate("dcp-cached", "torch DCP, async, cached staging memory", "async", rank_in_name=_DCP_RANK),
        SaveCandidate("dcp-process", "torch DCP, async, in a process", "async", rank_in_name=_DCP_RANK),
        SaveCandidate("torchsnapshot", "torchsnapshot", "sync", "peers"),
        SaveCandidate("torchsnapshot-async", "torchsnapshot, async", "async", "peers"),
        SaveCandidate("oss", "ByteCheckpoint (open source)", "sync", "peers", _DCP_RANK),
        SaveCandidate("oss-async", "ByteCheckpoint (open source), fast_saving", "async", "peers", _DCP_RANK),
        SaveCandidate("torch.save", "torch.save", "sync"),
        SaveCandidate("safetensors", "safetensors", "sync"),
        SaveCandidate("limit", "limit: O_DIRECT + fsync", "limit"),
        SaveCandidate("memcpy", "limit: memcpy into warm memory", "limit"),
        # As asynchronous saves are timed: once a round, and ranks that have returned train while others have not.
        SaveCandidate("agree", "limit: agreement of the ranks alone", "async", needs_ranks=True),
        SaveCandidate("work", "limit: a millisecond of work in the call, then training", "async"),
        SaveCandidate("looks", "limit: a look at each tensor in the call, then training", "async"),
        SaveCandidate("memcpy-async", "limit: memcpy into warm memory, once, then training", "async"),
        SaveCandidate("write-async", "limit: O_DIRECT + fsync beside training, from memory at hand", "async"),
    ]
)
