"""Tensors and plain data in nested dicts, lists and tuples: filled in place, down to the leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from bytecheckpoint.adapters.checkpoint_view import PER_RANK_NAME, CheckpointView, StoredTree
from bytecheckpoint.adapters.expectation import (
    EntryContents,
    Expectation,
    Problem,
    RankMissing,
    not_stored,
    rank_missing,
)
from bytecheckpoint.adapters.native.subclass_flatten import is_facts, is_subclass
from bytecheckpoint.adapters.native.subclass_match import refusals
from bytecheckpoint.adapters.native.subclass_metadata import are_facts
from bytecheckpoint.adapters.optimizers.forms import Form, forms_in
from bytecheckpoint.adapters.plain.plain_data import encode_refs
from bytecheckpoint.adapters.plain.plain_tree import leaves, with_leaves
from bytecheckpoint.adapters.shard_columns import WholeTensors
from bytecheckpoint.adapters.shards import (
    PLAIN_TENSORS,
    LocalShard,
    LocalShards,
    dtype_name,
    has_all_memory,
    shares_elements,
)
from bytecheckpoint.adapters.torch_types import loaded_dtensor
from bytecheckpoint.adapters.tree_loader import ABSENT, TreeTarget, UntiedTensors, contents_of, missing_in
from bytecheckpoint.manifest.plain_wire import TensorRef, is_at_or_below, join_fqn


class PlainEntry:
    """Tensors and plain data in nested dicts, lists and tuples, or a tensor or value that stands alone."""

    def __init__(self, fqn: str, value: Any, assign: Callable[[Any], None] | None) -> None:
        """`assign` puts another value in the place of this one; None where it stands in a tuple."""
        self.fqn = fqn
        self._value = value
        self._assign = assign
        self._adopted = TreeTarget()
        self.untied = UntiedTensors()
        self._skipped: set[str] = set()
        self._is_filled_in_place = False
        """True if all of it is tensors that are filled where they are."""
        self._may_differ = fqn.partition(".")[0] == PER_RANK_NAME

    def collect(self) -> EntryContents:
        shards = LocalShards()
        if isinstance(self._value, torch.Tensor) and not self._may_differ and not is_subclass(self._value):
            shards.add(self.fqn, self._value)
            return EntryContents(shards.found, {self.fqn})
        if not self._may_differ and _holds_tensors_only(self._value) and self.fqn:
            fqns, names, plain = encode_refs(self.fqn, tuple(self._value))
            shards_of_all = WholeTensors(fqns, list(self._value.values()))
            return EntryContents(shards_of_all, names, {self.fqn: ("shared", plain)})
        return contents_of(self._value, self.fqn, "either" if self._may_differ else "shared")

    def optimizer_forms(self) -> Mapping[str, Form]:
        """Returns, by state FQN, the form of each optimizer state in this value: nested or flat, as
        torch.distributed.checkpoint gives it, or numbered.
        """
        return forms_in(self._value, self.fqn)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the state FQN and the tensor of each tensor that ranks share."""
        for fqn, value in leaves(self._value, self.fqn, may_repeat=True).items():
            if isinstance(value, torch.Tensor) and not self._may_differ:
                yield fqn, value

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        self.untied.expect({})
        shards = LocalShards(with_addresses=True)
        refs = checkpoint.tensor_dicts.get(self.fqn)
        if refs is not None and _holds_plain_tensors(self._value) and self._value.keys() <= refs.keys():
            shards.add_all(zip(map(refs.__getitem__, self._value), self._value.values(), strict=True))
            self._is_filled_in_place = True
            return Expectation(shards.found, set(), [])
        values = leaves(self._value, self.fqn)
        others = (
            {}
            if PLAIN_TENSORS.issuperset(map(type, values.values()))
            else {fqn: value for fqn, value in values.items() if type(value) not in PLAIN_TENSORS}
        )
        facts = {fqn: value for fqn, value in others.items() if is_facts(fqn) and are_facts(value)}
        refused = refusals(values if facts else {}, checkpoint)
        # One look-up tells whether a leaf is a plain tensor here and in the checkpoint: nearly all of a state is.
        simple = {} if facts or not checkpoint.takes_all else checkpoint.tree_leaves
        expectation = Expectation(shards.found, set(facts), refused.problems, skipped=self._skipped)
        tensors: list[tuple[str, torch.Tensor]] = []
        if simple and not others and {TensorRef}.issuperset(map(type, map(simple.get, values))):
            shards.add_all(values.items())
            return expectation
        for fqn, value in values.items():
            if type(simple.get(fqn)) is TensorRef and type(value) in PLAIN_TENSORS:
                tensors.append((fqn, value))
                continue
            if fqn in facts:
                continue
            if _is_left_out(value, fqn, checkpoint):
                self._skipped.add(fqn)
                continue
            expectation.claims.add(fqn)
            if refused.has(fqn):
                missing = checkpoint.missing_at(fqn)
                expectation.claims.update([] if missing is None else [missing[0]])
                continue
            is_stored_tensor = type(value) in PLAIN_TENSORS and type(checkpoint.tree_leaves.get(fqn)) is TensorRef
            if is_stored_tensor or not self._expect_other(fqn, value, checkpoint, expectation):
                tensors.append((fqn, value))
        shards.add_all(tensors)
        return expectation

    def _expect_other(self, fqn: str, value: Any, checkpoint: CheckpointView, expectation: Expectation) -> bool:
        """Adds a leaf to the expectation. Returns False, and adds nothing, if the leaf needs only one stored tensor."""
        missing = checkpoint.missing_at(fqn)
        adopted = _adopted(value, fqn, checkpoint)
        if adopted is not None:
            names = {checkpoint.rename(name): leaf for name, leaf in leaves(adopted.tree, adopted.fqn).items()}
            of_tree = self._adopted.expect(adopted, {}, checkpoint)
            expectation.shards.extend(of_tree.shards)
            expectation.problems.extend(missing_in(names) + of_tree.problems)
            expectation.claims.update(names)
            self._skipped.update(of_tree.skipped)
        elif missing is not None:
            expectation.problems.append(rank_missing(fqn, missing[1].num_saved))
            expectation.claims.add(missing[0])
        elif isinstance(value, torch.Tensor) and not isinstance(checkpoint.tree_leaves.get(fqn), torch.Tensor):
            return False
        else:
            expectation.problems.extend(_problems(fqn, value, checkpoint))
        return True

    def expect_untied(self, fqns: Collection[str]) -> list[LocalShard]:
        """Returns targets in new memory for these tensors of the state; see `UntiedTensors`."""
        if self._assign is None and isinstance(self._value, torch.Tensor):
            return []
        values = leaves(self._value, self.fqn)
        return self.untied.expect({fqn: values[fqn] for fqn in fqns if fqn in values})

    def prepare(self, checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        self.untied.prepare()
        for fqn, value in leaves(self._value, self.fqn).items():
            adopted = _adopted(value, fqn, checkpoint)
            if adopted is not None:
                self._adopted.prepare(adopted, {}, checkpoint)

    def finish(self, checkpoint: CheckpointView) -> None:
        new: dict[str, Any] = {**self.untied.unequal()}
        if self._is_filled_in_place and not new:
            return
        for fqn, value in leaves(self._value, self.fqn).items():
            if type(value) in PLAIN_TENSORS and fqn in checkpoint.tensors:  # already filled in place
                continue
            if (is_facts(fqn) and are_facts(value)) or checkpoint.skips(fqn):
                continue
            adopted = _adopted(value, fqn, checkpoint)
            if adopted is not None:
                # First, because `filled` changes the tree.
                partial_subclasses = self._adopted.left_out(adopted, checkpoint)
                filled = self._adopted.filled(adopted, {}, checkpoint)
                if isinstance(filled, torch.Tensor):  # a subclass stood there
                    new[fqn] = filled
                elif isinstance(filled, list):
                    value[:] = filled
                elif filled is not ABSENT:
                    value.update(_taken(filled, adopted.fqn, checkpoint, partial_subclasses))
            elif fqn in checkpoint.tensors or _problems(fqn, value, checkpoint):
                continue
            elif not _filled_in_place(value, checkpoint.tree_leaves[fqn]):
                new[fqn] = checkpoint.tree_leaves[fqn]
        if new:
            tree = with_leaves(self._value, self.fqn, new)
            if self._assign is not None:
                self._assign(tree)


class BareTensorsEntry(PlainEntry):
    """The tensors that stand alone in a state, as in a module's state_dict() that is the state: there may be 100,000,
    and an entry for each would cost more than its bytes.
    """

    def __init__(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """`tensors` are those of `state`, by state FQN."""
        super().__init__("", tensors, self._put)
        self._state = state
        self.fqns = tensors.keys()

    def _put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts those of these tensors into the state that are others now, one by one: it may be a subclass of dict."""
        for fqn, tensor in tensors.items():
            if self._state[fqn] is not tensor:
                self._state[fqn] = tensor

    def collect(self) -> EntryContents:
        return EntryContents(WholeTensors(tuple(self._value), [*self._value.values()]), set(self.fqns))

    def optimizer_forms(self) -> Mapping[str, Form]:
        return {}

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        if not checkpoint.takes_all or checkpoint.missing or not checkpoint.tree_leaves.keys().isdisjoint(self.fqns):
            return super().expect(checkpoint)
        self.untied.expect({})
        self._is_filled_in_place = True
        shards = LocalShards(with_addresses=True)
        shards.add_all(self._value.items())
        return Expectation(shards.found, set(self.fqns), [])  # a DTensor may have no shard on this rank


def bare_tensors(state: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors that stand alone in a state, without those that may differ from rank to rank."""
    return {
        key: value
        for key, value in state.items()
        if type(key) is str and key and _is_simple(value) and key.partition(".")[0] != PER_RANK_NAME
    }


def roots_of(entries: Iterable[Any]) -> set[str]:
    """Returns the state FQNs at or below which all names of the entries are."""
    each = (entry.fqns if isinstance(entry, BareTensorsEntry) else (entry.fqn,) for entry in entries)
    return set(chain.from_iterable(each))


def _is_simple(value: Any) -> bool:
    return type(value) in PLAIN_TENSORS or (type(value) is loaded_dtensor() and not is_subclass(value))


def _holds_tensors_only(value: Any) -> bool:
    """Returns True for a dict, not empty, from str to plain tensors and DTensors of them: many states are such."""
    if type(value) is not dict or not value or set(map(type, value)) != {str}:
        return False
    others = set(map(type, value.values())) - PLAIN_TENSORS
    return not others or (others == {loaded_dtensor()} and not any(map(is_subclass, value.values())))


def _holds_plain_tensors(value: Any) -> bool:
    return type(value) is dict and bool(value) and PLAIN_TENSORS.issuperset(map(type, value.values()))


def _adopted(value: Any, fqn: str, checkpoint: CheckpointView) -> StoredTree | None:
    """Returns the stored dict, or list with tensors, that an empty dict or list of the state takes over; else None."""
    kind = dict if isinstance(value, dict) else list
    is_empty = kind is dict or (type(value) is list and not value and fqn not in checkpoint.tree_leaves)
    found = checkpoint.subtree(fqn) if is_empty else None
    if found is None or not isinstance(found.tree, kind):
        return None
    if isinstance(found.tree, dict):
        return found._replace(tree=_renamed_below(fqn, found.tree, found.fqn, checkpoint))
    return found


def _renamed_below(target: str, tree: dict[Any, Any], fqn: str, checkpoint: CheckpointView) -> dict[Any, Any]:
    """Returns the dict of this checkpoint FQN without what is not renamed to the state FQN `target` or below it."""
    if not checkpoint.is_renamed:
        return tree
    kept = {}
    for key, item in tree.items():
        child = join_fqn(fqn, key)
        if any(is_at_or_below(checkpoint.rename(name), {target}) for name in leaves(item, child)):
            is_dict = isinstance(item, dict) and bool(item)
            kept[key] = _renamed_below(target, item, child, checkpoint) if is_dict else item
    return type(tree)(kept)


def _is_left_out(value: Any, fqn: str, checkpoint: CheckpointView) -> bool:
    """Returns True if include or exclude leave out this leaf of the state; for an empty dict or list that takes over a
    stored one, also if they leave out all of that.
    """
    adopted = _adopted(value, fqn, checkpoint)
    # First, as no glob is of use that names only what contains names that are left out.
    return (adopted is not None and not adopted.is_taken) or checkpoint.skips(fqn)


def _problems(fqn: str, value: Any, checkpoint: CheckpointView) -> list[Problem]:
    """Returns why the stored plain data of this FQN, small tensors included, cannot take the place of `value`; an empty
    list if it can.
    """
    found = checkpoint.tree_leaves.get(fqn)
    if isinstance(found, RankMissing):
        return missing_in({fqn: found})
    if fqn in checkpoint.tensors or isinstance(found, TensorRef):
        return [Problem("missing_key", fqn, f"{fqn}: a tensor in the checkpoint, plain data in the state")]
    if fqn not in checkpoint.tree_leaves:
        what = "has names below it in the checkpoint, as a list with a tensor has; in the state it is plain data alone"
        is_container = fqn in checkpoint.containers
        return [Problem("missing_key", fqn, f"{fqn}: {what}") if is_container else not_stored(fqn)]
    if not isinstance(value, torch.Tensor):
        return []
    if not isinstance(found, torch.Tensor):
        return [Problem("missing_key", fqn, f"{fqn}: plain data in the checkpoint, a tensor in the state")]
    if value.shape != found.shape:
        text = f"{fqn}: shape {list(found.shape)} in the checkpoint, {list(value.shape)} in the state"
        return [Problem("shape", fqn, text)]
    if value.dtype != found.dtype:
        name, own_name = dtype_name(found.dtype), dtype_name(value.dtype)
        text = f"{fqn}: dtype {name} in the checkpoint, {own_name} in the state (small tensors here are not cast)"
        return [Problem("dtype", fqn, text)]
    if value.is_meta or shares_elements(value) or not has_all_memory(value):
        text = f"{fqn}: the state's tensor is on the meta device, expanded, or freed; give it memory of its own"
        return [Problem("conflict", fqn, text)]
    return []


def _taken(
    tree: dict[Any, Any], fqn: str, checkpoint: CheckpointView, partial_subclasses: Collection[str]
) -> dict[Any, Any]:
    """Returns the dict without what include and exclude leave out, the subclasses in `partial_subclasses` (see
    `TreeTarget.left_out`) included, and without what this rank has no value for.
    """
    taken = {}
    for key, item in tree.items():
        child = join_fqn(fqn, key)
        names = map(checkpoint.rename, filter(checkpoint.takes, leaves(item, child)))
        is_any = any(not isinstance(checkpoint.tree_leaves.get(name), RankMissing) for name in names)
        if is_any and child not in partial_subclasses:
            taken[key] = _taken(item, child, checkpoint, partial_subclasses) if type(item) is dict else item
    return taken


def _filled_in_place(value: Any, stored: Any) -> bool:
    """Copies a stored value into the state's own object, to which other code may hold references. Returns False, with
    nothing changed, if that is impossible.

    The caller has to check with `_problems` that two tensors have one shape and dtype: torch would broadcast or cast.
    """
    if isinstance(value, torch.Tensor) and isinstance(stored, torch.Tensor):
        target = value.detach()
        if target.element_size() == 1:  # torch cannot copy its sub-byte integers
            stored, target = stored.view(torch.uint8), target.view(torch.uint8)
        target.copy_(stored)
    elif isinstance(value, np.ndarray) and isinstance(stored, np.ndarray) and value.flags.writeable:
        if (value.shape, value.dtype) != (stored.shape, stored.dtype):
            return False
        value[...] = stored
    elif type(value) is list and type(stored) is list:
        value[:] = stored
    else:
        return False
    return True
