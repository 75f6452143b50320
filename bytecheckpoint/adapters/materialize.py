"""Creates memory for modules on the meta device that a load will fill."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch.distributed.tensor import DTensor

from bytecheckpoint.adapters.native.subclass_flatten import is_subclass, with_new_memory


def target_device(tensor: torch.Tensor) -> torch.device:
    """Returns the device of a tensor, or on which it would get memory if it is on the meta device."""
    if not tensor.is_meta:
        return tensor.device
    if isinstance(tensor, DTensor):
        return torch.device(tensor.device_mesh.device_type)
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def materialize(fqn: str, module: torch.nn.Module, wanted: Collection[int]) -> None:
    """Gives memory to tensors on the meta device that are `wanted` (by id). Parameters stay the same objects.

    What a load does not fill stays on the meta device, where using it fails. A warning names buffers that are not
    persistent, which no checkpoint holds.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or id(tensor) not in wanted:
            return tensor
        device = target_device(tensor)
        if is_subclass(tensor):
            return with_new_memory(tensor, lambda inner: torch.empty_like(inner, device=device))
        return torch.empty_like(tensor, device=device)

    # Swapping keeps identity: optimizers that were built on meta parameters, and ties, stay valid.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module._apply(allocate)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    persistent = module.state_dict(keep_vars=True)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in persistent]
    if left:
        warnings.warn(
            f"{fqn}: buffers {left} are not persistent, so no checkpoint holds them; they are still on the meta "
            "device: compute them again before using the model",
            stacklevel=2,
        )
