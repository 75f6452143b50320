"""The layouts of the matrix: how each spreads the one true state over its ranks. Only torch's own means of sharding
are used, on whole tensors with the true values, so what a rank then holds owes nothing to the library under test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distributed import truth

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Mesh axes and their sizes, outermost first; their product is the world size."""

    axes: dict[str, int]
    is_flat: bool = False
    """Whether FSDP1 shows its flat parameters, so that the parameters in each have one count of steps."""

    @property
    def world_size(self) -> int:
        size = 1
        for length in self.axes.values():
            size *= length
        return size


LAYOUTS = {
    "single": Layout(axes={}),
    "ddp2": Layout(axes={"ddp": 2}),
    "fsdp4": Layout(axes={"shard": 4}),
    "fsdp3": Layout(axes={"shard": 3}),
    "hsdp2x2": Layout(axes={"replicate": 2, "shard": 2}),
    "tp2": Layout(axes={"tp": 2}),
    "fsdp2_tp2": Layout(axes={"shard": 2, "tp": 2}),
    "pp2": Layout(axes={"pp": 2}),
    "pp2_tp2": Layout(axes={"pp": 2, "tp": 2}),
}

FRAMEWORK_LAYOUTS = {
    "fsdp1_4": Layout(axes={"fsdp1": 4}),
    "fsdp1_4_flat": Layout(axes={"fsdp1": 4}, is_flat=True),
    "fsdp1_hybrid2x2": Layout(axes={"replicate": 2, "fsdp1": 2}),
    "fsdp1_whole2": Layout(axes={"fsdp1_whole": 2}),
}
"""Those of frameworks that lay parameters out themselves, which are in a matrix of their own."""
_STRATEGIES = {
    ("fsdp1",): ShardingStrategy.FULL_SHARD,
    ("replicate", "fsdp1"): ShardingStrategy.HYBRID_SHARD,
    ("fsdp1_whole",): ShardingStrategy.NO_SHARD,
}

_TP_PLAN_OF_BLOCK = {
    "attention.wq": ColwiseParallel,
    "attention.wk": ColwiseParallel,
    "attention.wv": ColwiseParallel,
    "attention.wo": RowwiseParallel,
    "mlp.up": ColwiseParallel,
    "mlp.down": RowwiseParallel,
}


class Builder:
    """Builds states in one layout on this rank. Makes its mesh, which is a collective, once.

    `noise` states have other values in every parameter, buffer and optimizer entry than the truth, and other
    hyperparameters; `stateless` ones have that noise and an optimizer that has not seen a step.
    """

    def __init__(self, layout: str, rank: int, *, tied: bool = False) -> None:
        self._layout = (LAYOUTS | FRAMEWORK_LAYOUTS)[layout]
        self._axes = self._layout.axes
        self._rank = rank
        self._tied = tied
        self._mesh: DeviceMesh | None = None
        if self._axes and "ddp" not in self._axes:
            self._mesh = init_device_mesh("cpu", tuple(self._axes.values()), mesh_dim_names=tuple(self._axes))

    def truth(self, optimizer: str) -> State:
        model = self._model(truth.value)
        built = truth.make_optimizer(optimizer, model)
        self._fill_optimizer(built, model, optimizer, prefix="")
        return self._state(model, built)

    def noise(self, optimizer: str) -> State:
        state = self.stateless(optimizer)
        self._fill_optimizer(state["optimizer"], _modules(state)[0], optimizer, prefix="noise.")
        return state

    def stateless(self, optimizer: str) -> State:
        model = self._model(lambda fqn, tensor: truth.value(f"noise.{fqn}", tensor))
        built = truth.make_optimizer(optimizer, model)
        for group in built.param_groups:
            group.update(lr=0.5, weight_decay=0.5)
        return self._state(model, built)

    def _state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        return {"model": [model] if "pp" in self._axes else model, "optimizer": optimizer}

    def _fill_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module, name: str, *, prefix: str) -> None:
        """The state tensors are the parameters of further models, sharded as torch shards the model itself."""
        # Of what a rank has nothing of, FSDP1 gives the optimizer no gradient.
        trained = {fqn: each for fqn, each in _named_parameters(model) if each.requires_grad and each.numel()}
        if "adamw" in name:
            for fqn, parameter in trained.items():
                optimizer.state[parameter]["step"] = truth.step(prefix + fqn, name)
        for entry in truth.STATE_TENSORS[name]:
            shadow = self._model(lambda fqn, tensor, entry=entry: truth.value(f"{prefix}{fqn}.{entry}", tensor))
            for fqn, tensor in _named_parameters(shadow):
                if fqn in trained:
                    optimizer.state[trained[fqn]][entry] = tensor.detach()

    def _model(self, source: Callable[[str, Tensor], Tensor]) -> nn.Module:
        model = truth.Transformer(tied=self._tied)
        truth.fill(model, source)
        if "pp" in self._axes:
            _keep_stage(model, self._mesh_of("pp").get_local_rank())
        if "tp" in self._axes:
            self._shard_tensors(model)
        if "shard" in self._axes:
            self._shard_fully(model)
        if tuple(self._axes) in _STRATEGIES:
            return self._shard_flat(model)
        if "ddp" in self._axes:
            return DistributedDataParallel(model)
        return model

    def _shard_tensors(self, model: nn.Module) -> None:
        plan: dict[str, Any] = {
            f"layers.{index}.{name}": style()
            for index in getattr(model, "layers", {})
            for name, style in _TP_PLAN_OF_BLOCK.items()
        }
        if self._tied:
            plan["embedding"] = RowwiseParallel()
        else:
            plan |= {name: ColwiseParallel() for name in ("embedding", "head") if hasattr(model, name)}
        parallelize_module(model, self._mesh_of("tp"), plan)
        if self._tied:
            model.head.weight = model.embedding.weight  # sharding made a new parameter

    def _shard_fully(self, model: nn.Module) -> None:
        mesh = self._mesh_of(*(axis for axis in ("replicate", "shard") if axis in self._axes))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh, shard_placement_fn=_by_columns if "replicate" in self._axes else None)
        fully_shard(model, mesh=mesh)

    def _shard_flat(self, model: nn.Module) -> nn.Module:
        """Every layer is a unit of its own, what does not train is one, and the rest is the outermost."""

        def wrap(module: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(
                module,
                device_mesh=self._mesh,
                sharding_strategy=_STRATEGIES[tuple(self._axes)],
                use_orig_params=not self._layout.is_flat,
                device_id=torch.device("cpu"),
            )

        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # NO_SHARD is deprecated
            for index, block in model.layers.items():
                model.layers[index] = wrap(block)
            model.frozen = wrap(model.frozen)
            return wrap(model)

    def _mesh_of(self, *axes: str) -> DeviceMesh:
        if self._mesh is None:
            raise ValueError(f"this layout has no axes {axes}")
        return self._mesh[axes] if len(axes) < len(self._axes) else self._mesh


def _keep_stage(model: nn.Module, stage: int) -> None:
    """The first stage has the embedding and a layer, the last one the rest."""
    layers: Any = model.layers
    for index in list(layers):
        if (int(index) < 1) != (stage == 0):
            del layers[index]
    for name in ("norm", "head") if stage == 0 else ("embedding", "frozen"):
        delattr(model, name)


def _by_columns(parameter: nn.Parameter) -> Shard | None:
    """Not only rows are ever sharded. FSDP2 takes columns only where they divide evenly."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] == truth.HIDDEN else None


def _modules(state: State) -> list[nn.Module]:
    model = state["model"]
    return model if isinstance(model, list) else [model]


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(truth.unwrapped(fqn), parameter) for fqn, parameter in model.named_parameters()]


def _unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def assert_equal(state: State, expected: State) -> None:
    """That what this rank holds of two states in one layout is the same to the bit: values, dtypes and placements of
    parameters, persistent buffers and optimizer state, the set of keys, and the hyperparameters.
    """
    problems = differences(state, expected)
    assert not problems, "\n".join(problems)


def differences(state: State, expected: State) -> list[str]:
    """One line for each thing in which a state differs from what it should be on this rank."""
    found, wanted = local_parts(state), local_parts(expected)
    problems = [f"missing: {name}" for name in wanted if name not in found]
    problems += [f"unexpected: {name}" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if not _same(found[name], wanted[name]):
            problems.append(f"{name}: found {found[name]}, expected {wanted[name]}")
    return sorted(problems)


def local_parts(state: State) -> dict[str, Any]:
    """All that this rank holds, by FQN: tensors, and the hyperparameters of each parameter."""
    parts: dict[str, Any] = {}
    fqns: dict[nn.Parameter, str] = {}
    for model in _modules(state):
        fqns |= {parameter: fqn for fqn, parameter in _named_parameters(model)}
        parts |= {f"model.{fqn}": tensor for fqn, tensor in _saved(_unwrap(model)).items()}
    optimizer: torch.optim.Optimizer = state["optimizer"]
    for parameter, entries in optimizer.state.items():
        parts |= {f"optimizer.state.{fqns[parameter]}.{name}": entry for name, entry in entries.items()}
    for group in optimizer.param_groups:
        values = {name: value for name, value in group.items() if name != "params"}
        parts |= {f"optimizer.groups.{fqns[parameter]}": values for parameter in group["params"]}
    return parts


def _saved(model: nn.Module) -> dict[str, Tensor]:
    if not isinstance(model, FullyShardedDataParallel):
        return model.state_dict(keep_vars=True)
    # Its state_dict gathers.
    buffers = {name: buffer for name, buffer in model.named_buffers() if not name.endswith(".mask")}
    return dict(model.named_parameters()) | buffers


def _same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return bool(found == wanted)
    if isinstance(found, DTensor) != isinstance(wanted, DTensor):
        return False
    if isinstance(wanted, DTensor):
        if found.placements != wanted.placements or found.shape != wanted.shape:
            return False
        found, wanted = found.to_local(), wanted.to_local()
    alike = (found.dtype, found.shape, found.device) == (wanted.dtype, wanted.shape, wanted.device)
    return alike and torch.equal(_bits(found), _bits(wanted))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
