"""Tensor subclasses that torch can take apart and put together (`__tensor_flatten__`, `__tensor_unflatten__`), such as
low-bit weights and optimizer states: containers of their inner tensors, by attribute, and of facts in plain data.

Also takes a DTensor whose local tensor is such a subclass: what each inner tensor is a part of follows from the lengths
of the outer tensor's part, dimension by dimension. Knows neither checkpoints nor entries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bytecheckpoint.adapters.native.subclass_metadata import (
    FACTS,
    Facts,
    are_facts,
    class_of,
    context_of,
    dtype_of,
    facts_of,
)
from bytecheckpoint.adapters.shards import PLAIN_TENSORS
from bytecheckpoint.adapters.torch_types import (
    AsyncCollectiveTensor,
    DTensor,
    DTensorSpec,
    Replicate,
    Shard,
    StridedShard,
    TensorMeta,
)
from bytecheckpoint.manifest.plain_wire import join_fqn, unsupported

_TABLES = frozenset({"qmap"})
"""Names of inner tensors that hold one table for all elements, as in torchao's low-bit optimizer states. A table is the
same on all ranks and not a part of a larger one.
"""


def is_subclass(value: object) -> bool:
    """Returns True for a tensor that names the inner tensors it is made of, and for a DTensor of such tensors. Returns
    False for an AsyncCollectiveTensor, and for nested and sparse tensors, which a save refuses.
    """
    if type(value) in PLAIN_TENSORS or not isinstance(value, torch.Tensor):
        return False
    tensor = value._local_tensor if isinstance(value, DTensor) else value
    if type(tensor) in PLAIN_TENSORS or isinstance(tensor, AsyncCollectiveTensor):
        return False
    can_be_taken_apart = bool(is_traceable_wrapper_subclass(tensor))
    # In this order, because a ShardedTensor raises when it is asked for `is_nested` and `layout`.
    return can_be_taken_apart and not tensor.is_nested and tensor.layout is torch.strided


def parts_of(fqn: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the inner tensors of a subclass by attribute, live, and its facts under FACTS. An inner tensor may be a
    subclass itself. Those of a DTensor are DTensors; one of which this rank holds no elements is left out.

    Raises CheckpointSaveError (unsupported_value) if tensors and facts in plain data do not describe it completely.
    """
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    names, context = local.__tensor_flatten__()
    parts = {name: getattr(local, name) for name in names}
    for name, inner in parts.items():
        if not isinstance(inner, torch.Tensor) or "." in name:
            what = f"a tensor subclass, {type(local).__qualname__}, whose part {name!r} is not a tensor"
            raise unsupported(fqn, what, "save the plain tensors that it is made of")
    if isinstance(tensor, DTensor):
        spread = {name: dtensor_of_part(f"{fqn}.{name}", inner, tensor) for name, inner in parts.items()}
        parts = {name: inner for name, inner in spread.items() if inner is not None}
    return {**parts, FACTS: facts_of(fqn, local, context, tensor)}


def flat_parts(fqn: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Returns plain tensors and facts of a subclass, and of all subclasses nested in it, by FQN."""
    found: dict[str, Any] = {}
    for name, part in parts_of(fqn, tensor).items():
        child = f"{fqn}.{name}"
        found |= flat_parts(child, part) if is_subclass(part) else {child: part}
    return found


def is_facts(fqn: str) -> bool:
    """Returns True if this is the FQN of the facts of a subclass, or of something to which a user gave such a name."""
    return fqn.endswith(FACTS) and fqn.rpartition(".")[2] == FACTS


def outer_fqn(facts_fqn: str) -> str:
    """Returns the FQN of the subclass whose facts these are."""
    return facts_fqn[: -len(FACTS) - 1]


def enclosing(fqn: str, outer: Collection[str]) -> list[str]:
    """Returns those of the subclasses `outer`, all FQNs, that contain this FQN and are not it, the innermost first."""
    found, name = [], fqn.rpartition(".")[0]
    while name:
        if name in outer:
            found.append(name)
        name = name.rpartition(".")[0]
    return found


def tied_subclasses(facts_fqns: Iterable[str], aliases: Mapping[str, str], own_fqns: Iterable[str]) -> dict[str, str]:
    """Maps the FQN of each tied subclass to the FQN of the subclass that has all of its inner tensors."""
    outer = {outer_fqn(fqn) for fqn in facts_fqns}
    if not outer or not aliases:
        return {}
    owners: dict[str, set[str]] = {}
    for alias, fqn in aliases.items():
        for name in enclosing(alias, outer):
            path = alias.removeprefix(name)
            owners.setdefault(name, set()).add(fqn.removesuffix(path) if fqn.endswith(path) else "")
    has_own = {name for fqn in own_fqns for name in enclosing(fqn, outer)}
    single = {name: next(iter(found)) for name, found in owners.items() if len(found) == 1 and name not in has_own}
    return {name: owner for name, owner in single.items() if owner in outer}


def with_new_memory(tensor: torch.Tensor, allocate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a new tensor of the same subclass and context; `allocate` makes each inner tensor from the old one."""
    if isinstance(tensor, DTensor):
        local = with_new_memory(tensor._local_tensor, allocate)
        return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)  # type: ignore[no-untyped-call]
    subclass: Any = tensor
    names, context = subclass.__tensor_flatten__()
    inner = {name: getattr(subclass, name) for name in names}
    new = {key: with_new_memory(part, allocate) if is_subclass(part) else allocate(part) for key, part in inner.items()}
    built: torch.Tensor = type(subclass).__tensor_unflatten__(new, context, tensor.size(), tensor.stride())
    return built


def subclasses_in(value: Any, fqn: str) -> dict[str, torch.Tensor]:
    """Returns the tensors for which `is_subclass` holds in nested dicts, lists and tuples, by FQN."""
    if is_subclass(value):
        return {fqn: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
    return {name: found for key, item in items for name, found in subclasses_in(item, join_fqn(fqn, key)).items()}


def restored(
    tree: Any,
    fqn: str,
    live: Mapping[str, torch.Tensor] = MappingProxyType({}),
    like: torch.Tensor | None = None,
    unbuildable: Collection[str] = (),
) -> Any:
    """Returns the tree with every subclass in it built of its parts, or taken from the `live` ones, which have been
    filled.

    Dicts and lists are changed in place. A subclass whose parts are DTensors is built as a DTensor with the
    placements of `like`. The `unbuildable` ones stay dicts of their parts. `live` and `unbuildable` go by the FQNs that
    subclasses have in this tree, which begins at `fqn`.
    """
    if fqn in unbuildable:
        return tree
    if isinstance(tree, dict):
        if are_facts(tree.get(FACTS)) and fqn in live:
            return live[fqn]
        for key, item in tree.items():
            tree[key] = item if key == FACTS else restored(item, join_fqn(fqn, key), live, like, unbuildable)
        return _built(tree, like) if are_facts(tree.get(FACTS)) else tree
    if type(tree) not in (list, tuple):
        return tree
    items = [restored(item, join_fqn(fqn, index), live, like, unbuildable) for index, item in enumerate(tree)]
    if type(tree) is tuple:
        return tuple(items)
    tree[:] = items
    return tree


def why_not_built(values: Mapping[str, Any], like: torch.Tensor | None = None) -> dict[str, str]:
    """Tries to build the subclasses whose facts and inner tensors are among these leaves; the tensors are on the meta
    device, `like` is as in `restored`. Returns the reason for each outermost one that cannot be built, by the FQN of
    its facts.
    """
    facts = {outer_fqn(fqn): value for fqn, value in values.items() if is_facts(fqn) and are_facts(value)}
    parts: dict[str, dict[str, Any]] = {fqn: {} for fqn in facts}
    for fqn, value in values.items():
        parent, _, name = fqn.rpartition(".")
        if parent in facts:
            parts[parent][name] = value
    reasons: dict[str, str] = {}
    for fqn in sorted(facts, key=len, reverse=True):  # the inner ones first
        built = _try_build(parts[fqn], like)
        parent, _, name = fqn.rpartition(".")
        if parent in facts:
            parts[parent][name] = built
        elif isinstance(built, str):
            reasons[f"{fqn}.{FACTS}"] = built
    return reasons


def _try_build(parts: Mapping[str, Any], like: torch.Tensor | None) -> torch.Tensor | str:
    """Returns the subclass made of these parts, or the reason why it cannot be made."""
    for name, part in parts.items():
        if isinstance(part, str):
            return part
        if name != FACTS and not isinstance(part, torch.Tensor):
            return f"its part {name} is not a tensor"
    try:
        built = _built(parts, like)
    except LookupError as error:
        return str(error.args[0]) if type(error) is LookupError else repr(error)
    except Exception as error:  # noqa: BLE001  what a class makes of a damaged checkpoint may be anything
        return repr(error)
    facts: Facts = parts[FACTS]
    if tuple(built.shape) != tuple(facts[0]["shape"]) or built.dtype != dtype_of(facts):
        shown = f"{dtype_of(facts)} {facts[0]['shape']}"
        return f"its inner tensors make a {built.dtype} {list(built.shape)} of what was a {shown}"
    return built


def _built(parts: Mapping[str, Any], like: torch.Tensor | None) -> torch.Tensor:
    """Builds one subclass of its inner tensors and facts; `like` is as in `restored`. Raises what its class raises."""
    facts: Facts = parts[FACTS]
    inner = {name: part for name, part in parts.items() if name != FACTS}
    shape, stride = torch.Size(facts[0]["shape"]), tuple(facts[0]["stride"])
    device = next((part.device for part in inner.values()), torch.device("cpu"))
    outer = None
    if isinstance(like, DTensor) and all(isinstance(part, DTensor) for part in inner.values()):
        outer = dtensor_like(like, shape, dtype_of(facts), device)
    if outer is None:
        return _unflattened(inner, facts, shape, stride, device)
    if outer.device_mesh.get_coordinate() is None:
        return outer
    shape = outer._local_tensor.shape
    inner = {name: part._local_tensor for name, part in inner.items()}
    try:
        local = _unflattened(inner, facts, shape, dense_stride(shape, stride), device)
    except Exception:
        if outer._local_tensor.numel():
            raise
        return outer  # many classes cannot be made of nothing
    return DTensor(local, outer._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _unflattened(
    inner: Mapping[str, Any], facts: Facts, shape: torch.Size, stride: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    built: torch.Tensor = class_of(facts).__tensor_unflatten__(inner, context_of(facts, shape, device), shape, stride)
    return built


def dtensor_like(
    outer: DTensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, is_table: bool = False
) -> DTensor | None:
    """Returns an uninitialised DTensor of this global shape that is cut along the dimensions of `outer`, in the same
    proportions; replicated if `is_table`.

    None where that does not give whole numbers of elements, where blocks of quantized elements do not end where the
    parts of ranks end, and where a tensor of this shape cannot be cut as `outer` is.
    """
    sharded = set() if is_table else _sharded_dims(outer)
    if sharded is None or not _can_follow(len(shape), outer, sharded):
        return None
    lengths = list(shape)
    if outer.device_mesh.get_coordinate() is None:
        lengths, sharded = [0], set()
    for dim in sharded:
        lengths[dim], remainder = divmod(shape[dim] * outer._local_tensor.shape[dim], max(outer.shape[dim], 1))
        if remainder or not _divides_evenly(outer, dim, shape[dim]):
            return None
    local = torch.empty(lengths, dtype=dtype, device=device)
    return _as_dtensor(local, torch.Size(shape), outer, is_table=is_table)


def is_table_fqn(fqn: str) -> bool:
    """Returns True if the inner tensor of this FQN is a table, which every rank has whole and alike."""
    return fqn.rpartition(".")[2] in _TABLES


def dtensor_of_part(fqn: str, inner: torch.Tensor, outer: DTensor) -> DTensor | None:
    """Returns an inner tensor as a part of its own global tensor; None if this rank holds no elements of it. Raises
    CheckpointSaveError (unsupported_value) if its region there is unknown.
    """
    if is_table_fqn(fqn):
        return _as_dtensor(inner, inner.shape, outer, is_table=True)
    sharded, local = _sharded_dims(outer), outer._local_tensor
    shape: list[int] | None = None
    if sharded is not None and _can_follow(inner.dim(), outer, sharded):
        if any(local.shape[dim] == 0 for dim in sharded):
            return None
        ratios = {dim: divmod(inner.shape[dim] * outer.shape[dim], local.shape[dim]) for dim in sharded}
        are_whole = not any(remainder for _, remainder in ratios.values())
        if are_whole and all(_divides_evenly(outer, dim, length) for dim, (length, _) in ratios.items()):
            shape = [ratios[dim][0] if dim in sharded else length for dim, length in enumerate(inner.shape)]
    if shape is None:
        what = f"part of a DTensor, {list(inner.shape)} for {list(local.shape)} of {list(outer.shape)}"
        what += f" with placements {outer.placements}, so that its region in the global tensor is unknown"
        raise unsupported(fqn, what, "shard along dimensions that it has, in multiples of its blocks")
    return _as_dtensor(inner, torch.Size(shape), outer, is_table=False)


def _sharded_dims(outer: DTensor) -> set[int] | None:
    """Returns the dimensions along which a DTensor is cut; None if a placement cuts in another way."""
    cuts = [placement for placement in outer.placements if not isinstance(placement, Replicate)]
    dims = {placement.dim for placement in cuts if isinstance(placement, Shard | StridedShard)}
    return dims if all(isinstance(placement, Shard | StridedShard) for placement in cuts) else None


def _can_follow(num_dims: int, outer: DTensor, sharded: set[int]) -> bool:
    """Returns True if a tensor of `num_dims` dimensions can be cut along the dimensions `sharded` of `outer`: there are
    none, or it has as many dimensions as `outer`, or it has any and only the first one is in `sharded`.
    """
    return not sharded or num_dims == outer.dim() or (num_dims > 0 and sharded == {0})


def _divides_evenly(outer: DTensor, dim: int, length: int) -> bool:
    """Returns True if the outer tensor is not cut along `dim`, or one of its length there and that of an inner tensor,
    `length`, divides the other. Else a block may be cut, also where this rank has a whole number of them: 6 rows with 4
    scales would be twice a block of two rows and a short block.
    """
    if outer._local_tensor.shape[dim] == outer.shape[dim]:  # not cut
        return True
    shorter, longer = sorted((outer.shape[dim], length))
    return not shorter or longer % shorter == 0


def _as_dtensor(local: torch.Tensor, shape: torch.Size, outer: DTensor, *, is_table: bool) -> DTensor:
    """Wraps the local part of a tensor of this shape: replicated if `is_table`, else with the placements of `outer`."""
    placements = tuple(Replicate() for _ in outer.placements) if is_table else outer.placements
    meta = TensorMeta(shape, dense_stride(shape, range(len(shape), 0, -1)), local.dtype)
    spec = DTensorSpec(outer.device_mesh, placements, tensor_meta=meta)
    # Not from_local, which may copy to another device.
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Returns the stride of a tensor without gaps. Its dimensions lie in memory in the order of falling `order`, the
    stride of another tensor.
    """
    stride = [0] * len(shape)
    dims = sorted(range(len(shape)), key=lambda dim: (-order[dim], dim))
    for at, dim in enumerate(dims):
        stride[dim] = prod(max(shape[other], 1) for other in dims[at + 1 :])
    return tuple(stride)
