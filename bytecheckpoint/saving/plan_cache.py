"""Plans of earlier saves, kept so that a save of the same tensors is not planned again. What makes two saves the same
is in the fingerprint: every name, dtype, shape and region, the options and the ranks. No tensor is held, and no value.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bytecheckpoint.manifest import TensorRecord
from bytecheckpoint.planner.save_plan import SavePlan
from bytecheckpoint.planner.write_items import ItemRegion
from bytecheckpoint.staging.file_image import PlannedFile

_MAX_PLANS = 8


@dataclass(slots=True, kw_only=True)
class KnownPlan:
    """One plan, as one rank knows it."""

    plan_id: str
    """The same on all ranks that made it together."""
    files: Sequence[PlannedFile]
    """Of this rank."""
    compared: Sequence[Sequence[int]]
    """Groups of this rank's offers that other ranks hold as small replicas: each group has one common digest."""
    differing_replicas: Sequence[str]
    """Those of them whose values differed when the plan was made."""
    in_stages: Sequence[str]
    """The FQNs that several stages of a pipeline had: each is right only as long as it is one tensor."""
    num_offers: int
    """Of this rank."""
    parts: Sequence[ItemRegion]
    """Of its offers, those that it does not write as a whole; see SavePlan."""
    plan: SavePlan | None = None
    """Here and below, None but on the coordinator."""
    written: Written | None = None
    """Set by the first save that has come as far as its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the ranks reported of the first save with a plan: where every chunk lies, which stays so."""

    tensors: Mapping[str, TensorRecord]
    file_lengths: Sequence[Sequence[int]]
    """In bytes, by rank and file."""


@dataclass(slots=True)
class PlanCache:
    """The plans used last, by fingerprint."""

    _plans: OrderedDict[bytes, KnownPlan] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, fingerprint: bytes) -> KnownPlan | None:
        with self._lock:
            plan = self._plans.get(fingerprint)
            if plan is not None:
                self._plans.move_to_end(fingerprint)
            return plan

    def keep(self, fingerprint: bytes, plan: KnownPlan) -> None:
        with self._lock:
            self._plans[fingerprint] = plan
            self._plans.move_to_end(fingerprint)
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
