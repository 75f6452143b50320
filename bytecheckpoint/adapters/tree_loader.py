"""Loads the tensors of a stored tree of plain data into the object whose state the tree is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, TypeGuard

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTensor, StoredTree, placeholder
from bytecheckpoint.adapters.expectation import EntryContents, Expectation, Problem, RankMissing, Scope, rank_missing
from bytecheckpoint.adapters.native.subclass_flatten import enclosing, is_facts, outer_fqn, restored
from bytecheckpoint.adapters.native.subclass_match import partly_taken, unbuildable
from bytecheckpoint.adapters.native.subclass_metadata import FACTS
from bytecheckpoint.adapters.plain.plain_data import content_fqn, encode_plain, fits_inline
from bytecheckpoint.adapters.plain.plain_tree import leaves, with_leaves
from bytecheckpoint.adapters.shard_columns import WholeTensors
from bytecheckpoint.adapters.shards import PLAIN_TENSORS, LocalShard, LocalShards, dtype_name, shares_elements
from bytecheckpoint.adapters.torch_types import DTensor, ShardedTensor
from bytecheckpoint.manifest.plain_wire import TensorRef


def is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor | ShardedTensor)


def keep_for_rank(shards: LocalShards, fqn: str, tensor: torch.Tensor) -> str | torch.Tensor:
    """Returns what stands in the tree for a tensor that may differ from rank to rank: the tensor, or an FQN of shards.

    Small ones are encoded in the tree. Large ones are added to `shards`, named by their content, so that equal tensors
    of several ranks are replicas and different ones get different names. Sharded ones are added under `fqn` itself.
    """
    if fits_inline(tensor):
        return tensor
    name = fqn if is_sharded(tensor) else content_fqn(fqn, tensor)
    shards.add(name, tensor)
    return name


def contents_of(value: Any, fqn: str, scope: Scope) -> EntryContents:
    """Returns the contents of an entry that is a tree of plain data and tensors.

    Raises CheckpointSaveError (unsupported_value) for a value that is not plain data.
    """
    shards = LocalShards()
    if scope in {"either", "rank"}:
        plain = encode_plain(value, fqn, partial(keep_for_rank, shards))
        return EntryContents(shards.found, {*leaves(value, fqn), *shards.names()}, {fqn: (scope, plain)})
    tensors: list[tuple[str, torch.Tensor]] = []
    plain = encode_plain(value, fqn, lambda name, tensor: tensors.append((name, tensor)))
    found = WholeTensors(tuple(name for name, _ in tensors), [tensor for _, tensor in tensors])
    return EntryContents(found, set(leaves(value, fqn)), {fqn: (scope, plain)})


def missing_in(values: Mapping[str, Any]) -> list[Problem]:
    """Returns a problem for each RankMissing among these values, which are by state FQN."""
    missing = {fqn: value for fqn, value in values.items() if isinstance(value, RankMissing)}
    return [rank_missing(fqn, value.num_saved) for fqn, value in missing.items()]


class UntiedTensors:
    """New memory for tensors of a state that are the same memory as another tensor of it, and of which the checkpoint
    has a value of their own.
    """

    def __init__(self) -> None:
        self._tied: dict[str, torch.Tensor] = {}
        """The state's own tensors, by FQN."""
        self._new: dict[str, torch.Tensor] = {}
        self._unequal: Collection[str] = ()

    def expect(self, values: Mapping[str, Any]) -> list[LocalShard]:
        """Selects the plain tensors and DTensors among `values`, by state FQN, which share memory with others of the
        state; forgets earlier ones. Returns their targets: before `prepare` on the meta device, then its copies.
        """
        kinds = PLAIN_TENSORS
        self._tied = {fqn: each for fqn, each in values.items() if type(each) in kinds or isinstance(each, DTensor)}
        shards = LocalShards(with_addresses=True)
        shards.add_all((fqn, self._new.get(fqn, each)) for fqn, each in self._tied.items())
        return [shard if shard.fqn in self._new else _on_meta(shard) for shard in shards.found]

    def prepare(self) -> None:
        """Copies the selected tensors: what the load does not fill is as in the state."""
        self._new = {fqn: _copy(tensor) for fqn, tensor in self._tied.items()}

    def differing(self) -> list[str]:
        """Returns the FQNs of the copies that now differ, on this rank, from the tensors of the state."""
        return [fqn for fqn, new in self._new.items() if not _have_same_bytes(new, self._tied[fqn])]

    def part(self, fqns: Collection[str]) -> None:
        """Sets the FQNs whose values differ on some rank: their copies replace tensors of the state on every rank."""
        self._unequal = fqns

    def unequal(self) -> dict[str, torch.Tensor]:
        """Returns, by FQN, the copies that take the place of tensors of the state: those that `part` has named."""
        return {fqn: new for fqn, new in self._new.items() if fqn in self._unequal}


def _on_meta(shard: LocalShard) -> LocalShard:
    return shard._replace(tensor=torch.empty_like(shard.tensor, device="meta"), address=0, owner=None, byte_length=0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    old = tensor.detach()
    is_byte = old.element_size() == 1 and not isinstance(old, DTensor)  # torch cannot copy its sub-byte integers
    new = old.view(torch.uint8).clone().view(old.dtype) if is_byte else old.clone()
    return torch.nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else new


def _have_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if this rank's elements of two tensors of one shape and dtype are equal, byte by byte."""
    local = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in (one, other)]
    plain = [tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for tensor in local]
    return torch.equal(*plain)


ABSENT = object()
"""Stands for a value that a tree must not have, and for a tree of which nothing is left."""


def _without_absent(tree: Any) -> Any:
    """Returns the tree without ABSENT and without containers of ABSENT alone; ABSENT if nothing is left. An ABSENT
    before other items of its list or tuple becomes None. Changes the tree's dicts and lists.
    """
    if isinstance(tree, dict) and tree:
        for key, item in list(tree.items()):
            tree[key] = _without_absent(item)
            if tree[key] is ABSENT:
                del tree[key]
        return tree if len(tree) else ABSENT
    if type(tree) not in (list, tuple) or not tree:
        return tree
    items = [_without_absent(item) for item in tree]
    while items and items[-1] is ABSENT:
        items.pop()
    items = [None if item is ABSENT else item for item in items]
    if type(tree) is list:
        tree[:] = items
        return tree or ABSENT
    return tuple(items) or ABSENT


class TreeTarget:
    """The targets of the tensors in a stored tree: the object's own tensors where they fit, else new ones."""

    def __init__(self) -> None:
        self._new: dict[str, torch.Tensor] = {}
        self.live: dict[str, torch.Tensor] = {}
        """The object's own tensor subclasses whose inner tensors are among its tensors, by state FQN."""
        self.unchanged: dict[str, torch.Tensor] = {}
        """Live subclasses that stay as they are, by state FQN."""
        self.own: dict[str, torch.Tensor] = {}
        """Subclasses of an object that gets new ones, by state FQN; each stays unless the new one is wholly loaded."""
        self.untied = UntiedTensors()
        """Memory for the object's own tensors that are the same memory as others."""

    def expect(self, saved: StoredTree, current: Mapping[str, Any], checkpoint: CheckpointView) -> Expectation:
        """Returns the targets of the tensors that the load takes of the tree, with claims on all of its values, and a
        problem for each subclass that cannot be built.
        """
        values = leaves(saved.tree, saved.fqn)
        problems = list(self._unbuildable(values, checkpoint).values())
        unbuilt = self.left_out(saved, checkpoint)
        skipped = {checkpoint.rename(name) for name in values if enclosing(name, unbuilt)} if unbuilt else set()
        shards, claims = self._shards(saved, current, checkpoint), set(map(checkpoint.rename, values))
        return Expectation(shards, claims, problems, skipped=skipped)

    def _shards(self, saved: StoredTree, current: Mapping[str, Any], checkpoint: CheckpointView) -> list[LocalShard]:
        """Returns the targets of the tensors of the tree; new ones are on the meta device before `prepare`."""
        shards = LocalShards(with_addresses=True)
        for name, stored in self._refs(saved, checkpoint):
            value = current.get(name)
            target = value if fits(value, stored) else self._new.get(name)
            shards.add(name, placeholder(stored) if target is None else target)
        return shards.found

    def prepare(self, saved: StoredTree, current: Mapping[str, Any], checkpoint: CheckpointView) -> None:
        for name, stored in self._refs(saved, checkpoint):
            value = current.get(name)
            if not fits(value, stored):
                device = value.device if isinstance(value, torch.Tensor) and not value.is_meta else "cpu"
                self._new[name] = torch.empty_like(placeholder(stored), device=device)

    def filled(self, saved: StoredTree, current: Mapping[str, Any], checkpoint: CheckpointView) -> Any:
        """Returns the tree with tensors in place of references; ABSENT if nothing is left. Parts that include and
        exclude leave out are as in `current`, and absent if `current` lacks them. Changes `saved.tree`.
        """
        values = leaves(saved.tree, saved.fqn)
        self._new.update(self.untied.unequal())
        unbuildable = self._unbuildable(values, checkpoint).keys()
        unbuilt = self.left_out(saved, checkpoint)
        new: dict[str, Any] = {name: self.own.get(state_fqn(name, checkpoint), ABSENT) for name in unbuilt}
        for name, value in values.items():
            state_name = checkpoint.rename(name)
            if isinstance(value, TensorRef) and state_name in self._new:
                new[name] = self._new[state_name]
            elif isinstance(value, TensorRef | RankMissing) or not checkpoint.takes(name):
                new[name] = current.get(state_name, ABSENT)
        filled = with_leaves(saved.tree, saved.fqn, new)
        if any(value is ABSENT for value in new.values()):
            filled = _without_absent(filled)
        if filled is ABSENT or not any(map(is_facts, values)):
            return filled
        subclasses = {name: state_fqn(name, checkpoint) for name in map(outer_fqn, filter(is_facts, values))}
        live = {name: self.live[own] for name, own in subclasses.items() if own in self.live}
        return restored(filled, saved.fqn, live, unbuildable=unbuildable)

    def left_out(self, saved: StoredTree, checkpoint: CheckpointView) -> set[str]:
        """Returns the checkpoint FQNs of subclasses that are not live, and of which include or exclude omit a part."""
        names = partly_taken(leaves(saved.tree, saved.fqn), checkpoint)
        return {name for name in names if state_fqn(name, checkpoint) not in self.live}

    def _unbuildable(self, values: Mapping[str, Any], checkpoint: CheckpointView) -> dict[str, Problem]:
        """Returns the problems, by checkpoint FQN, of subclasses that the load has to build and cannot: not of those
        that are live, or of which include or exclude leave out a part.
        """
        not_built = partly_taken(values, checkpoint)
        found = {name: each for name, each in unbuildable(values, checkpoint).items() if name not in not_built}
        return {name: problem for name, problem in found.items() if state_fqn(name, checkpoint) not in self.live}

    def _refs(self, saved: StoredTree, checkpoint: CheckpointView) -> list[tuple[str, StoredTensor]]:
        """Returns state FQN and stored tensor of every reference in the tree that the load takes."""
        values = leaves(saved.tree, saved.fqn)
        unbuilt = self.left_out(saved, checkpoint)
        sources = [
            name for name, value in values.items() if isinstance(value, TensorRef) and not enclosing(name, unbuilt)
        ]
        names = [name for name in map(checkpoint.rename, sources) if not enclosing(name, self.unchanged)]
        return [(name, checkpoint.tensors[name]) for name in names if name in checkpoint.tensors]


def state_fqn(fqn: str, checkpoint: CheckpointView) -> str:
    """Returns the state FQN of the subclass with this checkpoint FQN, found by renaming the FQN of its facts."""
    return outer_fqn(checkpoint.rename(f"{fqn}.{FACTS}"))


def fits(own: Any, stored: StoredTensor) -> TypeGuard[torch.Tensor]:
    """Returns True if a load can fill this object in place: a sharded tensor, or one with the stored shape and dtype
    and with strided memory that no two elements share.
    """
    if not isinstance(own, torch.Tensor) or is_sharded(own):
        return isinstance(own, torch.Tensor)
    is_same = (tuple(own.shape), dtype_name(own.dtype)) == (stored.shape, stored.dtype)
    return is_same and not own.is_meta and own.layout is torch.strided and not shares_elements(own)
