"""Tensor subclasses of a state compared with those of a checkpoint, before anything of them is filled: the same bytes
mean something else under another block size. And the state of optimizers that is such tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTensor, placeholder
from bytecheckpoint.adapters.expectation import Problem, not_stored, rank_missing
from bytecheckpoint.adapters.native.module_walk import target_device
from bytecheckpoint.adapters.native.subclass_flatten import (
    dtensor_like,
    enclosing,
    flat_parts,
    is_facts,
    is_subclass,
    is_table_fqn,
    outer_fqn,
    tied_subclasses,
    why_not_built,
)
from bytecheckpoint.adapters.native.subclass_metadata import FACTS, are_facts, difference
from bytecheckpoint.adapters.plain.plain_tree import descend, leaves
from bytecheckpoint.adapters.shards import dtype_name, has_all_memory, shares_elements, torch_dtype
from bytecheckpoint.adapters.torch_types import DTensor
from bytecheckpoint.manifest.plain_wire import TensorRef


class Refusals(NamedTuple):
    """Live subclasses that are not filled, and why: each is loaded wholly, or not at all."""

    problems: list[Problem]
    prefixes: tuple[str, ...]
    """Prefixes of the FQNs inside of these subclasses."""

    def has(self, fqn: str) -> bool:
        return bool(self.prefixes) and fqn.startswith(self.prefixes)


def refusals(
    own: Mapping[str, Any],
    checkpoint: CheckpointView,
    aliases: Mapping[str, str] = MappingProxyType({}),
    other_names: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Refusals:
    """Finds the live subclasses that do not fit. `own` has the state's tensors and facts by FQN.

    `aliases` maps the other FQNs of tied tensors to those in `own`, `other_names` maps them back. Subclasses that share
    a tensor are refused together.
    """
    facts = {fqn: value for fqn, value in own.items() if is_facts(fqn) and are_facts(value)}
    if not facts:
        return Refusals([], ())
    outer = {outer_fqn(fqn) for fqn in facts}
    problems = _facts_problems(facts, checkpoint, tied_subclasses(facts, aliases, own.keys() - facts.keys()))
    refused = {problem.fqn for problem in problems}
    for fqn, value in own.items():
        if isinstance(value, torch.Tensor) and enclosing(fqn, outer):
            problem = _part_problem(fqn, value, checkpoint, other_names.get(fqn, ()))
            if problem is not None:
                problems.append(problem)
                refused.add(fqn)
    return Refusals(problems, _refused_prefixes(refused, outer, aliases))


def _refused_prefixes(fqns: Collection[str], outer: Collection[str], aliases: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the FQN prefixes of the outermost subclasses around these FQNs, and of all that share their tensors."""
    refused = {enclosing(fqn, outer)[-1] for fqn in fqns}
    pairs = [(enclosing(alias, outer), enclosing(fqn, outer)) for alias, fqn in aliases.items()] if refused else []
    links = [{of_alias[-1], of_own[-1]} for of_alias, of_own in pairs if of_alias and of_own]
    while True:
        more = {name for link in links if link & refused for name in link} - refused
        if not more:
            return tuple(f"{name}." for name in sorted(refused))
        refused |= more


def _part_problem(fqn: str, own: Any, checkpoint: CheckpointView, other_names: Sequence[str]) -> Problem | None:
    """Returns why an inner tensor cannot be filled; None if it can, or if include or exclude leave it out. Its values
    are never cast: their meaning would change.
    """
    missing = checkpoint.missing_at(fqn)
    if missing is not None:
        return rank_missing(fqn, missing[1].num_saved)
    name = next((name for name in (fqn, *other_names) if name in checkpoint.tensors), fqn)
    found = checkpoint.tensors.get(name)
    if found is None:
        inline = checkpoint.tree_leaves.get(fqn)
        if isinstance(inline, torch.Tensor):
            found = StoredTensor(fqn, dtype_name(inline.dtype), tuple(inline.shape))
    if found is None:
        return None if checkpoint.skips(fqn) else not_stored(fqn)
    why = why_unfillable(own, found)
    return None if why is None else Problem(why[0], name, f"{name}: {why[1]}")


def why_unfillable(own: torch.Tensor, stored: StoredTensor) -> tuple[str, str] | None:
    """Returns the kind of problem, and why this inner tensor cannot be filled from the stored one; None if it can."""
    if tuple(own.shape) != stored.shape:
        return "shape", f"shape {list(stored.shape)} in the checkpoint, {list(own.shape)} in the state"
    dtype = dtype_name(own.dtype)
    if dtype != stored.dtype:
        text = f"dtype {stored.dtype} in the checkpoint, {dtype} in the state (what is inside a subclass is never cast)"
        return "dtype", text
    memory = own._local_tensor if isinstance(own, DTensor) else own
    if shares_elements(memory):
        return "conflict", "elements of the state's tensor share memory (it is expanded); give it a copy"
    if not has_all_memory(memory):
        return "conflict", "the memory of the state's tensor has been freed; load where it has memory again"
    return None


def _facts_problems(own: Mapping[str, Any], checkpoint: CheckpointView, tied: Mapping[str, str]) -> list[Problem]:
    """Returns a problem for each fact that differs or is missing. A tied subclass may be stored under any own name."""
    names: dict[str, list[str]] = {}
    for fqn in own:
        owner = tied.get(outer_fqn(fqn), outer_fqn(fqn))
        names.setdefault(f"{owner}.{FACTS}", []).append(fqn)
    problems: list[Problem] = []
    for group in names.values():
        found = [fqn for fqn in group if fqn in checkpoint.tree_leaves]
        for fqn, why in ((fqn, difference(own[fqn], checkpoint.tree_leaves[fqn])) for fqn in found):
            if why is not None:
                text = f"{outer_fqn(fqn)}: tensor subclasses that differ: {why}"
                problems.append(Problem("conflict", fqn, text))
        if not found and not any(map(checkpoint.skips, group)):
            problems.append(not_stored(group[0]))
    return problems


def unbuildable(values: Mapping[str, Any], checkpoint: CheckpointView) -> dict[str, Problem]:
    """Returns a problem for each outermost subclass that cannot be built of these leaves, all by checkpoint FQN."""
    if not any(map(is_facts, values)):  # nearly always
        return {}
    parts = {fqn: _on_meta(fqn, value, checkpoint) for fqn, value in values.items()}
    found: dict[str, Problem] = {}
    for facts_fqn, reason in why_not_built(parts).items():
        fqn = checkpoint.rename(facts_fqn)
        text = f"{outer_fqn(fqn)}: a tensor subclass that cannot be built: {reason}"
        found[outer_fqn(facts_fqn)] = Problem("conflict", fqn, text)
    return found


def _on_meta(fqn: str, value: Any, checkpoint: CheckpointView) -> Any:
    """Returns the leaf of the checkpoint that has this checkpoint FQN, with a meta tensor in place of a tensor or a
    reference; None for a reference to a tensor that is not stored, or that include or exclude leave out.
    """
    if isinstance(value, TensorRef):
        tensor = checkpoint.tensors.get(checkpoint.rename(fqn))
        return None if tensor is None else placeholder(tensor)
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def partly_taken(values: Mapping[str, Any], checkpoint: CheckpointView) -> set[str]:
    """Returns the outermost subclasses, by checkpoint FQN, of which include or exclude leave out a part."""
    outer = {outer_fqn(fqn) for fqn, value in values.items() if is_facts(fqn) and are_facts(value)}
    names = [fqn for fqn in values if not checkpoint.takes(fqn)] if outer else []
    return {found[-1] for found in (enclosing(fqn, outer) for fqn in names) if found}


class SubclassState:
    """The tensor subclasses in one parameter's optimizer state, live and in a checkpoint.

    `tensors` and `plain` are what the checkpoint has by state key, as StoredOptimizer gives them.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        live: Mapping[str, Any],
        tensors: Mapping[str, tuple[str, StoredTensor]],
        plain: Mapping[str, tuple[str, Any]],
    ) -> None:
        self.own = live
        """Live state by key, subclasses taken apart: `exp_avg.codes`, `exp_avg.@subclass`."""
        if any(map(is_subclass, live.values())):
            parts = [flat_parts(key, value) if is_subclass(value) else {key: value} for key, value in live.items()]
            self.own = {key: part for of_key in parts for key, part in of_key.items()}
        self._live = live
        self._parameter = parameter
        self._tensors = tensors
        self._facts: dict[str, Any] = {}
        for name, (_, tree) in plain.items():
            found = leaves(tree, name).items()
            self._facts |= {key: leaf for key, leaf in found if is_facts(key) and are_facts(leaf)}
        is_any = self._facts or self.own is not live
        self._refused = {key.partition(".")[0] for key, _ in self.problems()} if is_any else frozenset()

    def problems(self) -> list[tuple[str, str]]:
        """Returns the state keys whose tensors cannot be filled or created, each with the reason."""
        reasons = {key: self._why_misfit(key, facts) for key, facts in self._facts.items()}
        lacking = [k for k, own in self.own.items() if is_facts(k) and are_facts(own) and k not in self._facts]
        lacks = "a tensor subclass in the state, and none in the checkpoint, or include and exclude leave out a part"
        reasons |= dict.fromkeys(lacking, lacks)
        found = [(key, reason) for key, reason in reasons.items() if reason]
        found += self._why_not_built() if not found else []
        return found + [(key, reason) for key, own in self.own.items() if (reason := self._why_unfillable(key, own))]

    def _why_not_built(self) -> list[tuple[str, str]]:
        new = {key: facts for key, facts in self._facts.items() if key not in self.own}
        if not new:
            return []
        meta = torch.device("meta")
        parts = {
            key: self.new_part(key, stored, meta, is_factor=False)
            for key, (_, stored) in self._tensors.items()
            if "." in key
        }
        return list(why_not_built({**parts, **new}, self._parameter).items())

    def _why_unfillable(self, key: str, own: Any) -> str | None:
        """Returns why the checkpoint cannot fill a live inner tensor; None if it can, or if this is none."""
        if is_facts(key) or not enclosing(key, {outer_fqn(of_key) for of_key in self._facts if of_key in self.own}):
            return None
        if key not in self._tensors:
            return "an inner tensor of the state's subclass that is not in the checkpoint"
        why = why_unfillable(own, self._tensors[key][1])
        return None if why is None else why[1]

    def _why_misfit(self, key: str, facts: Any) -> str | None:
        """Returns why the subclass with these stored facts does not fit the state; None if it fits."""
        if key in self.own:
            return difference(self.own[key], facts)
        own = self.own.get(outer_fqn(key))
        # The kind of a state without elements on this rank is unknown.
        if isinstance(own, torch.Tensor) and (not isinstance(own, DTensor) or own._local_tensor.numel()):
            return "a tensor subclass in the checkpoint, and none in the state"
        inner = {k: stored for k, (_, stored) in self._tensors.items() if k.startswith(f"{outer_fqn(key)}.")}
        meta = torch.device("meta")
        if any(self._spread(k, stored, meta) is None for k, stored in inner.items() if self._is_spread(k)):
            return "a tensor subclass whose inner tensors cannot be cut as its parameter is; take one step first"
        return None

    def takes(self, key: str) -> bool:
        """Returns True if what the checkpoint has under this key, `exp_avg.codes` say, is loaded."""
        return key.partition(".")[0] not in self._refused

    def lacks(self, key: str) -> bool:
        """Returns True if a load puts a new value under this key, `exp_avg` say. False for a live subclass, which is
        filled in place, for a refused one, and for one of which only other ranks have elements.
        """
        return self.takes(key) and f"{key}.{FACTS}" not in self.own and not self.is_elsewhere(key)

    def is_elsewhere(self, key: str) -> bool:
        """Returns True if the state of this key is a subclass on other ranks, of which this rank has no elements."""
        return f"{key}.{FACTS}" in self._facts and key in self.own

    def new_part(self, key: str, stored: StoredTensor, device: torch.device | None, *, is_factor: bool) -> torch.Tensor:
        """Returns memory for the stored tensor of this key of a parameter's state, on `device`. None stands for the
        device of the optimizer's own tensor of this shape or of the DTensor that it is cut like; without these, for the
        parameter's, or the CPU for a scalar that is no part of a subclass. A factor is not cut as its parameter,
        whatever shape it has. Strides are those of an own tensor of this shape: linear algebra gives column-major
        factors, and steps with row-major ones round otherwise.
        """
        is_inner = bool(self._enclosing(key))
        own = None if is_inner else descend(self._live, key)
        dtype, home, spread = torch_dtype(stored.dtype), target_device(self._parameter), None
        if self._is_spread(key):
            spread = self._spread(key, stored, device or home)
        elif not is_inner and (like := self._cut_like(own, stored, is_factor=is_factor)) is not None:
            spread = dtensor_like(like, stored.shape, dtype, device or target_device(like))
        if spread is not None:
            return spread
        if isinstance(own, torch.Tensor) and not isinstance(own, DTensor) and tuple(own.shape) == stored.shape:
            return torch.empty_like(own, dtype=dtype, device=device)
        return torch.empty(stored.shape, dtype=dtype, device=device or (home if stored.shape or is_inner else "cpu"))

    def _enclosing(self, key: str) -> list[Any]:
        """Returns the facts of the subclasses that a tensor is a part of, the outermost one first."""
        keys = sorted((of_key for of_key in self._facts if key.startswith(f"{outer_fqn(of_key)}.")), key=len)
        return [self._facts[of_key] for of_key in keys]

    def _is_spread(self, key: str) -> bool:
        """Returns True for a part of a subclass that has the parameter's shape, if the parameter is a DTensor."""
        outer = self._enclosing(key)
        is_like = bool(outer) and outer[0][0]["shape"] == list(self._parameter.shape)
        return is_like and isinstance(self._parameter, DTensor)

    def _cut_like(self, own: Any, stored: StoredTensor, *, is_factor: bool) -> DTensor | None:
        """Returns the DTensor that tells how to cut a stored tensor in a dict or a list: the optimizer's own one there,
        else the parameter, unless it is a factor. None where the optimizer has a whole tensor, and where neither has
        the stored shape.
        """
        is_own = isinstance(own, torch.Tensor) and (not isinstance(own, DTensor) or tuple(own.shape) == stored.shape)
        like = own if is_own else None if is_factor else self._parameter
        return like if isinstance(like, DTensor) and tuple(like.shape) == stored.shape else None

    def _spread(self, key: str, stored: StoredTensor, device: torch.device) -> DTensor | None:
        parameter = self._parameter
        if not isinstance(parameter, DTensor):
            return None
        dtype = torch_dtype(stored.dtype)
        return dtensor_like(parameter, stored.shape, dtype, device, is_table=is_table_fqn(key))
