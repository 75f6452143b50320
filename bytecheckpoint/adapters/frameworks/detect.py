"""The frameworks that a call may name, and the check that the state has an object of the named framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, get_args

import torch

from bytecheckpoint.adapters.native.module_walk import stages_of
from bytecheckpoint.adapters.rank_values.rank_local import RankLocal
from bytecheckpoint.adapters.stateful import is_stateful
from bytecheckpoint.adapters.torch_types import (
    DTensor,
    FlatParameter,
    FSDPModule,
    FullyShardedDataParallel,
    ShardedTensor,
)
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.runtime.integers import integer_of

Framework = Literal["auto", "ddp", "fsdp", "fsdp2", "dtensor", "megatron", "deepspeed", "vescale"]
"""Values of `framework`. Those without adapters of their own are read by those of torch's modules and optimizers."""

FRAMEWORKS: tuple[str, ...] = get_args(Framework)


def check_known(framework: object) -> None:
    """Raises CheckpointMismatchError (conflict) for a framework that is not in FRAMEWORKS."""
    if not isinstance(framework, str) or framework not in FRAMEWORKS:
        step = integer_of(framework)
        advice = f"one of {', '.join(FRAMEWORKS)}" if step is None else f"step={step} by its name"
        raise CheckpointMismatchError(
            f"framework={framework!r:.100} is not known to this release; nothing was changed: pass {advice}",
            kind="conflict",
        )


def refuse_absent(framework: str, state: Mapping[str, Any], *, has_own: bool) -> None:
    """Raises CheckpointMismatchError (conflict) if nothing in the state is of the framework, unless that is "auto".
    `has_own` is True if an adapter of this framework already reads an entry of the state. Calls state_dict() of objects
    in the state if nothing else is of the framework.
    """
    if framework == "auto" or has_own or _is_there(framework, state):
        return
    found = ", ".join(f"{key} (a {type(value).__name__})" for key, value in state.items()) or "an empty state"
    raise CheckpointMismatchError(
        f"framework={framework!r} was given, and nothing in the state belongs to it; found were {found}. Nothing "
        f'was changed: pass framework="auto", which finds what there is, or what {framework} has made of the model; '
        "docs/frameworks.md says what counts",
        kind="conflict",
    )


def _is_there(framework: str, state: Mapping[str, Any]) -> bool:
    if framework in {"megatron", "deepspeed"}:  # an adapter of theirs reads all that counts
        return False
    values = list(_leaves(state))
    if _is_among(framework, values):
        return True
    # The state_dict of an object may cost memory: it is read only where nothing else matches.
    wrappers = (value for value in values if is_stateful(value) and not stages_of(value))
    return any(_is_among(framework, list(_leaves(value.state_dict()))) for value in wrappers)


def _leaves(value: Any) -> Iterator[Any]:
    """Yields what nested containers hold; a list of model stages is not taken apart."""
    if isinstance(value, RankLocal):
        value = value.value
    if isinstance(value, Mapping):
        yield from chain.from_iterable(map(_leaves, value.values()))
    elif isinstance(value, list | tuple) and not stages_of(value):
        yield from chain.from_iterable(map(_leaves, value))
    else:
        yield value


def _is_among(framework: str, values: Iterable[Any]) -> bool:
    held: list[Any] = []
    for value in values:
        held.append(value)
        for root in (stage.module for stage in stages_of(value)):
            held += (*torch.nn.Module.modules(root), *root.parameters(), *root.buffers())
        if isinstance(value, torch.optim.Optimizer):
            held += chain.from_iterable(group["params"] for group in value.param_groups)
    if framework == "ddp":
        return any(_is_ddp(each) for each in held if isinstance(each, torch.nn.Module))
    if framework == "vescale":
        return any(map(_is_of_vescale, held))
    kinds: dict[str, tuple[type, ...]] = {
        "fsdp": (FullyShardedDataParallel, FSDPModule, FlatParameter, DTensor, ShardedTensor),
        "fsdp2": (FSDPModule, DTensor),
        "dtensor": (DTensor,),
    }
    return any(isinstance(each, kinds[framework]) for each in held)


def _is_ddp(module: torch.nn.Module) -> bool:
    """Returns True for a DistributedDataParallel, by the name of its class, and for a module of Megatron: with `ddp`
    the user says that Megatron splits no tensor.
    """
    names = {kind.__name__ for kind in type(module).__mro__}
    return "DistributedDataParallel" in names or hasattr(type(module), "sharded_state_dict")


def _is_of_vescale(value: Any) -> bool:
    """Returns True for an object of veScale's classes, and a DTensor with its placements, told by their attributes."""
    if any(kind.__module__.partition(".")[0] == "vescale" for kind in type(value).__mro__):
        return True
    placements = value.placements if isinstance(value, DTensor) else ()
    return any(hasattr(placement, "dims") and hasattr(placement, "local_units") for placement in placements)
