"""The hyperparameters of an optimizer's groups, found by the parameters that they were saved for, and the check that
saved state is state of an optimizer's own kind. Keys of the state tell the kind: names of classes say little, because
a fused, a wrapped and a derived optimizer can each load what another of them saved.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.expectation import Problem
from bytecheckpoint.adapters.native.parameter_names import ParameterNames
from bytecheckpoint.adapters.native.subclass_flatten import is_facts, is_subclass
from bytecheckpoint.adapters.optimizers.stored_optimizer import StoredGroup, StoredOptimizer
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves, with_leaves
from bytecheckpoint.errors import and_more
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn, unsupported

_NUM_SHOWN = 3
_NOT_HYPERPARAMETERS = {"params", "param_names", "is_expert_parallel"}
"""Keys of a group that are neither saved nor loaded: its parameters, and Megatron's flag of the groups whose parameters
expert-parallel ranks divide. That flag belongs to the layout of a run: the same parameters have it with two expert
ranks and not with one, and Megatron finds a group by it. Checkpoints of earlier versions may hold it.
"""


def by_first_parameter(
    fqn: str, groups: Iterable[tuple[Mapping[str, Any], Sequence[ParameterNames]]]
) -> dict[str, dict[str, Any]]:
    """Returns the hyperparameters of each parameter group as `values`, and the names of its parameters as the keys of
    `params`, under the name of its first parameter (`#` and its index if it has none), so that ranks with other
    parameters can add theirs. Groups with the same first parameter become one.

    Raises CheckpointSaveError (unsupported_value) where parts of one parameter have different hyperparameters.
    """
    found: dict[str, dict[str, Any]] = {}
    values_of: dict[str, dict[str, Any]] = {}
    for index, (group, parameters) in enumerate(groups):
        # A dict, because ranks may hold other parameters of one group, and dicts of ranks are merged.
        names = dict.fromkeys(names.name for names in parameters)
        values = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
        for name in values_of.keys() & names:
            if not same_value(values_of[name], values):
                what = f"an optimizer that has parts of {name} in groups with different hyperparameters"
                raise unsupported(fqn, what, "give its parts names of their own, such as one for each layer")
        values_of |= dict.fromkeys(names, values)
        of_first = found.setdefault(next(iter(names), f"#{index}"), {"params": {}, "values": values})
        of_first["params"] |= names
    return found


def agreed(
    parameters: Iterable[ParameterNames],
    stored: StoredOptimizer,
    checkpoint: CheckpointView,
    memory: Mapping[str, torch.Tensor],
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the selected hyperparameters, by name, with which the parameters of a group were saved, and the problems.
    A hyperparameter that some were saved without, or with another value, is left out, and is a problem.

    `memory`, by state FQN, stands in place of tensors that lie in data files, as in foreign formats. Tensors that it
    lacks count as equal, and a hyperparameter with one of them is left out.
    """
    groups = _saved_groups(parameters, stored)
    values, problems = {}, []
    keys = dict.fromkeys(key for of_parameters in groups for key in of_parameters.values)
    for key in (key for key in keys if key not in _NOT_HYPERPARAMETERS):
        selected = [of_parameters for of_parameters in groups if stored.takes(of_parameters, key)]
        found = [_filled(of_parameters, key, checkpoint, memory) for of_parameters in selected]
        if not all(
            key in other.values and same_value(found[0], value) for other, value in zip(selected, found, strict=True)
        ):
            fqn = checkpoint.rename(join_fqn(selected[0].fqn, key))
            text = f"{fqn}: the parameters of this group were saved in groups with different values of {key!r}"
            problems.append(Problem("conflict", fqn, text))
        elif found and not _tensors_in(key, found[0]):
            values[key] = found[0]
    return values, problems


def _saved_groups(parameters: Iterable[ParameterNames], stored: StoredOptimizer) -> list[StoredGroup]:
    groups = {group.fqn: group for group in map(stored.group, parameters) if group is not None}
    return list(groups.values())


def tensors_to_load(
    parameters: Iterable[ParameterNames], stored: StoredOptimizer, checkpoint: CheckpointView
) -> set[str]:
    """Returns the state FQNs of the tensors in data files among the selected hyperparameters of these parameters."""
    return {
        checkpoint.rename(leaf)
        for group in _saved_groups(parameters, stored)
        for key, value in group.values.items()
        if stored.takes(group, key)
        for leaf in _tensors_in(join_fqn(group.fqn, key), value)
    }


def _tensors_in(fqn: str, value: Any) -> list[str]:
    """Returns the FQNs of the tensors in a hyperparameter that lie in data files."""
    return [leaf for leaf, item in leaves(value, fqn, may_repeat=True).items() if isinstance(item, TensorRef)]


def _filled(group: StoredGroup, key: str, checkpoint: CheckpointView, memory: Mapping[str, torch.Tensor]) -> Any:
    fqn, value = join_fqn(group.fqn, key), group.values.get(key)
    new = {leaf: memory.get(checkpoint.rename(leaf), TensorRef("")) for leaf in _tensors_in(fqn, value)}
    return with_leaves(copy.deepcopy(value), fqn, new) if new else value


def set_hyperparameters(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: Mapping[str, Any],
    filled: MutableMapping[int, torch.Tensor],
) -> None:
    """Copies values into a group. A tensor of the group, or in a tuple or list there, as betas are, is filled in place,
    because captured graphs hold it; one that cannot hold the value is replaced. Where the group has a number and the
    value is a tensor of one element, an optimizer of a known kind gets a number, any other the tensor: the steps of
    some, as Prodigy's, make such tensors of numbers and go on with them, in another precision.

    `filled` has the values that this load has put into tensors of other groups, by the tensor's id. A tensor that was
    one for two groups, as torch makes of a default, becomes two where their values differ.
    """
    take_over = partial(_taken_over, filled=filled, keeps_numbers=kind_of(optimizer) is not None)
    for key, value in values.items():
        group[key] = take_over(group.get(key), value)


def _taken_over(own: Any, value: Any, *, filled: MutableMapping[int, torch.Tensor], keeps_numbers: bool) -> Any:
    """Returns `own`, filled with the value, or what replaces it, as `set_hyperparameters` says."""
    if type(own) in (list, tuple) and type(value) in (list, tuple) and len(own) == len(value):
        return type(value)(map(partial(_taken_over, filled=filled, keeps_numbers=keeps_numbers), own, value))
    if isinstance(own, torch.Tensor):
        new = _tensor_of(value, own.dtype)
        new = new.reshape(()) if new is not None and new.numel() == 1 else new
        if new is not None and _spreads_over(new.shape, own.shape):
            new = new.to(own.dtype)
            if not same_value(filled.setdefault(id(own), new), new):
                own = torch.empty_like(own)
            own.detach().copy_(new)
            return own
    is_one = keeps_numbers and isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_one and isinstance(own, int | float) else copy.deepcopy(value)


def _spreads_over(shape: torch.Size, own: torch.Size) -> bool:
    """Returns True if torch copies a tensor of this shape into one of the other shape, as it does an equal one."""
    lengths = zip(reversed(shape), reversed(own), strict=False)
    return len(shape) <= len(own) and all(length in (1, of_own) for length, of_own in lengths)


def _tensor_of(value: Any, dtype: torch.dtype) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    try:
        # In this dtype: of a number torch makes a tensor of the default dtype, which may be bfloat16.
        return torch.tensor(value, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, a text, a number that the dtype cannot hold
        return None


def same_value(a: Any, b: Any) -> bool:
    """Returns True if two pieces of plain data are equal, to the bit. A number, or lists of numbers, equal a tensor if
    torch makes an equal tensor of that dtype and the same shape of them: 0.1 equals a float32 and a float64 tensor of
    0.1, not one of shape (1,), and NaN equals no tensor. Within dicts and tuples, numbers and tensors are never equal.
    """
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return _is_made_of(b, a) if isinstance(a, torch.Tensor) else _is_made_of(a, b)
    # As bytes, so that NaN is NaN and arrays are compared whole.
    return encode_plain(a, "") == encode_plain(b, "")


def _is_made_of(value: Any, tensor: torch.Tensor) -> bool:
    """Returns True if torch makes an equal tensor of this number, or of these lists of numbers."""
    has_fractions = tensor.is_floating_point() or tensor.is_complex()  # else a cast would cut them off
    try:
        made = torch.as_tensor(value, dtype=tensor.dtype if has_fractions else None, device=tensor.device)
        return torch.equal(made, tensor)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, a text, a dict, a number too large
        return False


class OptimizerKind(NamedTuple):
    """The keys of the state that an optimizer keeps for a parameter."""

    needed: frozenset[str]
    """Keys without which the next step fails if the parameter has other state."""
    others: frozenset[str] = frozenset()
    """Keys that are there or not, by hyperparameters or the version of torch."""
    flags: Mapping[str, str] = {}
    """Those of `others` that are needed with a certain hyperparameter -> its name."""
    made: frozenset[str] = frozenset()
    """Keys that a step makes where they are not there."""
    has_subclasses: bool = False
    """True if an optimizer of this kind keeps state as tensor subclasses for parameters that are none."""


def _kind(needed: str, others: str = "", made: str = "", **flags: str) -> OptimizerKind:
    return OptimizerKind(frozenset(needed.split()), frozenset(others.split()), flags, frozenset(made.split()))


_ADAM = _kind("exp_avg exp_avg_sq", "step max_exp_avg_sq", max_exp_avg_sq="amsgrad")
_KINDS: Mapping[str, OptimizerKind] = {
    "Adam": _ADAM,
    "SparseAdam": _ADAM,
    "RAdam": _ADAM,
    "NAdam": _kind("exp_avg exp_avg_sq mu_product", "step"),
    "Adamax": _kind("exp_avg exp_inf", "step"),
    "SGD": _kind("", "momentum_buffer", made="momentum_buffer"),
    "Muon": _kind("momentum_buffer", made="momentum_buffer"),
    "RMSprop": _kind("square_avg", "step momentum_buffer grad_avg", momentum_buffer="momentum", grad_avg="centered"),
    "Adagrad": _kind("sum", "step"),
    "Adadelta": _kind("square_avg acc_delta", "step"),
    "Adafactor": _kind("", "step row_var col_var variance"),
    "ASGD": _kind("ax", "step eta mu"),
    "Rprop": _kind("prev", "step step_size"),
    "LBFGS": _kind(
        "",
        "func_evals n_iter d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss al",
        made="func_evals n_iter prev_loss al",
    ),
    "_AdamBase": _ADAM._replace(has_subclasses=True),
    "Optimizer8bit": _kind("state1", "step state2 qmap1 qmap2 absmax1 absmax2 max1 max2 new_max1 new_max2 unorm_vec"),
}
"""State of the optimizers of torch, torchao and bitsandbytes, by the class that has the step: those derived of it
without a step of their own have the same."""
_LIBRARIES = frozenset({"torch", "torchao", "bitsandbytes"})
_STATE_KEYS = frozenset(key for kind in _KINDS.values() for key in kind.needed | kind.others) - {"step"}
"""Keys that tell kinds apart: frameworks count steps whatever the optimizer does."""

_ALGORITHM = _kind(
    "betas amsgrad momentum dampening nesterov alpha centered rho lr_decay initial_accumulator_value momentum_decay "
    "lambd t0 etas step_sizes max_iter max_eval history_size tolerance_grad tolerance_change line_search_fn "
    "beta2_decay ns_steps ns_coefficients adjust_lr_fn clip_threshold decay_rate"
).needed
"""Hyperparameters that tell one algorithm from another; most optimizers have the others."""


def kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind | None:
    """Returns the kind of an optimizer; None if its state keys are unknown."""
    # torch puts a hook in place of the method of each class, and the hook says which method it calls.
    step = type(optimizer).step
    name, _, method = step.__qualname__.rpartition(".")
    is_known = method == "step" and step.__module__.partition(".optim")[0] in _LIBRARIES
    return _KINDS.get(name) if is_known else None


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
    parameters: Sequence[ParameterNames],
    stored: StoredOptimizer,
) -> list[Clash]:
    """Returns the parameters of a group that were saved by another kind of optimizer, as their hyperparameters or the
    keys of their state show, as far as these are selected.
    """
    kind = kind_of(optimizer)
    own = _ALGORITHM & group.keys()
    has_state = any(map(stored.stored_keys, parameters))  # else nothing but hyperparameters tells the kind
    values_of: dict[str, set[str]] = {}
    clashing: list[Clash] = []
    for names in parameters:
        saved = stored.group(names)
        if saved is None:
            continue
        if saved.fqn not in values_of:
            values_of[saved.fqn] = {key for key in _ALGORITHM & saved.values.keys() if stored.takes(saved, key)}
        values, keys = values_of[saved.fqn], stored.keys_to_load(names) - {"step"}
        if own and values and not (own & values if has_state else own <= values or own >= values):
            clashing.append(Clash(names.name, values, own))
        elif kind is not None:
            # State may lack keys where it was saved with the same hyperparameters, or is not loaded whole.
            may_lack = own <= values or not stored.takes_all or not keys
            is_whole = may_lack or kind.needed.issubset(keys)
            if not is_whole or not (kind.needed | kind.others).issuperset(_STATE_KEYS & keys):
                clashing.append(Clash(names.name, keys, kind.needed or kind.others))
    return clashing


def subclass_clashes(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[torch.Tensor, ParameterNames]],
    stored: StoredOptimizer,
) -> list[Clash]:
    """Returns the parameters of which a low-bit optimizer saved state as tensor subclasses, with which the step of this
    optimizer fails: it keeps plain tensors for parameters that are no subclasses.
    """
    kind = kind_of(optimizer)
    if kind is None or kind.has_subclasses or not stored.has_subclasses:
        return []
    clashing: list[Clash] = []
    for parameter, names in parameters:
        found = {
            f"{key} as a tensor subclass"
            for key, (_, value) in stored.plain(names).items()
            if any(map(is_facts, leaves(value, key)))
        }
        own = optimizer.state.get(parameter, {})
        if found and not any(map(is_subclass, (parameter, *own.values()))):
            clashing.append(Clash(names.name, found, kind.needed or kind.others))
    return clashing


def clash_problem(fqn: str, kinds: Collection[str], clashing: Sequence[Clash]) -> Problem:
    """Returns one problem for all parameters of an optimizer entry; `kinds` are the names of its classes."""
    first = clashing[0]
    shown = and_more([clash.name for clash in clashing], _NUM_SHOWN)
    text = (
        f"{fqn}: saved by another kind of optimizer: for {shown} the checkpoint has "
        f"{', '.join(sorted(first.stored))}, and {', '.join(sorted(kinds))} has {', '.join(sorted(first.own))}. To "
        "start the optimizer anew leave it out of the state; strict=False leaves it as it is and loads the rest"
    )
    return Problem("conflict", fqn, text)


class TornState(NamedTuple):
    """A parameter of whose state include and exclude let only a part through, with which the next step may fail."""

    name: str
    lacking: Collection[str]
    """Keys that the state would lack."""


def torn_states(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    contents: Sequence[ParameterNames],
    stored: StoredOptimizer,
) -> list[TornState]:
    """Returns the first parameter of those that lie in one tensor of a group, if the load would tear the state of the
    tensor; else an empty list. An optimizer makes new state only where it has none: the load must not leave a part.
    `group` has the hyperparameters as they are after the load.
    """
    kind, own = kind_of(optimizer), set(optimizer.state.get(parameter, ()))
    loaded = [names for names in contents if not stored.is_excluded(names)]
    taken = set().union(*map(stored.whole_keys, loaded))
    lacking: set[str] = set()
    if taken and (kind is not None or not own):  # one of unknown kind with state has what it needs
        lacking = set().union(*map(stored.stored_keys, loaded)) - taken - own
    if kind is not None:
        off = {key for key, flag in kind.flags.items() if not group.get(flag)}
        known = kind.needed | kind.others
        lacking = lacking & known - kind.made - off
        lacking |= (kind.flags.keys() - off - taken - own) if taken or own else set()
    return [TornState(contents[0].name, lacking)] if lacking else []


def after_load(
    group: Mapping[str, Any], parameters: Iterable[ParameterNames], stored: StoredOptimizer
) -> dict[str, Any]:
    """Returns the hyperparameters that a group of these parameters has after the load."""
    values = dict(group)
    for saved in _saved_groups(parameters, stored):
        values |= {key: value for key, value in saved.values.items() if stored.takes(saved, key)}
    return values


def torn_problem(fqn: str, kinds: Collection[str], torn: Sequence[TornState]) -> Problem:
    """Returns one problem for all parameters of an optimizer entry; `kinds` are the names of its classes."""
    shown = and_more([state.name for state in torn], _NUM_SHOWN)
    text = (
        f"{fqn}: as include and exclude choose, the state of {shown} would lack {', '.join(sorted(torn[0].lacking))}, "
        f"without which the next step of {', '.join(sorted(kinds))} may fail. Choose all or nothing of a parameter's "
        "state and its group, and set to zero after the load what is to begin anew; strict=False leaves the groups of "
        "these parameters as they are"
    )
    return Problem("conflict", fqn, text)
