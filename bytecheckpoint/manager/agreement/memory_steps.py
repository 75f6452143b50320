"""The steps of a run that memory alone holds, between those that go to storage: which are due, their saves, and the
resume from them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bytecheckpoint import phases
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.info import LoadReport
from bytecheckpoint.manager import abandoned_steps, save_policies
from bytecheckpoint.manager.agreement.decisions import Decisions, StorageClock
from bytecheckpoint.manager.agreement.failed_save import failed_save
from bytecheckpoint.manager.managed_saves import ManagedRun, ManagedSaves
from bytecheckpoint.manager.options import ManagerOptions, is_policy
from bytecheckpoint.manager.restore import is_latest
from bytecheckpoint.manager.save_policies import EverySteps, SavePolicy
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.options import LoadOptions, Memory, given_or_default
from bytecheckpoint.runtime.integers import integer_of
from bytecheckpoint.saving.handle import SaveHandle

logger = logging.getLogger("bytecheckpoint")


def with_memory(
    options: ManagerOptions, memory: Memory | None, every: int | SavePolicy
) -> tuple[ManagerOptions, SavePolicy]:
    """Returns the options with `memory` for each save, unchanged if `memory` is None, and the policy of memory saves.

    Raises TypeError if `every` is neither a number of steps nor a policy, and ValueError if it is less than one step,
    or is not 1 although the options have no memory.
    """
    num_steps = integer_of(every)
    policy: Any = every if num_steps is None else EverySteps(num_steps)
    if not is_policy(policy, "due"):
        raise TypeError(f"memory_every takes a number of steps or a save policy, not {every!r}")
    options = options if memory is None else replace(options, save=replace(options.save, memory=memory))
    if every != 1 and options.save.memory is None:
        raise ValueError("memory_every without memory holds nothing: pass memory=bcp.Memory(copies=1) as well")
    return options, policy


class MemorySteps:
    """The memory saves of one manager. Each method is called by all ranks together."""

    def __init__(
        self,
        policy: SavePolicy,
        saves: ManagedSaves,
        run: ManagedRun,
        options: ManagerOptions,
        *,
        decisions: Decisions,
    ) -> None:
        self._policy = policy
        self._saves = saves
        saves.settle_memory = self.settle
        self._run = run
        self._options = options
        self._decisions = decisions
        self._handle: SaveHandle | None = None
        self._clock = StorageClock(0.0)
        self._began = time.monotonic()
        self._held: list[StepInfo] = []
        """The newest step that was saved to memory, or whose save to memory is in flight; empty before the first."""
        self._held_before: list[StepInfo] = []
        """Takes the place of `_held` if the save in flight fails."""

    @property
    def is_on(self) -> bool:
        """True if the manager has a memory tier."""
        return self._options.save.memory is not None

    def is_due(self, step: int) -> bool:
        """Returns True if this step is to be held in memory, given that it does not go to storage."""
        if not self.is_on or self._options.read_only:
            return False
        if save_policies.is_step_only(self._policy):
            return self._ask(step, self._held)
        doing = f"deciding about step {step} in memory"
        return self._decisions.decide_together(doing, partial(self._decide, step), bool)

    def _decide(self, step: int) -> bool:
        """Asks a policy that does not depend on the step alone. Only rank 0 calls this: ranks may learn at different
        times that the save in flight has ended.
        """
        handle = self._handle
        if handle is None:
            return self._ask(step, self._held)
        is_done = handle.done()
        if is_done and handle._progress.error is not None:
            return self._ask(step, self._held_before)
        return self._ask(step, [replace(info, committed=is_done) for info in self._held])

    def _ask(self, step: int, held: Sequence[StepInfo]) -> bool:
        seconds = {"since_start": time.monotonic() - self._began}
        now = StepInfo(step, self._clock.now(), {}, seconds, pinned=False, committed=False, host_time=time.time())
        return bool(self._policy.due(now, held))

    def save(self, step: int, state: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> SaveHandle | None:
        """Waits for the saves in flight, then begins the save of a step to memory, and returns its handle. If that
        fails at once, raises, or returns None or a handle that has failed, as ManagedSaves.begin does.
        """
        self._saves.settle()
        options = self._options.save
        if step in self._saves.abandoned:
            options = replace(options, overwrite=True)
        now, began = self._clock.now(), time.monotonic()
        try:
            self._handle = phases.run_save(
                self._run.root,
                state,
                self._run.framework,
                step=step,
                async_save=self._options.async_save,
                process_group=self._run.group,
                metadata=metadata,
                storage_options=self._run.storage_options,
                options=options,
                owner=None,
                to="memory",
            )
        except CheckpointError as error:
            if not self._options.async_save or self._options.on_failed_save == "raise":
                self._fail(error)
                return None
            self._handle = failed_save(error, options)  # as on ranks where it fails later
        stall_s = time.monotonic() - began
        self._held_before = self._held
        self._held = [StepInfo(step, now, {}, {"stall": stall_s}, pinned=False, committed=True)]
        return self._handle

    def settle(self) -> None:
        """Waits for the memory save in flight. If it fails with a CheckpointError, that is raised or logged, as
        `on_failed_save` says; any other error is raised.
        """
        handle, self._handle = self._handle, None
        error = handle.exception() if handle is not None else None
        if error is not None:
            self._held = self._held_before
        if isinstance(error, CheckpointError):
            self._fail(error)
        elif error is not None:
            raise error
        elif handle is not None:
            self._saves.has_left_memory = False

    def _fail(self, error: CheckpointError) -> None:
        if self._options.on_failed_save == "raise":
            raise error
        logger.error("memory does not hold step %s: %s", error.step, error.message)

    def resumes(self, step: object) -> bool:
        """Returns True if a restore of `step` is to look at memory: a restore of the newest step does, unless memory
        may hold later steps that training has left.
        """
        return self.is_on and is_latest(step) and not self._saves.has_left_memory

    def resume(self, state: Mapping[str, Any], **as_load: Any) -> LoadReport | None:
        """Loads the newest version that memory or storage hold of the branch that training is on; returns None if there
        is none.
        """
        load_options = given_or_default(as_load.pop("options"), LoadOptions)
        read_abandoned = partial(abandoned_steps.present_abandoned, self._run.store, self._saves.new_branch)
        return phases.run_resume(
            self._run.root,
            state,
            self._run.framework,
            options=self._options.save,
            load_options=load_options,
            process_group=self._run.group,
            storage_options=self._run.storage_options,
            abandoned=self._decisions.decide_together(
                "looking for the steps that training has left", read_abandoned, dict[int, str]
            ),
            **as_load,
        )
