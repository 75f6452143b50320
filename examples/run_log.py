"""Logs a run of train_gpt.py, so that demo.py can compare runs: a line of JSON for every event, and digests of the
whole state that depend only on its bits.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class RunLog:
    """Appends events to a file, each in one write: a run that is killed leaves whole lines. Only rank 0 writes."""

    def __init__(self, path: Path, *, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0) if rank == 0 else None
        self._started = time.perf_counter()

    def write(self, event: str, **values: Any) -> None:
        if self._file is not None:
            line = {"event": event, "at_s": round(time.perf_counter() - self._started, 3), **values}
            self._file.write(json.dumps(line).encode() + b"\n")


def state_digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """FQN -> sha256 of the whole tensor, for every parameter and every tensor of the optimizer's state.

    A collective call: tensors that are spread over ranks are gathered. It shares no code with the library.
    """
    digests = {}
    for fqn, parameter in model.named_parameters():
        digests[f"model.{fqn}"] = _digest(parameter)
        for key, value in optimizer.state[parameter].items():
            digests[f"optimizer.state.{fqn}.{key}"] = _digest(value)
    return digests


def _digest(tensor: Tensor) -> str:
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    description = f"{whole.dtype} {list(whole.shape)} ".encode()
    return hashlib.sha256(description + whole.contiguous().numpy().tobytes()).hexdigest()
