"""FullyShardedDataParallel (FSDP1): modules that have it anywhere, with any strategy and with use_orig_params or not.

Each wrapped unit lays its parameters one after the other into a flat parameter, in the order of its modules: with
use_orig_params each begins at a multiple of 16 bytes, padding before it. The flat parameter is cut into equal chunks,
one for each rank that shards, zeros after the last. A rank's chunk, its local shard, is in full precision whatever the
unit computes in, and stays where it is while parameters are gathered; it is what is saved and filled. An optimizer has
the flat parameters themselves, or with use_orig_params one-dimensional views of the local shard. So nothing here
communicates, and no method of such a module that does is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.frameworks.flat_parameters import (
    FlatModule,
    FlatParamMemory,
    FlatParamPart,
    NamedPart,
    part_of_whole,
)
from bytecheckpoint.adapters.native.module_walk import ModuleTree
from bytecheckpoint.adapters.torch_types import FullyShardedDataParallel
from bytecheckpoint.manifest.plain_wire import join_fqn, unsupported
from bytecheckpoint.region import whole

WRAPPED = "_fsdp_wrapped_module"
"""The name of a wrapped module in its wrapper, which stands in the names of all in it."""
_HOOKS = "torch.distributed.fsdp."
"""Prefix of the modules with the hooks by which the wrapper gathers parameters for a state_dict."""

_MIDDLE_OF_BACKWARD = {"BACKWARD_PRE", "BACKWARD_POST"}
"""Names of torch's states of a unit."""


class _FsdpUnit(NamedTuple):
    """A wrapper with parameters, torch's handle of their layout, and the memory of this rank's shard of them. torch
    gives no public access: its own state_dict reads these.
    """

    wrapper: Any
    handle: Any
    """torch's FlatParamHandle."""
    memory: torch.Tensor
    """The local shard."""


_Position = tuple[int, int]
"""Index of a parameter's unit, and index of the parameter in that unit."""


def has_units(fqn: str, tree: ModuleTree) -> bool:
    """Returns True if a module of the tree is a wrapper of FSDP1.

    Raises CheckpointSaveError (unsupported_value) if a wrapper outside of the tree keeps parameters of the tree flat.
    """
    wrappers = [module for _, module in tree.submodules if isinstance(module, FullyShardedDataParallel)]
    wrapped = {id(module) for wrapper in wrappers for module in wrapper.modules()}
    for name, module in tree.submodules:
        # torch marks modules for its compiler, also those of FSDP2.
        if "_is_fsdp_managed_module" not in module.__dict__ or id(module) in wrapped:
            continue
        if not module._fsdp_use_orig_params or any(map(is_flattened, module._parameters.values())):
            what = "a module of an FSDP1 model without its wrapper, which has its parameters"
            raise unsupported(join_fqn(fqn, name).removesuffix("."), what, "pass the wrapped model")
    return bool(wrappers)


def is_flattened(parameter: torch.Tensor | None) -> bool:
    """Returns True for a flat parameter, or a parameter that is a view of a part of a flat parameter."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def shows_parameter(parameter: torch.Tensor) -> bool:
    """Returns True for a view of a part of a flat parameter that FSDP1 shows as one parameter (`use_orig_params`)."""
    return is_flattened(parameter) and not getattr(parameter, "_is_flat_param", False)


def walked_tree(fqn: str, tree: ModuleTree) -> ModuleTree:
    """Returns the tree without the methods that gather parameters.

    Raises CheckpointSaveError (unsupported_value) where modules save more than a walk finds, and for tensors on the
    meta device.
    """
    for name, how in tree.own_saving(_HOOKS):
        advice = "save what it adds to the state_dict through get_extra_state(), or use fully_shard (FSDP2)"
        where = join_fqn(fqn, name).removesuffix(".")
        raise unsupported(where, f"a {how} in an FSDP1 model, whose state_dict() would gather", advice)
    walked = tree.walked()
    for name, module in tree.submodules:
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta:
                advice = "give it memory first: to_empty(), or param_init_fn of FullyShardedDataParallel"
                raise unsupported(join_fqn(fqn, join_fqn(name, own)), "on the meta device in an FSDP1 model", advice)
    return walked


def flat_module(fqn: str, tree: ModuleTree, plain_name: Callable[[str], str]) -> FlatModule:
    """Returns the flat parameters of all units of a module. `plain_name` takes wrappers' prefixes out of a name.

    Has FSDP1 make the sharded flat parameters the current ones, and write back to them what parameters that were given
    other memory hold. Raises CheckpointSaveError (unsupported_value) within summon_full_params, in the middle of a
    backward pass, and where the elements of a parameter cannot be located or written back.
    """
    wrappers = {id(module): module for _, module in tree.submodules if isinstance(module, FullyShardedDataParallel)}
    for wrapper in wrappers.values():
        _refuse_summoned(fqn, wrapper)
    units = [_unit(fqn, wrapper) for wrapper in wrappers.values() if wrapper._handle is not None]
    names: dict[_Position, dict[str, None]] = {}
    for position, name, _ in _places(tree, units):
        names.setdefault(position, {})[plain_name(name)] = None
    held: list[FlatParamMemory] = []
    in_optimizer: dict[int, list[NamedPart]] = {}
    for number, unit in enumerate(units):
        flat = unit.handle.flat_param
        for index, path in enumerate(flat._fqns):
            if (number, index) not in names:
                what = f"an FSDP1 model that has lost its parameter {path}"
                raise unsupported(fqn, what, "wrap the model as it is now")
            name = next(iter(names[number, index]))
            part = _part(join_fqn(fqn, name), flat, index)
            held.append(FlatParamMemory(name, part, unit.memory))
            if flat._params is None:
                in_optimizer.setdefault(id(flat), []).append(NamedPart(name, part))
            else:
                in_optimizer[id(flat._params[index])] = [NamedPart(name, part._replace(position=0))]
    for unit in units:
        _take_over(fqn, unit.handle)
    replaced = {id(tensor) for _, _, tensor in _places(tree, units) if tensor is not None}
    for flat in (unit.handle.flat_param for unit in units):
        replaced |= {id(tensor) for tensor in (flat, *(flat._params or ()), *(flat._shared_params or ()))}
    buffers = _lowered_buffers(tree, wrappers.values(), plain_name)
    return FlatModule(
        held=held + [lowered.held for lowered in buffers],
        replaced=replaced | {id(lowered.buffer) for lowered in buffers},
        aliases={alias: first for first, *others in names.values() for alias in others},
        in_optimizer=in_optimizer,
        finish=partial(_finish, units, buffers),
    )


def _refuse_summoned(fqn: str, wrapper: Any) -> None:
    states = [wrapper.training_state, *([] if wrapper._handle is None else [wrapper._handle._training_state])]
    if any(state.name == "SUMMON_FULL_PARAMS" for state in states):
        advice = "call save and load outside of it: they need no gathered parameters"
        raise unsupported(fqn, "an FSDP1 model within summon_full_params", advice)


def _unit(fqn: str, wrapper: Any) -> _FsdpUnit:
    """Returns a wrapper's unit. Makes its flat parameter the local shard if a forward pass has left it whole, unless a
    backward pass needs it so: then raises CheckpointSaveError (unsupported_value).
    """
    handle = wrapper._handle
    flat = handle.flat_param
    # The first forward pass names the local shard, and may put it into pinned memory; until then there is only one.
    memory: torch.Tensor = flat.data if wrapper._is_root is None else flat._local_shard
    if not handle._use_orig_params and flat.shape != memory.shape:
        if handle._training_state.name in _MIDDLE_OF_BACKWARD:
            advice = "call save or load after backward(), or set use_orig_params=True"
            raise unsupported(fqn, "an FSDP1 model in the middle of a backward pass", advice)
        handle._use_sharded_flat_param()  # as after each forward pass; autograd needs it whole only in a backward one
    return _FsdpUnit(wrapper, handle, memory)


def _take_over(fqn: str, handle: Any) -> None:
    """Writes parameters that were given other memory back to the flat parameter, as FSDP1 itself does at the next
    forward pass. Raises CheckpointSaveError (unsupported_value) if that fails.
    """
    flat = handle.flat_param
    is_idle = handle._training_state.name == "IDLE"
    if not (handle._use_orig_params and is_idle) or handle._skip_writeback_check or handle._skipped_use_sharded_views:
        return
    if handle.uses_sharded_strategy and not handle.is_sharded(flat):
        return
    address = flat.untyped_storage().data_ptr()
    shown = [getattr(info.module, info.param_name, None) for info in flat._param_infos]
    replaced = [
        path
        for path, now, parameter, info in zip(flat._fqns, shown, flat._params, flat._shard_param_infos, strict=True)
        if now is not None and info.in_shard and (now is not parameter or now.untyped_storage().data_ptr() != address)
    ]
    if not replaced:
        return
    try:
        handle._writeback_orig_params()
    except (RuntimeError, NotImplementedError) as error:
        advice = "change parameters of an FSDP1 model in place only"
        raise unsupported(fqn, f"an FSDP1 model with other memory for {replaced}: {error}", advice) from error


def _places(tree: ModuleTree, units: Sequence[_FsdpUnit]) -> Iterator[tuple[_Position, str, torch.Tensor | None]]:
    """Yields each place in the module where a parameter of a unit belongs, its name, and what is registered there."""
    owned: dict[int, dict[str, _Position]] = {}
    of_object: dict[int, _Position] = {}
    for number, unit in enumerate(units):
        flat = unit.handle.flat_param
        for index, info in enumerate(flat._param_infos):
            owned.setdefault(id(info.module), {})[info.param_name] = number, index
        for info in flat._shared_param_infos:
            first = owned[id(info.prim_module)][info.prim_param_name]
            owned.setdefault(id(info.module), {})[info.param_name] = first
        of_object |= {id(parameter): (number, index) for index, parameter in enumerate(flat._params or ())}
    for name, module in tree.submodules:
        here = {own: of_object[id(each)] for own, each in module._parameters.items() if id(each) in of_object}
        for own, position in (here | owned.get(id(module), {})).items():
            yield position, join_fqn(name, own), module._parameters.get(own)


def _part(fqn: str, flat: Any, index: int) -> FlatParamPart:
    if flat._param_extensions[index] is not None:
        raise unsupported(fqn, "a DTensor in an FSDP1 model", "use fully_shard (FSDP2) with tensor parallelism")
    shape = tuple(flat._shapes[index])
    order = None if flat._contiguities[index] else _order(fqn, shape, flat._strides[index])
    info = flat._shard_param_infos[index]
    if not info.in_shard:
        return FlatParamPart(shape, whole(shape), 0, 0, 0, order)
    start, numel, position = info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard
    return FlatParamPart(shape, whole(shape), start, numel, position, order)


def _order(fqn: str, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions by falling strides: FSDP1 keeps the order in memory, which may be channels last. Raises
    CheckpointSaveError (unsupported_value) for strides with gaps.
    """
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] != 1, -strides[dim]))
    stride = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != stride:
            raise unsupported(fqn, f"a parameter that had strides {list(strides)}", "wrap a model without views")
        stride *= shape[dim]
    return tuple(order)


class _Lowered(NamedTuple):
    """A buffer that mixed precision keeps in a lower precision."""

    buffer: torch.Tensor
    held: FlatParamMemory
    """Copy of its values in the dtype that the buffer had before; a load fills this copy."""


def _lowered_buffers(tree: ModuleTree, wrappers: Iterable[Any], plain_name: Callable[[str], str]) -> Sequence[_Lowered]:
    prefixes = {id(module): plain_name(name) for name, module in reversed(tree.submodules)}
    own_dtypes: dict[str, tuple[torch.dtype, torch.dtype | None]] = {}
    for wrapper in wrappers:  # inner wrappers come last: their dtype overwrites that of outer ones
        for name, dtype in wrapper._buffer_name_to_orig_dtype.items():
            full_name = join_fqn(prefixes[id(wrapper)], name)
            own_dtypes[plain_name(full_name)] = dtype, wrapper.mixed_precision.buffer_dtype
    lowered = []
    for name, module in tree.submodules:
        for own, buffer in module._buffers.items():
            if buffer is None or own in module._non_persistent_buffers_set:
                continue
            full_name = plain_name(join_fqn(name, own))
            dtype, low = own_dtypes.get(full_name, (buffer.dtype, None))
            if buffer.dtype == low and low != dtype:
                memory = buffer.detach().to(dtype).reshape(-1)
                part = part_of_whole(buffer.shape, 0, buffer.numel(), 0)
                lowered.append(_Lowered(buffer, FlatParamMemory(full_name, part, memory)))
    return lowered


def _finish(units: Sequence[_FsdpUnit], lowered: Sequence[_Lowered]) -> None:
    """Makes the next forward pass gather the new values. Copies loaded buffers into those of lower precision."""
    with torch.no_grad():
        for unit in units:
            if unit.wrapper._is_root is not None:
                _reshard(unit)
        for buffer, held in lowered:
            buffer.copy_(held.memory.view(buffer.shape))


def _reshard(unit: _FsdpUnit) -> None:
    # Only a model of FSDP1 comes here, which has imported both.
    from torch.distributed.fsdp._common_utils import _no_dispatch_record_stream  # noqa: PLC0415
    from torch.distributed.utils import _free_storage  # noqa: PLC0415

    flat = unit.handle.flat_param
    unit.handle._use_sharded_flat_param()
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        gathered = getattr(flat, name, None)
        if gathered is not None:
            _no_dispatch_record_stream(gathered, unit.handle._device_handle.current_stream())
            _free_storage(gathered)
    unit.handle.post_reshard()
    unit.handle._prefetched = False
