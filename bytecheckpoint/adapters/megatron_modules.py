"""Which modules are Megatron's: those with `sharded_state_dict()`, inside wrappers or not. Never calls it."""

from __future__ import annotations

import torch

from bytecheckpoint.adapters.tensors import unsupported

_BASE_CLASS = "MegatronModule"
"""Megatron's DistributedDataParallel is derived of it, whatever module it wraps."""


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers, which have one child, call it `module`, and hold and say nothing of their own."""
    while module._modules.keys() == {"module"} and not _has_own_state(module):
        child = module._modules["module"]
        if child is None or _has_own_method(module, child):
            break
        module = child
    return module


def _has_own_state(module: torch.nn.Module) -> bool:
    # Megatron's DistributedDataParallel has lists called `buffers`, so its methods cannot be asked.
    tensors = [*module._parameters.values(), *module._buffers.values()]
    has_extra = type(module).get_extra_state is not torch.nn.Module.get_extra_state
    return has_extra or any(tensor is not None for tensor in tensors)


def _has_own_method(module: torch.nn.Module, child: torch.nn.Module) -> bool:
    """Whether a wrapper says itself what of it is saved. A method that it has of Megatron's base class, or that the
    child has inherited too, only adds to the keys that there is a wrapper.
    """
    definer = next((cls for cls in type(module).__mro__ if "sharded_state_dict" in vars(cls)), None)
    if definer is None or isinstance(child, definer):
        return False
    return definer.__name__ != _BASE_CLASS or not is_megatron_module(child)


def is_megatron_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module) and callable(getattr(unwrapped(value), "sharded_state_dict", None))


def refuse_inside(fqn: str, module: torch.nn.Module) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a module that hides one of Megatron's: parts of tensors that
    ranks hold under one name would be taken for replicas.
    """
    all_kinds = dict.fromkeys(map(type, torch.nn.Module.modules(module)))
    kinds = [kind for kind in all_kinds if hasattr(kind, "sharded_state_dict")]
    if kinds:
        what = f"a {type(module).__name__} without sharded_state_dict() that holds Megatron's {kinds[0].__name__}"
        advice = "pass the modules inside, or give it that method; where Megatron splits no tensor, pass framework="
        raise unsupported(fqn, what, f'{advice}"ddp" (or "deepspeed")')
