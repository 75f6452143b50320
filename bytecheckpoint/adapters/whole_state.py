"""The state that an optimizer keeps for a parameter that it has as it is: tensors that lie like the parameter, those
that are whole, and trees of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from bytecheckpoint.adapters.one_values import HOST_SCALARS, is_number, scalar_device
from bytecheckpoint.adapters.parameter_names import check_state_key
from bytecheckpoint.adapters.plain_data import TensorRef, join_fqn, leaves, with_leaves
from bytecheckpoint.adapters.stored import StoredTensor
from bytecheckpoint.adapters.subclasses import is_subclass, parts_of
from bytecheckpoint.adapters.tensors import PLAIN_TENSORS, LocalShards, torch_dtype, unsupported
from bytecheckpoint.errors import CheckpointSaveError


def check_has_state(fqn: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that keeps its state elsewhere than torch's do, so that none of it would be saved."""
    overrides = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    if overrides and not optimizer.state and optimizer.state_dict().get("state"):
        raise kept_elsewhere(fqn, optimizer)


def kept_elsewhere(fqn: str, optimizer: torch.optim.Optimizer) -> CheckpointSaveError:
    what = f"a {type(optimizer).__name__}, which does not keep its state in `.state`"
    return unsupported(
        fqn, what, "pass the optimizer inside it, or shard with fully_shard (FSDP2) and a torch optimizer"
    )


def collect_state(prefix: str, state: Mapping[str, Any], shards: LocalShards, fqns: list[str]) -> dict[str, Any]:
    """Adds the tensors to the shards, and their FQNs, which start with `prefix`, to these; returns the rest, with
    references.
    """
    plain: dict[str, Any] = {}
    for key, value in state.items():
        fqn = f"{prefix}{key}"
        if type(key) is not str or not key or "." in key:
            check_state_key(fqn, key)
        if type(value) in PLAIN_TENSORS or (isinstance(value, torch.Tensor) and not is_subclass(value)):
            shards.add(fqn, value)
            fqns.append(fqn)
            continue
        found = leaves(value, fqn)
        refs = {leaf: TensorRef(leaf) for leaf, tensor in found.items() if isinstance(tensor, torch.Tensor)}
        fqns += refs
        for leaf in refs:
            shards.add(leaf, found[leaf])
        plain[key] = with_leaves(_copied(value, fqn), fqn, refs)
    return plain


def becomes_number(own: Any, stored: StoredTensor) -> bool:
    """Whether a stored tensor goes to where the optimizer has a number."""
    return is_number(own) and prod(stored.shape) == 1


def new_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, stored: StoredTensor, device: str | None
) -> torch.Tensor:
    """A state tensor that lies like its parameter where it has its shape, and is whole otherwise.

    On `device`, or where the optimizer itself would have made it.
    """
    dtype = torch_dtype(stored.dtype)
    is_scalar = not stored.shape and (parameter.dim() > 0 or key in HOST_SCALARS)
    if stored.shape == tuple(parameter.shape) and not is_scalar:
        return torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    if device is None:
        home = scalar_device(optimizer, parameter) if is_scalar else parameter.device
        return torch.empty(stored.shape, dtype=dtype, device=home)
    return torch.empty(stored.shape, dtype=dtype, device=device)


def _copied(value: Any, fqn: str) -> Any:
    """The same tree in containers of its own, so that the live state is not changed. A subclass is one of its parts."""
    if isinstance(value, dict) or is_subclass(value):
        items = (value if isinstance(value, dict) else parts_of(fqn, value)).items()
        return {key: _copied(item, join_fqn(fqn, key)) for key, item in items}
    if type(value) not in (list, tuple):
        return value
    return type(value)(_copied(item, join_fqn(fqn, index)) for index, item in enumerate(value))
