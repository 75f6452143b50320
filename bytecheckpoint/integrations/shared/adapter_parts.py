"""The part of a model that its adapters train: a module with the live parameters of the adapters alone, under their own
names. Recognises adapters by the attributes that PEFT sets on a model, and never imports PEFT.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _NormBase

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.shared.partial_module import partial_module


def has_adapters(model: nn.Module) -> bool:
    """Returns True for a PEFT model, and for a model of transformers with adapters."""
    return bool(_adapter_names(model))


def _adapter_names(model: nn.Module) -> set[str]:
    found = getattr(model, "peft_config", None)
    return set(found) if isinstance(found, dict) else set()


def adapters_of(model: nn.Module) -> nn.Module:
    """Returns a module that holds what training changes in a model with adapters: all trainable parameters, the
    parameters and persistent buffers of all adapters, also of inactive ones, and the running statistics of batch norms.
    The tensors are the model's own, not copies, and have the names that they have in the model.

    Raises CheckpointMismatchError (conflict) under FSDP1, whose flat parameters mix adapters with what is frozen.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise CheckpointMismatchError(
            "the adapters of a model under FSDP1 cannot be told from its frozen weights, which lie in the same flat "
            "parameters; nothing was saved or loaded: use FSDP2, or save the whole model (bcp_save_base = True of the "
            "Trainer's mixin, save_lora_only=False of verl)",
            kind="conflict",
        )
    adapters = _adapter_names(model)
    values: dict[str, Any] = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or not adapters.isdisjoint(name.split("."))
    }
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            is_persistent = name.rpartition(".")[2] not in module._non_persistent_buffers_set
            if is_persistent and (isinstance(module, _NormBase) or not adapters.isdisjoint(name.split("."))):
                values[name] = buffer
    return partial_module(values)
