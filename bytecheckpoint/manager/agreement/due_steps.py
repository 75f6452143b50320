"""The steps that are due: by the policy, which rank 0 asks for all if the step alone does not decide."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

from bytecheckpoint.manager import save_policies
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.manager.managed_saves import ManagedSaves, OwnedRoot
from bytecheckpoint.manager.save_policies import SavePolicy
from bytecheckpoint.manager.stats import Goodput
from bytecheckpoint.manager.step_info import StepInfo

_SOME_STEP = (StepInfo(0, 0.0, {}, {}, False, True),)
"""Passed in the place of the saved steps to a policy that may only ask if there are any."""


class DueSteps(NamedTuple):
    """The due steps of one manager that is not read-only."""

    policy: SavePolicy
    saves: ManagedSaves
    decisions: Decisions
    goodput: Goodput
    owned: OwnedRoot | None
    """None on ranks other than rank 0."""

    def is_due(self, step: int, *, is_forced: bool, is_stopping: bool) -> bool:
        """Returns True if this step is to be saved now: if `is_forced`, `is_stopping`, or the policy asks for it; the
        step `newest` only if `is_forced`. All ranks call this together.
        """
        if is_forced or step == self.newest:
            return is_forced
        if is_stopping:
            return True
        if save_policies.is_step_only(self.policy):
            return self._is_due_by_step(step)
        return self.decisions.decide_together(f"deciding about step {step}", partial(self._decide, step), bool)

    def is_known_due(self, step: int) -> bool:
        """Returns True if it is known ahead that this step will be due. False if the policy does not depend on the step
        alone.
        """
        return save_policies.is_step_only(self.policy) and step != self.newest and self._is_due_by_step(step)

    @property
    def newest(self) -> int | None:
        """The step of the newest save to storage that was begun and has not been settled; else the newest step known to
        be in storage, or restored from there; None without any. It is not due again.
        """
        return self.saves.begun.step if self.saves.begun is not None else self.saves.stored_step

    def _is_due_by_step(self, step: int) -> bool:
        saved = _SOME_STEP if self.saves.has_steps or self.saves.begun is not None else ()
        return bool(self.policy.due(StepInfo(step, 0.0, {}, {}, False, False), saved))

    def _decide(self, step: int) -> bool:
        """Asks a policy that does not depend on the step alone. Only rank 0 calls this."""
        if self.owned is None:
            return False
        stats, now = self.goodput.stats(), self.owned.clock.now()
        begun = self.saves.begun
        is_in_flight = begun is not None and not begun.has_failed and not begun.is_noted.is_set()
        saved = [known.info for known in self.owned.background.steps.all()]
        if begun is not None and is_in_flight:
            saved = [info for info in saved if info.step != begun.step]  # it is replaced by this save
            saved.append(StepInfo(begun.step, begun.time, {}, {}, False, False))
        seconds = {"step": stats.longest_step_s, "since_start": stats.elapsed_s}
        return bool(self.policy.due(StepInfo(step, now, {}, seconds, False, False, host_time=time.time()), saved))
