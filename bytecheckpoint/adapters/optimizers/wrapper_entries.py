"""Optimizers that hold others, as torchtitan's OptimizersContainer, Accelerate's AcceleratedOptimizer and many a Muon
beside an AdamW do, and those that keep their state elsewhere than in `.state`.

They are saved by the optimizers inside, parameter by parameter; where these do not have all the state, by their
state_dict(), as any object is; and where that does not have it either, they are refused. So no state is left out in
silence. A load takes the way in which the checkpoint was saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.expectation import EntryContents, Expectation
from bytecheckpoint.adapters.frameworks.flat_parameters import FlatOptimizer
from bytecheckpoint.adapters.native.parameter_names import HoldsTensors, NamesParameters
from bytecheckpoint.adapters.optimizers.forms import OWN, Form
from bytecheckpoint.adapters.optimizers.hyperparameters import kind_of
from bytecheckpoint.adapters.optimizers.inner_optimizers import (
    Shapes,
    check_steps_wait,
    held_by,
    held_optimizers,
    is_usual,
    keeps_state,
    shown_by,
)
from bytecheckpoint.adapters.optimizers.optimizer import OptimizerEntry
from bytecheckpoint.adapters.optimizers.param_state import refuse_zero_redundancy
from bytecheckpoint.adapters.optimizers.stored_optimizer import is_optimizer_tree
from bytecheckpoint.adapters.stateful import StatefulEntry
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest.plain_wire import unsupported

_Way = Literal["by parameter", "by state_dict", "refused"]


class _StateCheck(NamedTuple):
    """The way in which one optimizer is saved, and why."""

    way: _Way
    shown: Shapes
    """The state tensors of its state_dict()."""
    held: Shapes
    """State tensors that it and the optimizers inside hold."""


class OptimizerWrapper(NamedTuple):
    """An optimizer whose state need not be in its `.state`."""

    optimizer: torch.optim.Optimizer
    inner: Sequence[torch.optim.Optimizer | FlatOptimizer]
    """The innermost optimizers inside; may be empty."""
    between: Sequence[torch.optim.Optimizer] = ()
    """The optimizers inside that hold others."""

    def find_way(self) -> _StateCheck:
        """Returns the first of the ways that saves all state, with what speaks for it: "refused" if none does. May call
        the state_dict() of the optimizer, and leaves it as it was.
        """
        inner = [each for each in self.inner if isinstance(each, torch.optim.Optimizer)]
        if len(inner) < len(self.inner):  # adapters know more of what frameworks keep flat than any state_dict() tells
            return _StateCheck("by parameter", Counter(), Counter())
        own, of_inner = Counter[tuple[int, ...]](), held_by(inner)
        outer = [self.optimizer, *self.between]
        for number, each in enumerate(outer):  # some show the state of those inside as theirs
            own += held_by([each], without=[*inner, *outer[:number]])
        shown = shown_by(self.optimizer, inner)
        has_names_for_all = not own if inner else keeps_state(self.optimizer)
        if has_names_for_all and shown.shapes <= (of_inner or own) and not shown.has_own_data:
            return _StateCheck("by parameter", shown.shapes, of_inner or own)
        held = own + of_inner
        return _StateCheck("by state_dict" if held <= shown.shapes else "refused", shown.shapes, held)

    def refused(self, fqn: str, check: _StateCheck) -> CheckpointSaveError:
        """Returns the error for an optimizer whose state cannot be saved completely in any way."""
        names = ", ".join(sorted({type(each).__name__ for each in [*self.between, *self.inner]}))
        inside = f" and the optimizers in it ({names})" if names else ""
        what = (
            f"a {type(self.optimizer).__name__}, whose state_dict() has {check.shown.total()} state tensors and lacks "
            f"{(check.held - check.shown).total()} of the {check.held.total()} that its `.state`{inside} hold, so that "
            "some would not be saved"
        )
        is_in_inner = self.inner and not self.between
        advice = (
            "pass the optimizers inside it, as a list" if is_in_inner else "let its state_dict() give out all state"
        )
        return unsupported(fqn, what, advice)


class OptimizerWrapperEntry:
    """One optimizer whose state need not be in its `.state`, or a list of optimizers with such among them."""

    def __init__(self, fqn: str, wrappers: Sequence[OptimizerWrapper]) -> None:
        self.fqn = fqn
        self._wrappers = wrappers
        self._by_parameter = OptimizerEntry(fqn, [each for one in wrappers for each in one.inner or [one.optimizer]])
        self._by_state_dict = StatefulEntry(fqn, wrappers[0].optimizer) if len(wrappers) == 1 else None
        self.wrapped = self._by_parameter.wrapped
        self.framework = self._by_parameter.framework
        outer = [one.optimizer for one in wrappers if one.inner and id(one.optimizer) not in map(id, one.inner)]
        self.optimizers = [*outer, *self._by_parameter.optimizers]
        self._unnamed: CheckpointSaveError | None = None
        """The error for parameters without names; None if all have names."""

    def name_parameters(self, modules: Sequence[NamesParameters], others: Sequence[HoldsTensors]) -> None:
        """Takes the names of the parameters as `OptimizerEntry` does. A parameter without a name is an error only when
        an optimizer is saved or loaded by parameter.

        Raises CheckpointSaveError (unsupported_value) for an optimizer that has only this rank's part of its state.
        """
        for optimizer in self.optimizers:
            refuse_zero_redundancy(self.fqn, optimizer)
        try:
            self._by_parameter.name_parameters(modules, others)
        except CheckpointSaveError as error:
            self._unnamed = error  # saving its state_dict() needs no names

    def check_can_be_lazy(self) -> None:
        """Raises CheckpointSaveError (unsupported_value) where an optimizer would not wait for a lazy snapshot."""
        check_steps_wait(self.fqn, self.optimizers, self.wrapped)

    def optimizer_forms(self) -> Mapping[str, Form]:
        """Returns the form of its state_dict() for one optimizer with none inside, else the library's own form. For one
        optimizer that has others inside, all of known kinds, this form has the state keys of their kinds: stored state
        with other keys is loaded as a state_dict().
        """
        if self._by_state_dict is not None and not self._wrappers[0].inner:
            return self._by_state_dict.optimizer_forms()
        kinds = [kind_of(each) for each in self._by_parameter.optimizers]
        if self._by_state_dict is None or None in kinds:
            return self._by_parameter.optimizer_forms()
        keys = frozenset({"step"}.union(*(kind.needed | kind.others for kind in kinds if kind is not None)))
        return {self.fqn: OWN._replace(keys=keys)}

    def collect(self) -> EntryContents:
        """Raises CheckpointSaveError (unsupported_value) where some of the state could not be saved."""
        for wrapper in self._wrappers:
            found = wrapper.find_way()
            if found.way == "refused":
                raise wrapper.refused(self.fqn, found)
            if found.way == "by state_dict" and self._by_state_dict is None:
                what = f"a {type(wrapper.optimizer).__name__} in a list, which only its state_dict() can save"
                raise unsupported(self.fqn, what, "give it a name of its own in the state")
            if found.way == "by state_dict" and self._by_state_dict is not None:
                return self._by_state_dict.collect()
        return self._named().collect()

    def _named(self) -> OptimizerEntry:
        """Returns the entry by parameter. Raises CheckpointSaveError if a parameter has no name."""
        if self._unnamed is not None:
            raise self._unnamed
        return self._by_parameter

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        return self._as_saved(checkpoint).expect(checkpoint)

    def _as_saved(self, checkpoint: CheckpointView) -> OptimizerEntry | StatefulEntry:
        """Returns the entry for the saved form: by parameter for a list or if none is stored. Raises like `_named`."""
        found = checkpoint.object_tree(self.fqn)
        is_by_parameter = found is None or is_optimizer_tree(found.tree)
        return self._named() if is_by_parameter or self._by_state_dict is None else self._by_state_dict

    def prepare(self, checkpoint: CheckpointView, refused: Collection[str]) -> None:
        self._as_saved(checkpoint).prepare(checkpoint, refused)

    def finish(self, checkpoint: CheckpointView) -> None:
        self._as_saved(checkpoint).finish(checkpoint)


def wrapper_of(optimizer: Any) -> OptimizerWrapper | None:
    """Returns a wrapper for an optimizer that holds others or may keep its state outside `.state`; None for others."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    held = held_optimizers(optimizer)
    return OptimizerWrapper(optimizer, *held) if held.inner or not is_usual(optimizer) else None
