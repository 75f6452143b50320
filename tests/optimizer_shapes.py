"""Optimizers that hold others or keep their state elsewhere, after those that people train with: torchtitan's
OptimizersContainer and ModelWrapper, Accelerate's AcceleratedOptimizer, a Muon beside an AdamW, Lookahead, SAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state

Optimizer = torch.optim.Optimizer
FLAT = torch_state.StateDictOptions(flatten_optimizer_state_dict=True)


class Container(Optimizer):
    """The shape of torchtitan's OptimizersContainer: several optimizers, one flat state_dict, and no state of its own.

    Its state_dict() makes the state of optimizers that have none, with a step that changes no parameter.
    """

    def __init__(self, parts: Sequence[nn.Module], *, has_names: bool = True) -> None:
        self.optimizers = []
        self.model_parts = list(parts)
        for part in parts:
            named = list(part.named_parameters())
            given = named if has_names else [parameter for _, parameter in named]
            self.optimizers.append(torch.optim.AdamW(given, lr=0.01))
        parameters = [parameter for part in parts for parameter in part.parameters()]
        super().__init__(parameters, {})

    def step(self, _closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            found |= torch_state.get_optimizer_state_dict(part, optimizer, options=FLAT)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            torch_state.set_optimizer_state_dict(part, optimizer, dict(state_dict), options=FLAT)


class Wrapped:
    """The shape of torchtitan's ModelWrapper: parts of a model as one, with a cache of their state_dict."""

    def __init__(self, model: nn.Module | list[nn.Module]) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self.cached_state_dict = self._read()
        self.num_loads = 0

    def _read(self) -> dict[str, Any]:
        return {key: value for part in self.model for key, value in part.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return self.cached_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.model:
            part.load_state_dict(state_dict, strict=False)
        self.cached_state_dict = self._read()
        self.num_loads += 1


class MuonAndAdamW(Optimizer):
    """What people write by hand: matrices to one optimizer, all else to another, both in attributes."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.muon = torch.optim.SGD([each for each in parameters if each.dim() == 2], lr=0.02, momentum=0.9)
        self.adam = torch.optim.AdamW([each for each in parameters if each.dim() != 2], lr=0.01)
        super().__init__(parameters, {})

    def step(self, _closure: Any = None) -> None:
        self.muon.step()
        self.adam.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adam.load_state_dict(state_dict["adam"])


class InADict(MuonAndAdamW):
    """The same with the optimizers in a dict of lists, and a state_dict() that is a list."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.by_kind = {"muon": [vars(self).pop("muon")], "adam": [vars(self).pop("adam")]}

    def step(self, _closure: Any = None) -> None:
        for (optimizer,) in self.by_kind.values():
            optimizer.step()

    def state_dict(self) -> Any:
        return [optimizer.state_dict() for (optimizer,) in self.by_kind.values()]

    def load_state_dict(self, state_dict: Any) -> None:
        for (optimizer,), state in zip(self.by_kind.values(), state_dict, strict=True):
            optimizer.load_state_dict(state)


class Accelerated(Optimizer):
    """The shape of Accelerate's AcceleratedOptimizer, which never calls `super().__init__()`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._is_overflow = False

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, _closure: Any = None) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class Joined(Optimizer):
    """Its `.state` is a property over several, new each time, and its state_dict() is torch's."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self._inside = [torch.optim.AdamW(parameters[:2], lr=0.01), torch.optim.AdamW(parameters[2:], lr=0.01)]
        super().__init__(parameters, {})

    @property
    def state(self) -> Any:
        return {key: value for each in self._inside for key, value in each.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """Torch's __init__ sets it."""

    def step(self, _closure: Any = None) -> None:
        for each in self._inside:
            each.step()


class Lookahead(Optimizer):
    """Slow weights in `.state`, those of the optimizer inside in its own, and a counter: all in its state_dict()."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([each for group in inner.param_groups for each in group["params"]], {})
        self.inner = inner
        self.num_steps = 0

    def step(self, _closure: Any = None) -> None:
        self.inner.step()
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.detach().clone()).lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": super().state_dict(), "fast": self.inner.state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["slow"])
        self.inner.load_state_dict(state_dict["fast"])
        self.num_steps = state_dict["num_steps"]


class Merged(Lookahead):
    """The same with one state_dict() of torch's form for both, in which slow weights stand beside the moments."""

    def state_dict(self) -> dict[str, Any]:
        own, inner = Optimizer.state_dict(self)["state"], self.inner.state_dict()
        merged = {number: {**values, **own.get(number, {})} for number, values in inner["state"].items()}
        return {**inner, "state": merged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {number: dict(values) for number, values in state_dict["state"].items()}
        own = {number: {"slow": values.pop("slow")} for number, values in state.items()}
        Optimizer.load_state_dict(self, {**Optimizer.state_dict(self), "state": own})
        self.inner.load_state_dict({**state_dict, "state": state})


class Sharpness(Optimizer):
    """The shape of SAM: state of its own beside that of the optimizer inside, which its state_dict() forgets."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, _closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old_p"] = parameter.detach().clone()
        self.inner.step()


class Hidden(Optimizer):
    """Moments in an attribute of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.moments: list[torch.Tensor] = []

    def step(self, _closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        self.moments = self.moments or [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, moment in zip(parameters, self.moments, strict=True):
            if parameter.grad is not None:
                moment.lerp_(parameter.grad, 0.5)
                parameter.data.add_(moment, alpha=-0.1)

    def state_dict(self) -> Any:
        return [("moments", [moment.clone() for moment in self.moments]), {"num": len(self.moments)}]

    def load_state_dict(self, state_dict: Any) -> None:
        self.moments = list(state_dict[0][1])
