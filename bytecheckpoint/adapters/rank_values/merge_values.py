"""The values of all ranks made one, by their sum or their largest, for a load on another number of ranks."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isnan
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, placeholder
from bytecheckpoint.adapters.native.subclass_flatten import is_facts, subclasses_in
from bytecheckpoint.adapters.plain.manifest_trees import SavedByRank
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves, with_leaves
from bytecheckpoint.adapters.rank_values.generators import generators_in
from bytecheckpoint.adapters.shards import LocalShard, LocalShards, dtype_name
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn, unsupported

MergeRule: TypeAlias = Literal["sum", "max"]

_WIDER_FLOAT = {True: torch.complex128, False: torch.float64}
_NOT_COUNTED = re.compile(r"bits|float4|u?int[1-7]\Z")
"""Start of the names of dtypes that torch can neither add nor compare."""


class MergeTarget:
    """The merging of the values that all ranks saved under one FQN into one value."""

    def __init__(self, saved: SavedByRank, rule: MergeRule, checkpoint: CheckpointView) -> None:
        self._saved = saved
        self._rule: MergeRule = rule
        self._is_zero = rule == "sum" and checkpoint.rank != 0
        """True for a sum on all ranks but rank 0, which gets it: the others get zero and read nothing."""
        taken, left_out = set[str](), set[str]()
        self._taken_refs: set[str] = set()
        """FQNs under which the chunks of those tensors are stored that include and exclude let through."""
        for tree in self._trees().values():
            for name, value in leaves(tree, saved.fqn).items():
                is_taken = checkpoint.takes(name)
                (taken if is_taken else left_out).add(name)
                self._taken_refs.update([value.fqn] if is_taken and isinstance(value, TensorRef) else [])
        self._left_out = frozenset(_at_or_above(left_out) - _at_or_above(taken))
        """FQNs of the leaves, and of containers of such leaves alone, that include and exclude leave out."""
        self._stand_ins: dict[str, torch.Tensor] = {}
        """Tensors on the meta device, by the FQN under which their chunks are stored. Those that are left out too."""
        self._new: dict[str, torch.Tensor] = {}
        """Host tensors that a load fills in place of the stand-ins, by the same FQNs; empty before `prepare`."""
        self._integers: dict[str, torch.Tensor] = {}
        """Host tensors for `check_sums`, by the same FQNs; empty after it."""

    def outline(self, checkpoint: CheckpointView) -> Any:
        """Returns the merged value with tensors on the meta device for those that lie in data files. A leaf that
        include or exclude leave out is in it as one of the ranks saved it.

        Raises CheckpointMismatchError (conflict) where values of ranks cannot be merged. Sums of integers that lie in
        data files may yet be out of range: see `check_sums`.
        """
        self._stand_ins = {name: placeholder(checkpoint.tensor_of_other_rank(name)) for name in self._refs()}
        return self._merged(self._stand_ins)

    @property
    def sums_in_files(self) -> bool:
        """True if this rank sums integers that lie in data files."""
        return bool(self._summed())

    def _summed(self) -> dict[str, torch.Tensor]:
        is_summed = self._rule == "sum" and not self._is_zero
        return {name: one for name, one in self._taken_stand_ins().items() if is_summed and _is_integer(one.dtype)}

    def shards_to_sum(self) -> list[LocalShard]:
        """Returns targets, in memory that only `check_sums` uses, of the integers in data files that this rank sums."""
        self._integers = {name: torch.empty_like(one, device="cpu") for name, one in self._summed().items()}
        shards = LocalShards(with_addresses=True)
        shards.add_all(self._integers.items())
        return shards.found

    def check_sums(self) -> None:
        """Raises CheckpointMismatchError (conflict) if the sum of integers in data files is out of range of their
        dtype. Call it when `shards_to_sum` are filled, before the load changes anything.
        """
        integers, self._integers = self._integers, {}
        if integers:
            self._merged({**self._stand_ins, **integers})

    def shards(self) -> list[LocalShard]:
        """Returns the targets of all ranks' tensors that lie in data files and are not left out; on the meta device
        before `prepare`. There are none on a rank that gets zeros.
        """
        shards = LocalShards(with_addresses=True)
        if not self._is_zero:
            shards.add_all((self._new or self._taken_stand_ins()).items())
        return shards.found

    def _taken_stand_ins(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in self._stand_ins.items() if name in self._taken_refs}

    def prepare(self) -> None:
        if not self._is_zero:
            self._new = {name: torch.empty_like(one, device="cpu") for name, one in self._taken_stand_ins().items()}

    def tree(self) -> Any:
        """Returns this rank's part of the merged value of loaded tensors: all, or zeros. Raises as `check_sums`."""
        merged = self._merged({**self._stand_ins, **self._new})
        return _zeros(merged) if self._is_zero else merged

    def _trees(self) -> dict[int, Any]:
        return {rank: self._saved.tree(rank) for rank in sorted(self._saved.data)}

    def _refs(self) -> list[str]:
        found = [value for tree in self._trees().values() for value in leaves(tree, self._saved.fqn).values()]
        return sorted({value.fqn for value in found if isinstance(value, TensorRef)})

    def _merged(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        fqn = self._saved.fqn
        trees: dict[int, Any] = {}
        for rank, tree in self._trees().items():
            refs = {name: value for name, value in leaves(tree, fqn).items() if isinstance(value, TensorRef)}
            trees[rank] = with_leaves(tree, fqn, {name: tensors[ref.fqn] for name, ref in refs.items()})
        return merge(trees, fqn, self._rule, self._left_out)


def _at_or_above(names: Collection[str]) -> set[str]:
    """Returns the FQNs of these leaves and of all containers around them."""
    parts = (name.split(".") for name in names)
    return {".".join(of_name[:count]) for of_name in parts for count in range(1, len(of_name) + 1)}


def check_mergeable(value: Any, fqn: str, rule: MergeRule) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a value that a later load could not merge."""
    advice = "leave out merge, or put it into a RankLocal of its own"
    if generators_in(value, fqn):
        raise unsupported(fqn, f"a random number generator in a RankLocal with merge={rule!r}", advice)
    if subclasses_in(value, fqn):
        raise unsupported(fqn, f"a tensor subclass in a RankLocal with merge={rule!r}", advice)
    for name, leaf in leaves(value, fqn).items():
        _check_leaf(leaf, name, rule)


def _check_leaf(value: Any, fqn: str, rule: MergeRule) -> None:
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check_leaf(item, join_fqn(fqn, index), rule)
        return
    refused = bool if rule == "sum" else complex
    if refused in _number_kinds(value):
        has = "truth values have no sum" if refused is bool else "complex numbers have no largest"
        raise unsupported(fqn, f"in a RankLocal with merge={rule!r}, and {has}", "use numbers, or leave out merge")
    if _is_not_counted(value):
        what = f"a tensor of {value.dtype} in a RankLocal with merge={rule!r}, which torch cannot add or compare"
        raise unsupported(fqn, what, "use another dtype, or leave out merge")


def _is_not_counted(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _NOT_COUNTED.match(dtype_name(value.dtype)) is not None


def _number_kinds(value: Any) -> set[type]:
    """Returns which of bool and complex the value is or holds."""
    if isinstance(value, torch.Tensor):
        return {bool} if value.dtype == torch.bool else {complex} if value.is_complex() else set()
    if isinstance(value, np.ndarray | np.generic):
        return {bool} if value.dtype.kind == "b" else {complex} if value.dtype.kind == "c" else set()
    return {type(value)} & {bool, complex}


def merge(values: Mapping[int, Any], fqn: str, rule: MergeRule, left_out: Collection[str] = ()) -> Any:
    """Returns the sum or the largest of `values`, leaf by leaf: trees of numbers, tensors and arrays, by rank.

    Dicts are united by key. What is no number must be the same on all ranks. Of a leaf, or list or tuple, whose FQN is
    in `left_out` the value of the first rank stands for all.

    Raises CheckpointMismatchError (conflict), naming FQN and ranks, for values that have no sum or no largest, are not
    alike, or whose sum is out of range of their integer dtype.
    """
    kinds = {type(value) for value in values.values()}
    kind: Any = kinds.pop() if len(kinds) == 1 else None
    is_united = kind in (dict, OrderedDict, Counter)
    has_facts = is_united and any(is_facts(join_fqn(fqn, key)) for value in values.values() for key in value)
    if fqn in left_out and (has_facts or not is_united):
        return next(iter(values.values()))
    if has_facts:
        raise _refused(fqn, values, "a tensor subclass, which cannot be merged")
    if is_united:
        keys = dict.fromkeys(key for value in values.values() for key in value)
        of_keys = {key: {rank: value[key] for rank, value in values.items() if key in value} for key in keys}
        return kind({key: merge(each, join_fqn(fqn, key), rule, left_out) for key, each in of_keys.items()})
    if kind in (list, tuple):
        if len({len(value) for value in values.values()}) > 1:
            raise _refused(fqn, values, f"{kind.__name__}s of different lengths")
        columns = zip(*values.values(), strict=True)
        items = [dict(zip(values, column, strict=True)) for column in columns]
        return kind(merge(each, join_fqn(fqn, index), rule, left_out) for index, each in enumerate(items))
    return _merged_leaf(values, fqn, rule)


def _merged_leaf(values: Mapping[int, Any], fqn: str, rule: MergeRule) -> Any:
    given = list(values.values())
    refused = bool if rule == "sum" else complex
    if any(refused in _number_kinds(value) for value in given):
        raise _refused(fqn, values, f"{refused.__name__} values, which have no {rule}")
    if any(map(_is_not_counted, given)):
        raise _refused(fqn, values, "tensors of a dtype that torch cannot add or compare")
    if all(isinstance(value, torch.Tensor) for value in given):
        _refuse_unlike(values, fqn)
        return _merged_tensor(values, fqn, rule)
    if all(isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc" for value in given):
        _refuse_unlike(values, fqn)
        merged = _merged_array([np.asarray(value) for value in given], rule, lambda: _out_of_range(values, fqn))
        return merged if isinstance(given[0], np.ndarray) else merged[()]
    if all(type(value) in (bool, int, float, complex) for value in given):
        return _largest(given) if rule == "max" else sum(given)
    if len({encode_plain(value, fqn) for value in given}) > 1:
        raise _refused(fqn, values, "neither numbers nor the same on all ranks")
    return given[0]


def _largest(numbers: Sequence[Any]) -> Any:
    nans = (number for number in numbers if isinstance(number, float) and isnan(number))
    return next(nans, None) or max(numbers)  # NaN is not lost


def _refuse_unlike(values: Mapping[int, Any], fqn: str) -> None:
    if len({(str(value.dtype), tuple(value.shape)) for value in values.values()}) > 1:
        raise _refused(fqn, values, "different in shape or dtype")


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not (dtype.is_floating_point or dtype.is_complex)


def _merged_tensor(values: Mapping[int, torch.Tensor], fqn: str, rule: MergeRule) -> torch.Tensor:
    given = list(values.values())
    dtype = given[0].dtype
    if given[0].is_meta:  # `outline` needs the shape only
        return given[0]
    if dtype == torch.bool or _is_integer(dtype):
        arrays = [value.numpy() for value in given]
        return torch.from_numpy(_merged_array(arrays, rule, lambda: _out_of_range(values, fqn)).reshape(given[0].shape))
    merged = given[0].to(_WIDER_FLOAT[dtype.is_complex])
    for value in given[1:]:
        wide = value.to(merged.dtype)
        merged = merged + wide if rule == "sum" else torch.maximum(merged, wide)
    return merged.to(dtype)


def _merged_array(
    arrays: Sequence[np.ndarray], rule: MergeRule, out_of_range: Callable[[], CheckpointMismatchError]
) -> np.ndarray:
    """Returns the sum or the largest, in the dtype of the arrays. Sums of integers are exact or refused."""
    dtype, shape = arrays[0].dtype, arrays[0].shape
    if rule == "max":
        return np.asarray(np.maximum.reduce(arrays)).reshape(shape)
    if dtype.kind not in "iu":
        wide = np.complex128 if dtype.kind == "c" else np.float64
        total = np.add.reduce([array.astype(np.promote_types(dtype, wide)) for array in arrays])
        return np.asarray(total).astype(dtype).reshape(shape)
    bounds = np.iinfo(dtype)
    if not arrays[0].size or _is_sum_within(arrays, bounds):
        exact = np.zeros(shape, dtype)
        for array in arrays:
            np.add(exact, array, out=exact)
        return exact
    total = np.asarray(sum(array.astype(object) for array in arrays), dtype=object)  # Python's integers have no bounds
    if total.min() < bounds.min or total.max() > bounds.max:
        raise out_of_range()
    return total.astype(dtype).reshape(shape)


def _is_sum_within(arrays: Sequence[np.ndarray], bounds: np.iinfo) -> bool:
    """Returns True if the smallest and the largest integers alone show that each sum is within the bounds."""
    smallest, largest = (sum(int(find(array)) for array in arrays) for find in (np.min, np.max))
    return bounds.min <= smallest and largest <= bounds.max


def _zeros(value: Any) -> Any:
    """Returns the tree with zero in place of every number."""
    if isinstance(value, dict):
        return type(value)({key: _zeros(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(_zeros, value))
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iufc":
        zeros = np.zeros_like(value)
        return zeros if isinstance(value, np.ndarray) else zeros[()]
    return type(value)(0) if type(value) in (int, float, complex) else value


def _out_of_range(values: Mapping[int, Any], fqn: str) -> CheckpointMismatchError:
    dtype = str(next(iter(values.values())).dtype).removeprefix("torch.")
    return _refused(fqn, values, f"{dtype} integers whose sum is out of range of it")


def _refused(fqn: str, values: Mapping[int, Any], why: str) -> CheckpointMismatchError:
    ranks = tuple(sorted(values))
    return CheckpointMismatchError(
        f"{fqn}: the values of ranks {ranks[0]} to {ranks[-1]} of the save are {why}; load on as many ranks as have "
        "saved them, or read all values with bcp.open(path).rank_values(fqn) and merge them yourself",
        kind="conflict",
        ranks=ranks,
    )
