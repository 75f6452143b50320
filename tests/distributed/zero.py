"""DeepSpeed's ZeRO in the matrix: the true state in an engine, as tests/deepspeed_like.py lays it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed_like
import torch
from deepspeed_like import Wrapper

from distributed import truth
from distributed.builders import StateBuilder


class ZeroBuilder(StateBuilder):
    """Builds the states that the matrix compares, on this rank. Only for an optimizer with one count of steps."""

    def __init__(self, wrap: Callable[..., Wrapper], _rank: int) -> None:
        self._wrap = wrap

    def _state(self, name: str, prefix: str, *, has_state: bool) -> dict[str, Any]:
        model = truth.Transformer()
        truth.fill(model, lambda fqn, tensor: truth.value(prefix + fqn, tensor))
        optimizer = truth.make_optimizer(name, model)
        for group in optimizer.param_groups if prefix else ():
            group.update(lr=0.5, weight_decay=0.5)
        for fqn, parameter in model.named_parameters() if has_state else ():
            if parameter.requires_grad:
                optimizer.state[parameter]["step"] = truth.step(prefix + fqn, name)
                for entry in truth.STATE_TENSORS[name]:
                    value = truth.value(f"{prefix}{fqn}.{entry}", torch.empty(parameter.shape))
                    optimizer.state[parameter][entry] = value
        return deepspeed_like.engine_state({"model": model, "optimizer": optimizer}, self._wrap)
