"""Plans of earlier saves, so that a save of the same tensors is not planned again. The fingerprint covers every FQN,
dtype, shape and region, the options and the ranks. The cache holds no tensor and no value.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bytecheckpoint.manifest import TensorRecord
from bytecheckpoint.planner.save_plan import SavePlan
from bytecheckpoint.planner.write_items import Write
from bytecheckpoint.staging.file_image import PlannedFile

_MAX_PLANS = 8


@dataclass(slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a global plan."""

    plan_id: str
    """The same on all ranks that made the plan together."""
    files: Sequence[PlannedFile]
    """Data files of this rank."""
    compared: Sequence[Sequence[int]]
    """Groups of this rank's offers that other ranks hold as small replicas: each group has one common digest."""
    differing_replicas: Sequence[str]
    """FQNs of replicas whose values differed when the plan was made."""
    in_stages: Sequence[str]
    """FQNs that several pipeline stages hold: the plan is right only while each is one tensor."""
    num_offers: int
    parts: Sequence[Write]
    """Writes of a part of an offer; see SavePlan."""
    global_plan: SavePlan | None = None
    """None but on the coordinator."""
    written: WrittenTensors | None = None
    """Set on the coordinator by the first save that has built its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTensors:
    """Chunk locations as the ranks reported them in the first save with a plan. Later saves use the same ones."""

    tensors: Mapping[str, TensorRecord]
    file_lengths: Sequence[Sequence[int]]
    """In bytes, by rank and file."""


@dataclass(slots=True)
class PlanCache:
    """The most recently used plans, by fingerprint."""

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
