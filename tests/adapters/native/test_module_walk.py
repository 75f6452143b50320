"""What one walk over a module finds, against what torch's own methods give for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from bytecheckpoint.adapters.collect import collect_all, entries_of
from bytecheckpoint.adapters.native.module_walk import tree_of


class Kept(nn.Module):
    """Buffers of all kinds, and parameters that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_parameter("nothing", None)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("absent", None)
        self.nobody = None
        self.register_module("empty", None)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


class WithOwnStateDict(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "bias" not in name}


class WithOwnSaving(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, _keep_vars: bool) -> None:
        destination[f"{prefix}renamed"] = self.weight


class WithOwnParameters(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"own.{name}", parameter) for name, parameter in super().named_parameters(*args, **kwargs))


def shared() -> nn.Module:
    inner = nn.Linear(2, 2)
    return nn.ModuleDict({"a": inner, "b": nn.Sequential(inner, Kept()), "c": inner})


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    return model


def parametrized() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2))


AS_USUAL: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(2, 2),
    "nothing": nn.Identity,
    "buffers": lambda: nn.Sequential(Kept(), nn.BatchNorm2d(2), Kept()),
    "shared": shared,
    "tied": tied,
    "parametrized": parametrized,
    "recurrent": lambda: nn.LSTM(2, 2, num_layers=2),
    "compiled": lambda: nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")),
}


def overridden_by_an_attribute(method: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {"other": model[0].weight}
    setattr(model[1] if method == "_save_to_state_dict" else model, method, lambda *_args, **_kwargs: state)
    return model


def hooked(register: str, hook: Callable[..., Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    getattr(model[1], register)(hook)
    return model


def drop_bias(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    del state[f"{prefix}bias"]


def grow(module: nn.Module, *_args: Any) -> None:
    if not hasattr(module, "grown"):
        module.register_buffer("grown", torch.ones(1))


IN_THEIR_OWN_WAY: dict[str, Callable[[], nn.Module]] = {
    "extra state": lambda: nn.Sequential(WithExtraState(2, 2)),
    "own state_dict": lambda: nn.Sequential(nn.Linear(2, 2), WithOwnStateDict(2, 2)),
    "own saving": lambda: nn.Sequential(WithOwnSaving(2, 2)),
    "own parameters": lambda: WithOwnParameters(2, 2),
    "attribute": lambda: overridden_by_an_attribute("state_dict"),
    "attribute for saving": lambda: overridden_by_an_attribute("_save_to_state_dict"),
    "hook after": lambda: hooked("register_state_dict_post_hook", drop_bias),
    "hook before": lambda: hooked("register_state_dict_pre_hook", grow),
    "checkpointed": lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))),
    "spectral norm": lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(2, 2))),
}


@pytest.mark.parametrize("build", [*AS_USUAL.values(), *IN_THEIR_OWN_WAY.values()], ids=[*AS_USUAL, *IN_THEIR_OWN_WAY])
def test_one_walk_finds_what_torch_finds(build: Callable[[], nn.Module]) -> None:
    module = build()
    tree = tree_of(module)
    expected = module.state_dict(keep_vars=True)
    found = tree.state_dict()
    assert list(found) == list(expected)
    assert all(found[name] is value for name, value in expected.items() if isinstance(value, torch.Tensor))
    named = list(module.named_parameters())
    assert [(name, id(value)) for name, value in tree.named_parameters()] == [
        (name, id(value)) for name, value in named
    ]
    assert tree.live() >= {id(value) for value in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("name", AS_USUAL)
def test_modules_that_do_as_torch_does_are_walked(name: str) -> None:
    tree = tree_of(AS_USUAL[name]())
    assert tree.is_walked_as_usual
    assert tree.is_saved_as_usual


@pytest.mark.parametrize("name", IN_THEIR_OWN_WAY)
def test_modules_that_do_otherwise_are_asked(name: str) -> None:
    assert not tree_of(IN_THEIR_OWN_WAY[name]()).is_saved_as_usual


def test_nothing_is_remembered_from_one_collect_to_the_next() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    entries = entries_of({"model": model, "optimizer": optimizer}, "auto")
    before = collect_all(entries)[0]
    model[0].weight.data = torch.zeros(3, 2, dtype=torch.float64)
    model[1].running_mean = torch.full((2,), 7.0)
    model[0].register_buffer("added", torch.ones(1))
    found = {shard.fqn: shard for shard in collect_all(entries)[0].shards}
    assert found.keys() - {shard.fqn for shard in before.shards} == {"model.0.added"}
    assert (found["model.0.weight"].dtype, found["model.0.weight"].global_shape) == ("float64", (3, 2))
    assert found["model.1.running_mean"].tensor.tolist() == [7.0, 7.0]
