"""One rank's part of a global plan, and the cache that keeps it for later saves of the same tensors."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bytecheckpoint.manifest import TensorRecord
from bytecheckpoint.planner.save_plan import SavePlan
from bytecheckpoint.planner.write_items import ItemRegion
from bytecheckpoint.staging.file_image import PlannedFile

_MAX_PLANS = 8


class MirroredImage(NamedTuple):
    """Data file `number` of the rank `owner`, planned on this rank, which holds the same chunks and stages it too."""

    owner: int
    number: int
    planned: PlannedFile


@dataclass(slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a global plan."""

    plan_id: str
    """Id of the save in which all ranks made the plan together."""
    files: Sequence[PlannedFile]
    """Data files of this rank."""
    compared: Sequence[Sequence[int]]
    """Groups of this rank's items that other ranks hold as small replicas. One digest is taken of a whole group."""
    differing_replicas: Sequence[str]
    """FQNs of replicas whose values differed when the plan was made."""
    in_pipeline_stages: Sequence[str]
    """FQNs that several pipeline stages hold: the plan holds only while each is the same tensor in all of them."""
    num_items: int
    """Number of write items of this rank."""
    parts: Sequence[ItemRegion]
    """Parts of write items; see SavePlan."""
    mirrors: Sequence[MirroredImage] = ()
    """Files of other ranks that this one stages as well, for memory."""
    global_plan: SavePlan | None = None
    """None except on the coordinator."""
    writers: Mapping[str, int] = field(default_factory=dict)
    """One of the ranks that write a tensor, by FQN; empty except on the coordinator."""
    written: WrittenTensors | None = None
    """Set on the coordinator by the first save with this plan that builds its manifest and has all chunks where the
    plan has them; None while compression puts some elsewhere, because these places vary from save to save.
    """
    known_plain: Mapping[bytes, bytes] = field(default_factory=dict)
    """Plain data of the last save, by digest; empty except on the coordinator."""
    sent_whole: dict[str, bytes] = field(default_factory=dict)
    """Plain data that the coordinator once had to ask of this rank, such as that of a pipeline stage: the FQN, and the
    digest in the last save. This rank sends these values with its first message whenever they have changed.
    """

    @property
    def staged(self) -> list[PlannedFile]:
        """All files that this rank stages: its own first, which it alone writes to storage."""
        return [*self.files, *(mirror.planned for mirror in self.mirrors)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTensors:
    """Chunk locations as the ranks reported them in the first save with a plan. Later saves use the same ones."""

    tensors: Mapping[str, TensorRecord]
    file_lengths: Sequence[Sequence[int]]
    """Lengths in bytes, by rank and file."""


@dataclass(slots=True)
class PlanCache:
    """The plans used last, at most 8, by the fingerprints of local plans. Holds no tensor."""

    _plans: OrderedDict[bytes, RankPlan] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, fingerprint: bytes) -> RankPlan | None:
        with self._lock:
            plan = self._plans.get(fingerprint)
            if plan is not None:
                self._plans.move_to_end(fingerprint)
            return plan

    def add(self, fingerprint: bytes, plan: RankPlan) -> None:
        with self._lock:
            self._plans[fingerprint] = plan
            self._plans.move_to_end(fingerprint)
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
