"""One module of an entry: its live values, under names that wrappers do not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from bytecheckpoint.adapters.frameworks import deepspeed, fsdp1
from bytecheckpoint.adapters.frameworks.flat_parameters import FlatModule
from bytecheckpoint.adapters.native.module_walk import ModuleTree, Stage, tree_of
from bytecheckpoint.adapters.shards import PLAIN_TENSORS
from bytecheckpoint.manifest.plain_wire import join_fqn

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", fsdp1.WRAPPED})
"""Parts of names that torch.compile, activation checkpointing and FSDP1 put in."""
EXTRA_STATE = "_extra_state"


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of torch.compile, activation checkpointing and FSDP1."""
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


class ModulePart(NamedTuple):
    """One module of an entry."""

    tree: ModuleTree
    ddp_prefixes: Sequence[str]
    """Prefixes of all names inside a DistributedDataParallel, innermost ones first."""
    stage: int | None
    """Number of the pipeline stage; None if it is not known."""
    is_wrapped: bool
    """True if names in the module have prefixes of wrappers."""
    flat: FlatModule | None = None
    """Parameters that its framework keeps in flat memory; None without any."""

    def plain_name(self, name: str) -> str:
        """Returns the name of something in the module, without the prefixes of wrappers."""
        if not self.is_wrapped:
            return name
        for prefix in self.ddp_prefixes:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return plain_name(name)

    def plain_tensors(self) -> Mapping[str, torch.Tensor] | None:
        """Returns the state_dict if it has only plain tensors of the module under plain names; None otherwise."""
        if self.is_wrapped or self.flat is not None or not self.tree.is_saved_as_usual:
            return None
        values = self.tree.state_dict()
        are_plain = PLAIN_TENSORS.issuperset(map(type, values.values())) and EXTRA_STATE not in "".join(values)
        return values if are_plain else None

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """Yields (own name, plain name, value) for each item of the state_dict, except for flat parameters."""
        replaced = () if self.flat is None else self.flat.replaced
        for name, value in self.tree.state_dict().items():
            if id(value) not in replaced:
                yield name, self.plain_name(name), value


def is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def is_data(name: str, value: Any) -> bool:
    """Returns True if a value of a state_dict is extra state, or no tensor: then the module's hooks added it."""
    return not isinstance(value, torch.Tensor) or is_extra_state(name)


def part_of(fqn: str, stage: Stage) -> ModulePart:
    """Returns what is known of a stage's module. First has fully_shard put sharded parameters back in place. Raises
    CheckpointSaveError (unsupported_value) for a module of FSDP1 that cannot be read.
    """
    module = stage.module
    tree = tree_of(deepspeed.unwrapped(module) if deepspeed.is_engine(module) else module)
    is_fsdp1 = fsdp1.has_units(fqn, tree)
    if is_fsdp1:
        tree = fsdp1.walked_tree(fqn, tree)
    tree.reshard()
    wrapped = [name for name, child in tree.submodules if isinstance(child, DistributedDataParallel)]
    ddp_prefixes = sorted((f"{join_fqn(name, 'module')}." for name in wrapped), key=len, reverse=True)
    is_wrapped = bool(wrapped) or any(plain_name(name) != name for name, _ in tree.submodules)
    part = ModulePart(tree, ddp_prefixes, stage.number, is_wrapped)
    return part._replace(flat=fsdp1.flat_module(fqn, tree, part.plain_name)) if is_fsdp1 else part
