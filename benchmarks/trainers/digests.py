"""Digests of whole parameters and optimizer states, which are the same on any number of ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns those of each parameter and of all that the optimizer has for it, by name; all ranks call it together."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = digest(parameter)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            found[f"{name}, {key}"] = digest(value)
    return found


def digest(value: Any) -> str:
    """Returns that of a number or a tensor, whole if ranks share it."""
    tensor = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
    data = tensor.detach().to(torch.float32).contiguous().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
