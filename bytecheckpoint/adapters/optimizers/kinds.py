"""The check that saved state is state of an optimizer's own kind, judged by its keys: names of classes say little,
because a fused, a wrapped and a derived optimizer go on from one another's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.expectation import Problem
from bytecheckpoint.adapters.native.parameter_names import ParameterNames
from bytecheckpoint.adapters.optimizers.stored_optimizer import StoredOptimizer
from bytecheckpoint.errors import and_more

_NUM_SHOWN = 3


class OptimizerKind(NamedTuple):
    """The keys of the state that an optimizer keeps for a parameter."""

    needed: frozenset[str]
    """Keys without which its next step fails, where there is other state."""
    others: frozenset[str] = frozenset()
    """Keys that hyperparameters or versions decide about."""


def _kind(needed: str, others: str = "") -> OptimizerKind:
    return OptimizerKind(frozenset(needed.split()), frozenset(others.split()))


_ADAM = _kind("exp_avg exp_avg_sq", "step max_exp_avg_sq")
_KINDS: Mapping[str, OptimizerKind] = {
    "Adam": _ADAM,
    "SparseAdam": _ADAM,
    "RAdam": _ADAM,
    "NAdam": _kind("exp_avg exp_avg_sq mu_product", "step"),
    "Adamax": _kind("exp_avg exp_inf", "step"),
    "SGD": _kind("", "momentum_buffer"),
    "Muon": _kind("momentum_buffer"),
    "RMSprop": _kind("square_avg", "step momentum_buffer grad_avg"),
    "Adagrad": _kind("sum", "step"),
    "Adadelta": _kind("square_avg acc_delta", "step"),
    "Adafactor": _kind("", "step row_var col_var variance"),
    "ASGD": _kind("ax", "step eta mu"),
    "Rprop": _kind("prev", "step step_size"),
    "LBFGS": _kind("", "func_evals n_iter d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss al"),
}
"""State of torch's optimizers, by class: those derived of them without a step of their own have the same."""
_STATE_KEYS = frozenset(key for kind in _KINDS.values() for key in kind.needed | kind.others) - {"step"}
"""Keys that tell kinds apart: frameworks count steps whatever the optimizer does."""

_ALGORITHM = _kind(
    "betas amsgrad momentum dampening nesterov alpha centered rho lr_decay initial_accumulator_value momentum_decay "
    "lambd t0 etas step_sizes max_iter max_eval history_size tolerance_grad tolerance_change line_search_fn "
    "beta2_decay ns_steps ns_coefficients adjust_lr_fn"
).needed
"""Hyperparameters that tell one algorithm from another; most optimizers have the others."""


def kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind | None:
    """Returns None for an optimizer whose state keys are unknown."""
    # torch puts a hook in place of the method of each class, and the hook says which method it calls.
    step = type(optimizer).step
    name, _, method = step.__qualname__.rpartition(".")
    is_of_torch = method == "step" and step.__module__.partition(".optim")[0] == "torch"
    return _KINDS.get(name) if is_of_torch else None


class Clash(NamedTuple):
    """A parameter whose state or hyperparameters are those of another kind of optimizer."""

    name: str
    stored: Collection[str]
    """Keys in the checkpoint."""
    own: Collection[str]
    """Keys of the optimizer in the state."""


def clashes(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameters: Iterable[ParameterNames],
    found: StoredOptimizer,
) -> list[Clash]:
    """Returns the parameters of a group that were saved by another kind of optimizer, as far as include and exclude
    leave their state.
    """
    kind = kind_of(optimizer)
    own = _ALGORITHM & group.keys()
    values_of: dict[str, set[str]] = {}
    clashing: list[Clash] = []
    for names in parameters:
        saved = found.group(names)
        if saved is None:
            continue
        if saved.fqn not in values_of:
            values_of[saved.fqn] = {key for key in _ALGORITHM & saved.values.keys() if found.takes(saved, key)}
        values, keys = values_of[saved.fqn], found.state_keys(names) - {"step"}
        if own and values and not own & values:
            clashing.append(Clash(names.name, values, own))
        elif kind is not None:
            # State may lack keys where it was saved with the same hyperparameters, or is not loaded whole.
            may_lack = own <= values or not found.takes_all or not keys
            is_whole = may_lack or kind.needed.issubset(keys)
            if not is_whole or not (kind.needed | kind.others).issuperset(_STATE_KEYS & keys):
                clashing.append(Clash(names.name, keys, kind.needed or kind.others))
    return clashing


def problem_of(fqn: str, kinds: Collection[str], found: Sequence[Clash]) -> Problem:
    """Returns one for all parameters of an optimizer entry; `kinds` are the names of its classes."""
    first = found[0]
    shown = and_more([clash.name for clash in found], _NUM_SHOWN)
    text = (
        f"{fqn}: saved by another kind of optimizer: for {shown} the checkpoint has "
        f"{', '.join(sorted(first.stored))}, and {', '.join(sorted(kinds))} has {', '.join(sorted(first.own))}. To "
        "start the optimizer anew leave it out of the state; strict=False leaves it as it is and loads the rest"
    )
    return Problem("conflict", fqn, text)
