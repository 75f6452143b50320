"""The true transformer as Megatron would have it on eight ranks: tensors over two, layers over two stages, and an
optimizer over two that keeps flat shards in fp32 of what the model has in bf16. Nothing divides evenly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron_like import DistributedOptimizer, Grid, Model, Spec, Wrapper, full_shape
from torch import Tensor

from distributed import truth
from distributed.builders import StateBuilder
from distributed.layouts import State

GRID = Grid(tp=2, pp=2, dp=2)
_ROWS = re.compile(r"(attention\.w[qkv]|mlp\.up)\.(weight|bias)$|(embedding|head)\.weight$")
_COLUMNS = re.compile(r"(attention\.wo|mlp\.down)\.weight$")
_FIRST_STAGE = re.compile(r"embedding\.|frozen\.|layers\.0\.")


class MegatronBuilder(StateBuilder):
    """As layouts.Builder."""

    def __init__(self, rank: int) -> None:
        self._grid = GRID._replace(rank=rank)

    def _state(self, name: str, prefix: str, *, has_state: bool) -> State:
        model = Model(list(_specs(self._grid.pp_rank)), self._grid, partial(_source, prefix))
        state = {"model": Wrapper(model), "optimizer": _optimizer(name, model)}
        with torch.no_grad():
            for spec, held, elements, inner in held_by(state):
                value = partial(self._flat_value, spec, elements)
                held.copy_(value(prefix + spec.key))
                if has_state:
                    inner.state[held] = {"step": truth.step(prefix + spec.key, name)}
                    for key in truth.STATE_TENSORS[name]:
                        inner.state[held][key] = value(f"{prefix}{spec.key}.{key}")
        for group in state["optimizer"].optimizer.param_groups if prefix else ():
            group.update(lr=0.5, weight_decay=0.5)
        return state

    def _flat_value(self, spec: Spec, elements: slice, fqn: str) -> Tensor:
        full = truth.value(fqn, torch.empty(full_shape(spec)))
        return spec.local(full, self._grid).reshape(-1)[elements].clone()


def _specs(stage: int) -> Iterator[Spec]:
    model = truth.Transformer()
    saved = model.state_dict(keep_vars=True)
    for fqn, tensor in saved.items():
        if (_FIRST_STAGE.match(fqn) is not None) != (stage == 0):
            continue
        tp_axis = 0 if _ROWS.search(fqn) else 1 if _COLUMNS.search(fqn) else None
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        kind = "trained" if tensor.requires_grad else "frozen" if is_parameter else "buffer"
        dtype = torch.bfloat16 if kind == "trained" else tensor.dtype
        yield Spec(fqn, tuple(tensor.shape), tp_axis=tp_axis, dtype=dtype, kind=kind)


def _source(prefix: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rounded from fp32 where it is trained, as Megatron makes it of the copy."""
    like = torch.empty(shape, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    return truth.value(prefix + key, like).to(dtype)


def _optimizer(name: str, model: Model) -> DistributedOptimizer:
    trained = list(model.trained())
    groups = [([parameter for parameter, _ in trained], {"weight_decay": truth.WEIGHT_DECAY})]
    if name != "adamw_even":
        matrices = [parameter for parameter, spec in trained if len(spec.shape) > 1]
        vectors = [parameter for parameter, spec in trained if len(spec.shape) < 2]
        groups = [(matrices, {"weight_decay": truth.WEIGHT_DECAY}), (vectors, {"weight_decay": 0.0})]
    return DistributedOptimizer(groups, lambda made: torch.optim.AdamW(made, **truth.HYPERPARAMETERS[name]), model.grid)


def held_by(state: State) -> Iterator[tuple[Spec, Tensor, slice, torch.optim.Optimizer]]:
    """What the inner optimizer has of each parameter, and which of its elements those are."""
    specs = {id(parameter): spec for parameter, spec in state["model"].module.trained()}
    optimizer = state["optimizer"]
    for parameter, held, elements in optimizer.held():
        yield specs[id(parameter)], held, elements, optimizer.optimizer


def differences(state: State, expected: State) -> list[str]:
    """One line for each thing in which a state differs from what it should be on this rank."""
    found, wanted = _parts(state), _parts(expected)
    names = sorted(found.keys() | wanted.keys())
    return [
        f"{name}: found {found.get(name)}, expected {wanted.get(name)}"
        for name in names
        if name not in found or name not in wanted or not _same(found[name], wanted[name])
    ]


def _parts(state: State) -> dict[str, Any]:
    model = state["model"].module
    parts: dict[str, Any] = {model.specs[name].key: tensor for name, tensor in model.state_dict().items()}
    for spec, held, elements, inner in held_by(state):
        name = f"{spec.key}[{elements.start}:{elements.stop}]"
        parts[f"fp32 copy of {name}"] = held
        parts |= {f"{key} of {name}": value for key, value in inner.state[held].items()}
        group = next(group for group in inner.param_groups if any(each is held for each in group["params"]))
        parts[f"group of {name}"] = {key: value for key, value in group.items() if key != "params"}
    return parts


def _same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return bool(found == wanted)
    return (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and torch.equal(found, wanted)
