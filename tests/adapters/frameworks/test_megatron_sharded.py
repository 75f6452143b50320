"""What Megatron's sharded_state_dict may hold, on one rank: each kind of object, and each kind of wrong one."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_like import (
    ChainedOptimizer,
    DistributedOptimizer,
    Float16Optimizer,
    GradScaler,
    Grid,
    LocalNonpersistentObject,
    Model,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    Spec,
    Wrapper,
    sharded,
)
from plain_leaves import plain_leaves
from torch import Tensor, nn

import bytecheckpoint as bcp
from bytecheckpoint.adapters.frameworks.megatron import MegatronEntry, OptimizedElements
from bytecheckpoint.adapters.optimizers import hyperparameters

ONE = Grid(1, 1, 1)
HALF = [Spec("a.weight", (4, 3), dtype=torch.bfloat16)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, first: int = 0) -> Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=dtype).view(shape)


def counting(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return numbers(*shape).add(0.1).to(dtype)


def zeros(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def factory(data: Tensor, *, dim: int = 0, is_copy: bool = False) -> ShardedTensorFactory:
    """Of halves, which lie one after the other in the whole tensor."""

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> dict[str, ShardedTensor]:
        shape = [length // (2 if axis == dim else 1) for axis, length in enumerate(tensor.shape)]
        halves = [half.clone() if is_copy else half for half in tensor.chunk(2, dim)]
        return {
            name: sharded(key, half, global_shape=tuple(data.shape), global_offset=(*(0,) * dim, at, *(0,) * (1 - dim)))
            for name, half, at in zip("wv", halves, (0, shape[dim]), strict=True)
        }

    return ShardedTensorFactory("fc1", data, build, lambda parts: torch.cat([parts["w"], parts["v"]], dim))


def test_a_dict_of_sharded_objects_is_a_model(tmp_path: Path) -> None:
    layers = [numbers(2, 3), numbers(2, 3, first=50)]

    def tree(values: list[Tensor]) -> dict[str, Any]:
        stacked = [
            sharded("layers.w", value, global_shape=(2, 2, 3), global_offset=(index, 0, 0), prepend_axis_num=1)
            for index, value in enumerate(values)
        ]
        return {"model": {"chunks": [{"a": stacked[0]}, {"b": stacked[1]}], "iteration": 3}}

    bcp.save(tmp_path, tree(layers))
    assert torch.equal(bcp.open(tmp_path)["model.layers.w"][...], torch.stack(layers))
    state = tree([torch.zeros(2, 3), torch.zeros(2, 3)])
    state["model"]["iteration"] = 0
    bcp.load(tmp_path, state)
    assert [leaf.data.tolist() for chunk in state["model"]["chunks"] for leaf in chunk.values()] == [
        layer.tolist() for layer in layers
    ]
    assert state["model"]["iteration"] == 3


def test_places_in_numpys_integers_are_saved_and_loaded(tmp_path: Path) -> None:
    def tree(values: Tensor) -> dict[str, Any]:
        starts = np.cumsum([0, 1])  # as a program has them that adds up the lengths of its parts
        shape = (np.int64(4), 3)
        parts = zip((values[:1], values[1:]), starts, strict=True)
        return {"model": [sharded("w", part, global_shape=shape, global_offset=(at, 0)) for part, at in parts]}

    bcp.save(tmp_path, tree(numbers(4, 3)))
    loaded = torch.zeros(4, 3)
    bcp.load(tmp_path, tree(loaded))
    assert torch.equal(loaded, numbers(4, 3))


def test_a_model_loads_what_a_dict_saved_and_is_found_in_its_wrappers(tmp_path: Path) -> None:
    specs = [Spec("a", (4, 3)), Spec("b.scale", (), dtype=torch.bfloat16)]
    bcp.save(tmp_path, {"model": Model(specs, ONE, counting).sharded_state_dict()})
    model = Model(specs, ONE, zeros)
    bcp.load(tmp_path, {"model": Wrapper(Wrapper(model))}, "megatron")
    assert torch.equal(model.get_parameter("0"), counting("", (4, 3), torch.float32))


def test_a_module_that_hides_one_of_megatron_is_refused(tmp_path: Path) -> None:
    hiding = nn.ModuleDict({"a": Model([Spec("a", (2,))], ONE, counting), "b": nn.Linear(2, 2)})
    with pytest.raises(bcp.CheckpointSaveError, match="that holds Megatron's Model"):
        bcp.save(tmp_path, {"model": hiding})
    bcp.save(tmp_path, {"model": hiding}, "ddp")


def test_a_stage_that_hides_one_of_megatron_is_refused(tmp_path: Path) -> None:
    model = Model([Spec("a", (2,))], ONE, counting)
    for modules in ([nn.Sequential(model)], [model, nn.Linear(2, 2)]):
        stages = [SimpleNamespace(submod=module, stage_index=index) for index, module in enumerate(modules)]
        with pytest.raises(bcp.CheckpointSaveError, match="holds Megatron's Model"):
            bcp.save(tmp_path, {"model": stages})


def test_megatron_modules_in_a_list_with_others_are_refused_for_the_list(tmp_path: Path) -> None:
    """The text said that Megatron's own module had no sharded_state_dict()."""
    model = Model([Spec("a", (2,))], ONE, counting)
    for modules in ([nn.Linear(2, 2), model], [Wrapper(model), nn.Linear(2, 2)]):
        with pytest.raises(bcp.CheckpointSaveError, match="a list that holds Megatron's Model and modules"):
            bcp.save(tmp_path, {"model": modules})


def with_head() -> nn.Module:
    model = Wrapper(Model([Spec("a", (2,))], ONE, counting))
    model.head = nn.Parameter(torch.ones(2))
    return model


def averaged() -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(Model([Spec("a", (2,))], ONE, counting))


@pytest.mark.parametrize("make", [with_head, averaged])
def test_a_wrapper_that_holds_tensors_of_its_own_is_refused(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    for model in (make(), Wrapper(make())):
        with pytest.raises(bcp.CheckpointSaveError, match=r"(Wrapper|AveragedModel) without .* holds Megatron's Model"):
            bcp.save(tmp_path, {"model": model})


class BaseModule(nn.Module):
    """As Megatron's, whose method puts the names of children before their keys."""

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        found = {f"{prefix}{name}": sharded(f"{prefix}{name}", own) for name, own in self.named_parameters("", False)}
        for name, child in self.named_children():
            found |= child.sharded_state_dict(f"{prefix}{name}.")
        return found


class Core(BaseModule):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.extra = WithExtra(value)

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        extra = ShardedObject(f"{prefix}extra", self.extra.get_extra_state(), (1,), (0,))
        return {f"{prefix}weight": sharded(f"{prefix}weight", self.weight), f"{prefix}extra._extra_state": extra}


class OfBase(BaseModule):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class WithHead(OfBase):
    def __init__(self, module: nn.Module, value: float) -> None:
        super().__init__(module)
        self.head = nn.Parameter(torch.full((2,), value))

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        return self.module.sharded_state_dict(prefix) | {"head": sharded(f"{prefix}head", self.head)}


def test_a_wrapper_that_says_itself_what_is_saved_is_asked(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": OfBase(WithHead(Core(2.0), 7.0))})
    assert sorted(bcp.open(tmp_path)) == ["model.head", "model.weight"]
    model = WithHead(Core(0.0), 0.0)
    bcp.load(tmp_path, {"model": OfBase(model)})
    assert model.head.eq(7).all()
    assert model.module.weight.eq(2).all()
    assert model.module.extra.extra == 2.0


def test_a_method_that_a_wrapper_has_inherited_changes_no_key(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": OfBase(Core(2.0))})
    assert list(bcp.open(tmp_path)) == ["model.weight"]
    bcp.load(tmp_path, {"model": Core(0.0)})


class MegatronModule(nn.Module):
    """Has the name of Megatron's."""

    sharded_state_dict = BaseModule.sharded_state_dict


class DataParallel(MegatronModule):
    """As Megatron's, which calls its flat memory its buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.buffers = [object()]


def test_a_wrapper_of_megatron_may_hold_a_module_of_another_base(tmp_path: Path) -> None:
    model = Model([*HALF, Spec("positions", (3,), kind="buffer")], ONE, counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = {"model": DataParallel(model), "optimizer": optimizer}
    options = bcp.SaveOptions(snapshot="lazy")
    bcp.save(tmp_path, state, async_save=True, options=options).result()
    assert sorted(bcp.open(tmp_path)) == ["model.a.weight", "model.positions"]
    bcp.load(tmp_path, {"model": Model(model.specs.values(), ONE, zeros)})


class Bare(nn.Module):
    """Which only its wrapper describes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("positions", torch.ones(2))


class OfBare(DataParallel):
    def sharded_state_dict(self) -> dict[str, Any]:
        return {name: sharded(name, own) for name, own in self.module.state_dict(keep_vars=True).items()}


def test_a_wrapper_that_is_asked_itself_may_call_anything_its_buffers(tmp_path: Path) -> None:
    model = OfBare(Bare())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    options = bcp.SaveOptions(snapshot="lazy")
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer}, async_save=True, options=options).result()
    assert sorted(bcp.open(tmp_path)) == ["model.positions", "model.weight"]


ALIKE = [Spec("w", (4, 3)), Spec("scale", (), dtype=torch.bfloat16)]


def in_a_dict(first: nn.Module, second: nn.Module) -> Any:
    return {"student": first.sharded_state_dict(), "teacher": second.sharded_state_dict()}


def in_a_list(first: nn.Module, second: nn.Module) -> Any:
    return [first, second]


@pytest.mark.parametrize("together", [in_a_dict, in_a_list])
@pytest.mark.parametrize("specs", [ALIKE[:1], ALIKE[1:], HALF])
def test_two_models_of_one_name_are_refused(tmp_path: Path, together: Any, specs: list[Spec]) -> None:
    models = [Model(specs, ONE, source) for source in (counting, zeros)]
    with pytest.raises(bcp.CheckpointSaveError, match=rf"^model\.{specs[0].key} is the name of two tensors") as caught:
        bcp.save(tmp_path / "different", {"model": together(*models)})
    assert caught.value.kind == "unsupported_value"
    bcp.save(tmp_path / "tied", {"model": together(models[0], models[0])})
    nan = [Model(specs, ONE, lambda *given: counting(*given).mul(math.nan)) for _ in range(2)]
    bcp.save(tmp_path / "equal", {"model": together(*nan)})
    assert bcp.open(tmp_path / "equal")[f"model.{specs[0].key}"][...].isnan().all()


def test_copies_of_one_name_that_optimizers_keep_are_refused(tmp_path: Path) -> None:
    states = [trained(Float16Optimizer, source) for source in (counting, zeros)]
    with pytest.raises(bcp.CheckpointSaveError, match="the name of two tensors"):
        bcp.save(tmp_path, {"model": [state["model"] for state in states]})


def test_two_objects_of_one_name_are_refused(tmp_path: Path) -> None:
    first, equal, other = (Holder({"scale": torch.full((2,), value)}) for value in (1.0, 1.0, 2.0))
    bcp.save(tmp_path / "equal", {"model": [first, equal]})
    with pytest.raises(bcp.CheckpointSaveError, match=r"layers\.extra/shard_1_4 is the name of two objects"):
        bcp.save(tmp_path / "different", {"model": [first, other]})


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_factory_is_built_and_undone(tmp_path: Path, dim: int, is_copy: bool) -> None:
    whole = numbers(4, 6)
    bcp.save(tmp_path, {"model": {"x": factory(whole, dim=dim, is_copy=is_copy)}})
    assert torch.equal(bcp.open(tmp_path)["model.fc1"][...], whole)
    loaded = torch.zeros(4, 6)
    bcp.load(tmp_path, {"model": {"x": factory(loaded, dim=dim, is_copy=is_copy)}})
    assert torch.equal(loaded, whole)


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Holder(nn.Module):
    def __init__(self, extra: Any, replica_id: Any = (0, 0, 0)) -> None:
        super().__init__()
        self.child = WithExtra(extra)
        self.weight = nn.Parameter(torch.ones(2))
        self._replica_id = replica_id

    def sharded_state_dict(self) -> dict[str, Any]:
        extra = self.child.get_extra_state()
        return {
            "weight": sharded("weight", self.weight),
            "child._extra_state": ShardedObject("layers.extra", extra, (4,), (1,), self._replica_id),
            "seed": LocalNonpersistentObject(object()),
        }


def test_objects_go_back_to_the_modules_they_are_of(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": Holder({"scale": torch.tensor([2.0]), "steps": 3})})
    model = Holder(None)
    bcp.load(tmp_path, {"model": model})
    assert model.child.extra["steps"] == 3
    assert model.child.extra["scale"].item() == 2.0
    assert plain_leaves(bcp.open(tmp_path))["model.layers.extra/shard_1_4.steps"] == 3


def test_an_object_may_be_a_file_in_memory(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": Holder(io.BytesIO(b"scales"))})
    model = Holder(io.BytesIO())
    bcp.load(tmp_path, {"model": model})
    assert model.child.extra.getvalue() == b"scales"


def test_a_tensor_and_its_transposed_view_are_two(tmp_path: Path) -> None:
    square = numbers(3, 3)
    bcp.save(tmp_path, {"model": [sharded("a", square), sharded("b", square.t())]})
    assert torch.equal(bcp.open(tmp_path)["model.b"][...], square.t())


def test_what_is_excluded_of_an_object_stays(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": ShardedObject("extra", {"a": 1, "b": 2, "c": 3}, (1,), (0,))})
    target = ShardedObject("extra", {"a": 0, "b": 0}, (1,), (0,))
    report = bcp.load(tmp_path, {"model": target}, exclude=["*.b", "*.c"])
    assert target.data == {"a": 1, "b": 0}
    assert report.skipped == ["model.extra/shard_0_1.b", "model.extra/shard_0_1.c"]


def test_only_the_main_replica_of_an_object_is_saved(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": Holder(5, replica_id=(0, 0, 1))})
    assert list(bcp.open(tmp_path)) == ["model.weight"]
    model = Holder(7)
    with pytest.raises(bcp.CheckpointMismatchError, match="shard_1_4"):
        bcp.load(tmp_path, {"model": model})
    bcp.load(tmp_path, {"model": Holder(None)})


def narrower(tensor: ShardedTensor, **fields: Any) -> ShardedTensor:
    for name, value in fields.items():
        setattr(tensor, name, value)
    return tensor


def lossy(data: Tensor, build: Callable[[Tensor], list[Tensor]], merge: Callable[[Any], Tensor]) -> Any:
    def build_fn(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [sharded(f"{key}.{index}", part) for index, part in enumerate(build(tensor))]

    return ShardedTensorFactory("fc1", data, build_fn, merge)


WRONG = {
    "flattened": (lambda: narrower(sharded("w", numbers(4)), flattened_range=slice(0, 2)), "flattened_range"),
    "flattened factory": (lambda: narrower(factory(numbers(4, 2)), flattened_range=slice(0, 2)), "flattened_range"),
    "no data": (lambda: narrower(sharded("w", numbers(4)), data=None), "without data"),
    "other local shape": (lambda: narrower(sharded("w", numbers(4)), local_shape=(5,)), "local_shape"),
    "outside": (lambda: sharded("w", numbers(4), global_shape=(6,), global_offset=(3,)), "not inside"),
    "negative": (lambda: sharded("w", numbers(4), global_shape=(6,), global_offset=(-1,)), "not inside"),
    "lacks an axis": (lambda: sharded("w", numbers(4), global_shape=(2, 4), global_offset=(0, 0)), "not inside"),
    "part of the data": (lambda: lossy(numbers(4), lambda t: [t[:3]], torch.cat), "cannot be undone"),
    "data twice": (lambda: lossy(numbers(4), lambda t: [t[:2], t[1:3]], torch.cat), "cannot be undone"),
    "strided data twice": (lambda: lossy(numbers(4), lambda t: [t[::2], t[::2]], torch.cat), "cannot be undone"),
    "other order": (
        lambda: lossy(numbers(4), lambda t: [t[:2].clone(), t[2:].clone()], lambda parts: torch.cat(parts[::-1])),
        "cannot be undone",
    ),
    "no tensors": (lambda: lossy(numbers(4), lambda _: [], torch.cat), "builds other things"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_itself_is_refused_by_name(tmp_path: Path, case: str) -> None:
    make, text = WRONG[case]
    with pytest.raises(bcp.CheckpointSaveError, match=text) as caught:
        bcp.save(tmp_path, {"model": {"x": make()}})
    assert caught.value.kind == "unsupported_value"
    assert "model." in str(caught.value)


def test_one_rank_may_not_hold_parts_that_overlap(tmp_path: Path) -> None:
    parts = [sharded("w", numbers(3), global_shape=(5,), global_offset=(at,)) for at in (0, 2)]
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.w"):
        bcp.save(tmp_path, {"model": {"a": parts[0], "b": parts[1]}})


def test_one_rank_may_not_give_a_tensor_two_shapes(tmp_path: Path) -> None:
    parts = [sharded("w", numbers(3), global_shape=(size,), global_offset=(at,)) for size, at in ((6, 0), (7, 3))]
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.w"):
        bcp.save(tmp_path, {"model": {"a": parts[0], "b": parts[1]}})


@pytest.mark.parametrize(("rows", "stored_rows"), [(8, 5), (5, 8), (8, 1)])
def test_a_padded_tensor_takes_what_both_have_and_zeros(tmp_path: Path, rows: int, stored_rows: int) -> None:
    stored = numbers(stored_rows, 2).add(1)
    bcp.save(tmp_path, {"model": {"x": sharded("w", stored, allow_shape_mismatch=True)}})
    parts = [torch.full((2, 2), 9.0), torch.full((rows - 2, 2), 9.0)]
    tree = {
        str(at): sharded("w", part, global_shape=(rows, 2), global_offset=(at, 0), allow_shape_mismatch=True)
        for part, at in zip(parts, (0, 2), strict=True)
    }
    bcp.load(tmp_path, {"model": tree})
    wanted = torch.zeros(rows, 2)
    wanted[:stored_rows] = stored[:rows]
    assert torch.equal(torch.cat(parts), wanted)


def test_rows_beyond_a_checkpoint_that_is_refused_stay(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"x": sharded("w", numbers(2, 2).bfloat16(), allow_shape_mismatch=True)}})
    loaded = torch.full((4, 2), 9.0)
    with pytest.warns(UserWarning, match="nothing of the state was filled"):
        bcp.load(tmp_path, {"model": {"x": sharded("w", loaded, allow_shape_mismatch=True)}}, strict=False)
    assert loaded.eq(9).all()


def test_only_rows_are_padding(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"x": sharded("w", numbers(4, 3), allow_shape_mismatch=True)}})
    loaded = torch.full((4, 2), 9.0)
    with pytest.raises(bcp.CheckpointMismatchError, match="shape"):
        bcp.load(tmp_path, {"model": {"x": sharded("w", loaded, allow_shape_mismatch=True)}})
    assert loaded.eq(9).all()


def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups)


def trained(optimizer_class: Any, source: Any = counting, specs: list[Spec] = HALF) -> dict[str, Any]:
    model = Model(specs, ONE, source)
    parameters = [parameter for parameter, _ in model.trained()]
    grid = [ONE] if optimizer_class is DistributedOptimizer else []
    optimizer = optimizer_class([(parameters, {"lr": 0.1})], adam, *grid)
    for parameter, held, _ in optimizer.held():
        with torch.no_grad():
            held.copy_(source("", parameter.shape, torch.float32).reshape(held.shape))
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("optimizer_class", [DistributedOptimizer, Float16Optimizer])
def test_what_is_kept_twice_is_stored_once_and_precisely(tmp_path: Path, optimizer_class: Any) -> None:
    bcp.save(tmp_path, trained(optimizer_class))
    stored = bcp.open(tmp_path)["model.a.weight"][...]
    assert torch.equal(stored, counting("", (4, 3), torch.float32))
    state = trained(optimizer_class, zeros)
    report = bcp.load(tmp_path, state)
    assert not report.cast
    assert torch.equal(state["model"].get_parameter("0"), stored.bfloat16())
    [(_, copy, _)] = state["optimizer"].held()
    assert torch.equal(copy.view(4, 3), stored)


def test_a_parameter_may_know_its_copy_itself(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": trained(Float16Optimizer)["model"]})
    state = trained(Float16Optimizer, zeros)
    bcp.load(tmp_path, {"model": state["model"]})
    [(_, copy, _)] = state["optimizer"].held()
    assert torch.equal(copy, counting("", (4, 3), torch.float32))


def test_a_low_precision_model_alone_takes_full_precision_with_cast(tmp_path: Path) -> None:
    """A fine-tuning starts so: from the model of a checkpoint that has the optimizer's copies."""
    bcp.save(tmp_path, trained(DistributedOptimizer))
    model = Model(HALF, ONE, zeros)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"cast=True converts"):
        bcp.load(tmp_path, {"model": model})
    bcp.load(tmp_path, {"model": model}, cast=True)
    assert torch.equal(model.get_parameter("0"), counting("", (4, 3), torch.bfloat16))


def test_a_copy_is_not_made_of_less_precise_values_unasked(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": Model(HALF, ONE, counting)})
    state = trained(DistributedOptimizer, zeros)
    with pytest.raises(bcp.CheckpointMismatchError, match="bfloat16 in the checkpoint, float32 in the state"):
        bcp.load(tmp_path, {"model": state["model"], "optimizer": state["optimizer"]}, exclude="optimizer*")


@pytest.mark.parametrize("optimizer_class", [DistributedOptimizer, Float16Optimizer])
def test_the_copy_of_what_is_refused_is_not_loaded_either(tmp_path: Path, optimizer_class: Any) -> None:
    bcp.save(tmp_path, {"model": Model(HALF, ONE, counting)})
    state = trained(optimizer_class, zeros)
    with pytest.warns(UserWarning, match="nothing of the state was filled"):
        report = bcp.load(tmp_path, state, strict=False, include="model.*")
    assert report.num_tensors == 0
    assert "bfloat16 in the checkpoint" in report.mismatched[0]
    assert state["model"].get_parameter("0").eq(0).all()
    [(_, copy, _)] = state["optimizer"].held()
    assert copy.eq(0).all()


def test_an_optimizer_of_torch_may_train_a_model_of_megatron(tmp_path: Path) -> None:
    def state(source: Any, average: float) -> dict[str, Any]:
        layers = [Spec("w", (4, 3), (layer, 3), tp_axis=0, is_swiglu=True) for layer in range(3)]
        model = Model([*layers, Spec("b", (3,))], ONE, source)
        optimizer = torch.optim.SGD(model.parameters(), lr=average, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, average).detach()
        return {"model": model, "optimizer": optimizer}

    bcp.save(tmp_path, state(counting, 0.25))
    assert bcp.open(tmp_path)["optimizer.state.w.momentum_buffer"][1].eq(0.25).all()
    loaded = state(zeros, 0.5)
    bcp.load(tmp_path, loaded)
    assert loaded["optimizer"].param_groups[0]["lr"] == 0.25
    assert all(each["momentum_buffer"].eq(0.25).all() for each in loaded["optimizer"].state.values())


def test_a_grad_scaler_comes_from_megatron_and_others_do_without(tmp_path: Path) -> None:
    def of_torch() -> dict[str, Any]:
        model = nn.Module()
        model.register_parameter("a", nn.Parameter(torch.ones(3)))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def of_megatron(scale: float) -> dict[str, Any]:
        state = trained(Float16Optimizer, specs=[Spec("a", (3,), dtype=torch.float16)])
        state["optimizer"].grad_scaler = GradScaler(scale)
        return state

    bcp.save(tmp_path / "torch", of_torch())
    state = of_megatron(1024.0)
    bcp.load(tmp_path / "torch", state)
    assert state["optimizer"].grad_scaler.scale.item() == 1024
    bcp.save(tmp_path / "megatron", state)
    bcp.load(tmp_path / "megatron", of_torch())
    state = of_megatron(2.0)
    bcp.load(tmp_path / "megatron", state)
    assert state["optimizer"].grad_scaler.scale.item() == 1024


@pytest.mark.parametrize("framework", ["ddp", "fsdp", "deepspeed"])
def test_an_optimizer_of_megatron_is_not_reduced_to_its_state_dict(tmp_path: Path, framework: str) -> None:
    state = trained(DistributedOptimizer)
    state["optimizer"].state_dict = lambda: {"param_groups": [{"lr": 0.1}]}
    for optimizer in (state["optimizer"], ChainedOptimizer([state["optimizer"]])):
        with pytest.raises(bcp.CheckpointSaveError, match='framework="auto" or "megatron"') as caught:
            bcp.save(tmp_path, state | {"optimizer": optimizer}, framework)
        assert caught.value.kind == "unsupported_value"


def test_an_optimizer_needs_its_model(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match="that no module of the state has"):
        bcp.save(tmp_path, {"optimizer": trained(DistributedOptimizer)["optimizer"]})


def test_parts_of_a_parameter_have_one_count_of_steps(tmp_path: Path) -> None:
    specs = [Spec("w", (4, 3), (layer, 2)) for layer in (0, 1)]
    state = trained(DistributedOptimizer, specs=specs)
    inner = state["optimizer"].optimizer
    for index, held in enumerate(inner.param_groups[0]["params"]):
        inner.state[held] = {"step": torch.tensor(float(index)), "exp_avg": torch.zeros_like(held)}
    with pytest.raises(bcp.CheckpointSaveError, match="for one part of a parameter"):
        bcp.save(tmp_path, state)


def test_parts_of_a_parameter_count_their_steps_apart(tmp_path: Path) -> None:
    specs = [Spec("w", (4, 3), (layer, 2)) for layer in (0, 1)]
    state, fresh = trained(DistributedOptimizer, specs=specs), trained(DistributedOptimizer, specs=specs)
    inner = state["optimizer"].optimizer
    for held in inner.param_groups[0]["params"]:
        inner.state[held] = {"step": torch.tensor(5.0), "exp_avg": torch.zeros_like(held)}
    bcp.save(tmp_path, state)
    bcp.load(tmp_path, fresh)
    first, second = (of_one["step"] for of_one in fresh["optimizer"].optimizer.state.values())
    first += 1
    assert (first.item(), second.item()) == (6.0, 5.0)


def test_parts_of_a_parameter_have_one_set_of_hyperparameters(tmp_path: Path) -> None:
    model = Model([Spec("w", (4, 3), (layer, 2)) for layer in (0, 1)], ONE, counting)
    groups = [([parameter], {"lr": 0.1 + index}) for index, (parameter, _) in enumerate(model.trained())]
    optimizer = DistributedOptimizer(groups, adam, ONE)
    with pytest.raises(bcp.CheckpointSaveError, match="different hyperparameters"):
        bcp.save(tmp_path, {"model": model, "optimizer": optimizer})


def experts(num_ranks: int, expert_lr: float = 0.1) -> dict[str, Any]:
    """A router and an expert, in the groups that Megatron makes for so many expert-parallel ranks."""
    model = Model([Spec("router.weight", (2, 3)), Spec("expert.weight", (2, 3))], ONE, counting)
    router, expert = model.parameters()
    flags = {"is_expert_parallel": False}, {"is_expert_parallel": num_ranks > 1}
    groups = [([router], {"lr": 0.1, **flags[0]}), ([expert], {"lr": expert_lr, **flags[1]})]
    if num_ranks == 1 and expert_lr == 0.1:
        groups = [([router, expert], groups[0][1])]
    return {"model": model, "optimizer": DistributedOptimizer(groups, torch.optim.Adam, ONE)}


def rates_and_flags(state: dict[str, Any]) -> list[tuple[float, bool]]:
    groups = state["optimizer"].optimizer.param_groups
    return [(group["lr"], group["is_expert_parallel"]) for group in groups]


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1)])
def test_the_flag_of_groups_that_expert_ranks_divide_stays_as_the_layout_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, loaded: int, is_old: bool
) -> None:
    """Also where a checkpoint of an earlier version holds it."""
    with monkeypatch.context() as patch:
        if is_old:
            patch.setattr(hyperparameters, "_NOT_HYPERPARAMETERS", {"params", "param_names"})
        bcp.save(tmp_path, experts(saved))
    state = experts(loaded)
    for group in state["optimizer"].optimizer.param_groups:
        group["lr"] = 0.5
    bcp.load(tmp_path, state)
    assert rates_and_flags(state) == [(0.1, False), (0.1, True)][:loaded]
    held = any("is_expert_parallel" in fqn for fqn in plain_leaves(bcp.open(tmp_path)))
    assert held == is_old


def test_other_hyperparameters_of_experts_are_compared(tmp_path: Path) -> None:
    bcp.save(tmp_path, experts(2, expert_lr=0.2))
    with pytest.raises(bcp.CheckpointMismatchError, match="different values of 'lr'"):
        bcp.load(tmp_path, experts(1))


def test_flat_memory_of_strided_parts_is_refused(tmp_path: Path) -> None:
    model = Model([Spec("fc1", (4, 6))], ONE, counting)
    model.sharded_state_dict = lambda: {"x": factory(model.get_parameter("0"), dim=1)}
    optimizer = DistributedOptimizer([([model.get_parameter("0")], {})], adam, ONE)
    bcp.save(tmp_path / "model", {"model": model})
    with pytest.raises(bcp.CheckpointSaveError, match="not a run of its parameter's memory"):
        bcp.save(tmp_path / "both", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("seed", range(20))
def test_flat_shards_of_any_length_are_parts_of_a_parameter(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def any_of(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    shape = (2 * any_of(1, 5), *(any_of(1, 5) for _ in range(any_of(0, 3))))
    grid = Grid(1, 1, 1)
    model = Model([Spec("w", shape, (1, 3), tp_axis=0, is_swiglu=bool(any_of(0, 2)))], grid, counting)
    parameter = model.get_parameter("0")
    whole = torch.zeros(3, *shape)
    cuts = sorted({0, parameter.numel(), *(any_of(0, parameter.numel() + 1) for _ in range(any_of(0, 6)))})
    for start, end in itertools.pairwise(cuts):
        entry = MegatronEntry("model", [model])
        held = parameter.detach().view(-1)[start:end].clone()
        entry.link([OptimizedElements(parameter, held, start, "copy")])
        for shard in entry.collect().shards:
            place = tuple(slice(at, at + length) for at, length in zip(*shard.region, strict=True))
            assert whole[place].eq(0).all()
            whole[place] = shard.tensor
    assert torch.equal(whole[1], parameter)
    assert whole[::2].eq(0).all()


def precision_aware(optimizer: Any) -> None:
    optimizer.shard_fp32_from_float16_groups = [[None]]


def offloaded(optimizer: Any) -> None:
    optimizer.optimizer.sub_optimizers = []


def of_megatron_fsdp(optimizer: Any) -> None:
    optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [(precision_aware, "precision-aware"), (offloaded, "does not keep its state"), (of_megatron_fsdp, "Megatron-FSDP")],
)
def test_optimizers_that_keep_their_state_elsewhere_are_refused(tmp_path: Path, change: Any, text: str) -> None:
    state = trained(DistributedOptimizer)
    change(state["optimizer"])
    with pytest.raises(bcp.CheckpointSaveError, match=text):
        bcp.save(tmp_path, state)


def test_an_optimizer_with_nothing_to_optimize_has_no_state(tmp_path: Path) -> None:
    model = Model([Spec("a", (2,), kind="frozen")], ONE, counting)
    stub = DistributedOptimizer([([nn.Parameter(torch.ones(1))], {})], adam, ONE)
    stub.is_stub_optimizer = True
    bcp.save(tmp_path, {"model": model, "optimizer": stub})
    bcp.load(tmp_path, {"model": model, "optimizer": stub})


def test_a_framework_of_which_nothing_is_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match=r"found were model \(a Linear\), step \(a int\)"):
        bcp.save(tmp_path, {"model": nn.Linear(2, 2), "step": 3}, "megatron")


def test_a_lazy_save_keeps_what_an_optimizer_changes_at_once(tmp_path: Path) -> None:
    state = trained(DistributedOptimizer)
    inner = state["optimizer"].optimizer
    [(_, copy, _)] = state["optimizer"].held()
    before = copy.clone()
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(snapshot="lazy"))
    copy.grad = torch.ones_like(copy)
    inner.step()
    handle.result()
    assert torch.equal(bcp.open(tmp_path)["model.a.weight"][...].view(-1), before)
