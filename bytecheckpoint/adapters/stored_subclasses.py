"""Tensor subclasses of a state compared with those of a checkpoint, before anything of them is filled: the same bytes
mean something else under another block size. And the state of optimizers that is such tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bytecheckpoint.adapters.plain_data import leaves
from bytecheckpoint.adapters.stored import Problem, Stored, StoredTensor, not_stored
from bytecheckpoint.adapters.subclass_facts import FACTS, are_facts, difference, why_not_built
from bytecheckpoint.adapters.subclasses import flat_parts, is_facts, is_subclass, names_table, outer_fqn, spread_like
from bytecheckpoint.adapters.tensors import torch_dtype


def facts_problems(own: Mapping[str, Any], stored: Stored, tied: Mapping[str, str] | None = None) -> list[Problem]:
    """What keeps live subclasses from being filled, of which `own` has the facts by FQN; `tied` ones have those of any
    of their names.
    """
    names: dict[str, list[str]] = {}
    for fqn in own:
        owner = (tied or {}).get(outer_fqn(fqn), outer_fqn(fqn))
        names.setdefault(f"{owner}.{FACTS}", []).append(fqn)
    problems: list[Problem] = []
    for group in names.values():
        found = [fqn for fqn in group if fqn in stored.plain]
        problems += [_problem(fqn, own[fqn], stored) for fqn in found if _differs(own[fqn], stored.plain[fqn])]
        if not found and not any(map(stored.skips, group)):
            problems.append(not_stored(group[0]))
    return problems


def _differs(own: Any, found: Any) -> bool:
    return difference(own, found) is not None


def _problem(fqn: str, own: Any, stored: Stored) -> Problem:
    text = f"{outer_fqn(fqn)}: tensor subclasses that differ: {difference(own, stored.plain[fqn])}"
    return Problem("conflict", fqn, text)


def unbuildable(values: Mapping[str, Any]) -> list[Problem]:
    """Of leaves of plain data that are about to be built: which describe subclasses that cannot be."""
    reasons = {fqn: why_not_built(value) for fqn, value in values.items() if is_facts(fqn) and are_facts(value)}
    return [_unbuildable(fqn, reason) for fqn, reason in reasons.items() if reason]


def _unbuildable(fqn: str, reason: str) -> Problem:
    return Problem("conflict", fqn, f"{outer_fqn(fqn)}: a tensor subclass that cannot be built: {reason}")


def refused_by(problems: Collection[Problem]) -> tuple[str, ...]:
    """What the FQNs of the inner tensors start with that are not to be filled. What is only missing can be."""
    return tuple(f"{outer_fqn(fqn)}." for kind, fqn, _ in problems if kind == "conflict" and is_facts(fqn))


def own_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The optimizer state of one parameter by key, subclasses taken apart: `exp_avg.codes`, `exp_avg.@subclass`."""
    if not any(map(is_subclass, state.values())):  # nearly always
        return state
    own: dict[str, Any] = {}
    for key, value in state.items():
        own |= flat_parts(key, value) if is_subclass(value) else {key: value}
    return own


class SubclassState:
    """What of one parameter's optimizer state is tensor subclasses, live and in a checkpoint.

    `tensors` and `plain` are what the checkpoint has by state key, as StoredOptimizer gives them.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        live: Mapping[str, Any],
        tensors: Mapping[str, tuple[str, StoredTensor]],
        plain: Mapping[str, tuple[str, Any]],
    ) -> None:
        self.own = own_state(live)
        self._parameter = parameter
        self._tensors = tensors
        self._facts: dict[str, Any] = {}
        for name, (_, tree) in plain.items():
            found = leaves(tree, name).items()
            self._facts |= {key: leaf for key, leaf in found if is_facts(key) and are_facts(leaf)}
        is_any = self._facts or self.own is not live
        self._refused = {key.partition(".")[0] for key, _ in self.problems()} if is_any else frozenset()

    def problems(self) -> list[tuple[str, str]]:
        """State keys whose tensors cannot be filled or created, and why, as text for an error."""
        reasons = {key: self._why_not(key, facts) for key, facts in self._facts.items()}
        lacking = [k for k, own in self.own.items() if is_facts(k) and are_facts(own) and k not in self._facts]
        reasons |= dict.fromkeys(lacking, "a tensor subclass in the state, and none in the checkpoint")
        return [(key, reason) for key, reason in reasons.items() if reason]

    def _why_not(self, key: str, facts: Any) -> str | None:
        if key in self.own:
            return difference(self.own[key], facts)
        if isinstance(self.own.get(outer_fqn(key)), torch.Tensor):
            return "a tensor subclass in the checkpoint, and none in the state"
        inner = {k: stored for k, (_, stored) in self._tensors.items() if k.startswith(f"{outer_fqn(key)}.")}
        meta = torch.device("meta")
        if any(self._spread(k, stored, meta) is None for k, stored in inner.items() if self._is_spread(k)):
            return "a tensor subclass whose inner tensors cannot be cut as its parameter is; take one step first"
        return why_not_built(facts)

    def takes(self, key: str) -> bool:
        """Whether what the checkpoint has under this key, `exp_avg.codes` say, is loaded."""
        return key.partition(".")[0] not in self._refused

    def lacks(self, key: str) -> bool:
        """Whether the state of this key, `exp_avg` say, is to be put together of parts that a load creates."""
        return self.takes(key) and f"{key}.{FACTS}" not in self.own

    def new_part(self, key: str, stored: StoredTensor, device: torch.device | None) -> torch.Tensor:
        """Memory for a tensor inside a parameter's state, on this device or where it belongs."""
        if self._is_spread(key):
            spread = self._spread(key, stored, device or self._parameter.device)
            if spread is not None:
                return spread
        home = self._parameter.device if self._around(key) else torch.device("cpu")
        return torch.empty(stored.shape, dtype=torch_dtype(stored.dtype), device=device or home)

    def _around(self, key: str) -> list[Any]:
        """The facts of the subclasses that a tensor is a part of, the outermost one first."""
        keys = sorted((of_key for of_key in self._facts if key.startswith(f"{outer_fqn(of_key)}.")), key=len)
        return [self._facts[of_key] for of_key in keys]

    def _is_spread(self, key: str) -> bool:
        """Whether a tensor is a part of something that lies like the parameter, which is spread over ranks."""
        around = self._around(key)
        is_like = bool(around) and around[0][0]["shape"] == list(self._parameter.shape)
        return is_like and isinstance(self._parameter, DTensor)

    def _spread(self, key: str, stored: StoredTensor, device: torch.device) -> DTensor | None:
        parameter = self._parameter
        if not isinstance(parameter, DTensor):
            return None
        dtype = torch_dtype(stored.dtype)
        return spread_like(parameter, stored.shape, dtype, device, is_table=names_table(key))
