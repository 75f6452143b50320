"""Tied tensors: several names for the same memory, of which one is stored and the others are aliases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from bytecheckpoint.adapters.shards import PLAIN_TENSORS
from bytecheckpoint.adapters.torch_types import DTensor
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest.plain_wire import unsupported


def split_tied(named: Sequence[tuple[str, str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the tensors to store by FQN, and the aliases: each FQN of a tied tensor except its first -> the first,
    under which it is stored. `named` has for each tensor the module's own name, the FQN and the tensor. Raises
    CheckpointSaveError if two tensors have one FQN.
    """
    tensors = {fqn: tensor for _, fqn, tensor in named}
    addresses = [_address(tensor) for tensor in tensors.values()]
    if len(set(addresses)) == len(named):  # no two share a name, or memory: nearly always
        return tensors, {}
    tensors = {}
    aliases: dict[str, str] = {}
    owners: dict[object, str] = {}
    for (name, fqn, tensor), memory in zip(named, _memories([tensor for _, _, tensor in named]), strict=True):
        if fqn in tensors and tensors[fqn] is not tensor:
            raise _two_of_one_name(fqn, name)
        owner = owners.setdefault(memory, fqn)
        if aliases.get(fqn, owner) != owner:
            raise _two_of_one_name(fqn, name)
        if owner == fqn:
            tensors[fqn] = tensor
        else:
            aliases[fqn] = owner
    return tensors, aliases


def with_flat_ties(
    tensors: Collection[str], aliases: Mapping[str, str], flat: Collection[str], ties: Iterable[tuple[str, str]]
) -> dict[str, str]:
    """Returns `aliases` and `ties` as one dict: each alias, and the FQN that it stands for. `tensors` and `flat` are
    all FQNs that are stored. Raises CheckpointSaveError if an alias stands for two FQNs, or is itself stored.
    """
    names = {*tensors, *flat}
    found = dict(aliases)
    for alias, fqn in ties:
        if found.setdefault(alias, fqn) != fqn:
            raise _two_of_one_name(alias, alias)
    for alias in found:
        if alias in names:
            raise _two_of_one_name(alias, alias)
    return found


def _two_of_one_name(fqn: str, name: str) -> CheckpointSaveError:
    return unsupported(
        fqn,
        f"the name of two tensors, one of which the module calls {name!r}",
        "give the stages of a pipeline the names that their layers have in the whole model, pass several models as a "
        "dict instead of a list, and rename a tensor whose name differs from another one only by a wrapper's prefix",
    )


def _memories(tensors: Sequence[torch.Tensor]) -> list[object]:
    """Returns a key for each tensor, equal for tied ones: the same object, or the same elements of the same storage.

    Most tensors start at an address of their own. Only the others are looked at closely.
    """
    addresses = [_address(tensor) for tensor in tensors]
    num_at = Counter(addresses)
    both = zip(tensors, addresses, strict=True)
    return [id(tensor) if num_at[address] == 1 else _memory(tensor) for tensor, address in both]


def _address(tensor: torch.Tensor) -> int:
    local = tensor if type(tensor) in PLAIN_TENSORS or not isinstance(tensor, DTensor) else tensor._local_tensor
    return local.data_ptr() if type(local) in PLAIN_TENSORS and local.layout is torch.strided else 0


def _memory(tensor: torch.Tensor) -> object:
    """Returns a key that is equal for tied tensors. It differs for views that only start at the same place, and for the
    conjugate or the negative of a tensor, which may be a view of it.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.is_meta or local.numel() == 0 or local.layout is not torch.strided:
        return id(tensor)
    place = local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), tensor.dtype
    return *place, local.is_conj(), local.is_neg()
