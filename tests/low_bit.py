"""Tensor subclasses as low-bit libraries write them: values that lie in inner tensors, which torch can take apart."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch import Tensor, nn


class Rounding(enum.Enum):
    NEAREST = "nearest"
    DOWN = "down"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a context may hold besides numbers."""

    rounding: Rounding = Rounding.NEAREST
    target: tuple[int, ...] = (1, 2)


class Flattened(Tensor):
    """What the subclasses have in common: they are taken apart by their attributes."""

    inner: tuple[str, ...]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].mapped(lambda tensor: tensor.detach())
        if func is torch.ops.aten.view.default and list(args[1]) == list(args[0].shape):
            return args[0].mapped(lambda tensor: tensor.detach())
        raise NotImplementedError(f"{cls.__name__} has no {func}")

    def mapped(self, of_inner: Any) -> Any:
        names, context = self.__tensor_flatten__()
        parts = {name: of_inner(getattr(self, name)) for name in names}
        return type(self).__tensor_unflatten__(parts, context, self.shape, self.stride())

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({', '.join(repr(getattr(self, name)) for name in self.inner)})"


class Int8Weight(Flattened):
    """Integers, and one scale for each block of columns."""

    inner = ("values", "scale")

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, block: int, recipe: Any = Recipe()) -> Any:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: Tensor, scale: Tensor, block: int, recipe: Any = Recipe()) -> None:
        self.values, self.scale, self.block, self.recipe = values, scale, block, recipe

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["values", "scale"], {"block": self.block, "recipe": self.recipe, "shape": self.shape}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: dict[str, Any], size: Any, stride: Any) -> Any:
        assert tuple(context["shape"]) == tuple(size) == tuple(inner["values"].shape)
        return cls(inner["values"], inner["scale"], context["block"], context["recipe"])


class Corrected(Flattened):
    """Another low-bit tensor and what it lacks: a subclass inside a subclass."""

    inner = ("coarse", "rest")

    @staticmethod
    def __new__(cls, coarse: Tensor, rest: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, coarse.shape, dtype=coarse.dtype, device=rest.device)

    def __init__(self, coarse: Tensor, rest: Tensor) -> None:
        self.coarse, self.rest = coarse, rest

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["coarse", "rest"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Any:
        return cls(inner["coarse"], inner["rest"])


class Opaque(Int8Weight):
    """Its context is more than plain data."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], [1, {"how": object()}]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["values"], inner["scale"], context[0])


class Sealed(Tensor):
    """Nothing is known of what it is made of."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].values)


def int8(seed: int, shape: tuple[int, int] = (6, 8), *, block: int = 4, cls: Any = Int8Weight, **kwargs: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    scale = torch.randn(shape[0], shape[1] // block, generator=generator)
    return cls(values, scale, block, **kwargs)


def corrected(seed: int, shape: tuple[int, int] = (6, 8)) -> Any:
    generator = torch.Generator().manual_seed(seed + 100)
    return Corrected(int8(seed, shape), torch.randn(shape, generator=generator).bfloat16())


def parts(tensor: Tensor, name: str = "") -> dict[str, Tensor]:
    """The inner tensors by name, of inner subclasses too."""
    if not isinstance(tensor, Flattened):
        return {name: tensor}
    found = ((f"{name}.{of_inner}", getattr(tensor, of_inner)) for of_inner in tensor.inner)
    return {key: part for path, inner in found for key, part in parts(inner, path).items()}


def same(a: Any, b: Any) -> bool:
    """Whether two tensors are of one class and the same to the bit, inside and in what they are made with."""
    of_a, of_b = parts(a), parts(b)
    alike = type(a) is type(b) and of_a.keys() == of_b.keys() and a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, Int8Weight):
        alike = alike and (a.block, a.recipe) == (b.block, b.recipe)
    return alike and all(
        part.dtype == of_b[name].dtype and torch.equal(part, of_b[name]) for name, part in of_a.items()
    )


class LowBit(nn.Module):
    """A model with weights of each kind, one of them under two names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.second = nn.Linear(8, 6, bias=False)
        self.tied = nn.Linear(8, 6, bias=False)
        self.first.weight = nn.Parameter(int8(seed), requires_grad=False)
        self.second.weight = self.tied.weight = nn.Parameter(corrected(seed + 1), requires_grad=False)
        self.register_buffer("table", int8(seed + 2))
        nn.init.constant_(self.first.bias, seed)

    def named(self) -> dict[str, Tensor]:
        return dict(self.state_dict(keep_vars=True))


class LowBitAdamW(torch.optim.AdamW):
    """An optimizer that keeps subclasses for parameters that are none: a step of its own makes it another kind."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class LowBitSGD(torch.optim.SGD):
    """The same, with the hyperparameters of SGD."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def differing(model: nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names of the tensors that are not as expected, of which a model has no more and no fewer."""
    found = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    assert found.keys() == expected.keys()
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]
