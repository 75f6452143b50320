"""DTensors of tensor subclasses: inner tensors are cut as the outer one is, each in its own lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from low_bit import Corrected, Flattened, Int8Weight, LowBitAdamW, LowBitSGD, corrected, int8, parts, same
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from distributed.workers import WorkerError, WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
SHAPE = (5, 16)
"""The last of four ranks has no rows."""
BLOCK = 4


class Layout(NamedTuple):
    mesh: tuple[int, ...]
    placements: tuple[int | None, ...]
    """The dimension that each mesh axis cuts, None where it has copies; one process has no DTensors."""

    @property
    def world_size(self) -> int:
        return int(torch.tensor(self.mesh).prod())


LAYOUTS = {
    "one": Layout((1,), ()),
    "rows by 3": Layout((3,), (0,)),
    "rows by 4": Layout((4,), (0,)),
    "columns by 2": Layout((2,), (1,)),
    "both": Layout((2, 2), (0, 1)),
    "copies of rows": Layout((2, 2), (None, 0)),
}


class Case:
    """What a rank holds of low-bit tensors, in one layout."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self._mesh: DeviceMesh | None = None
        if layout.placements:
            self._mesh = init_device_mesh("cpu", layout.mesh)
        self._placements = [Replicate() if dim is None else Shard(dim) for dim in layout.placements]
        model = nn.Module()
        model.plain = nn.Parameter(self._spread(torch.full(SHAPE, float(seed))))
        model.weight = nn.Parameter(self._spread(int8(seed, SHAPE, block=BLOCK)), requires_grad=False)
        model.nested = nn.Parameter(self._spread(corrected(seed + 1, SHAPE)), requires_grad=False)
        self.model = model
        self.optimizer = LowBitAdamW([model.plain], lr=0.5)
        self._seed = seed

    def _spread(self, tensor: Any) -> Any:
        """This rank's part, cut by torch out of each of the inner tensors alone."""
        if self._mesh is None:
            return tensor
        if type(tensor) is Tensor:
            return distribute_tensor(tensor, self._mesh, self._placements, src_data_rank=None)
        local = self._local(tensor)
        return DTensor.from_local(
            local, self._mesh, self._placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def _local(self, tensor: Any) -> Any:
        if type(tensor) is Tensor:
            return distribute_tensor(tensor, self._mesh, self._placements, src_data_rank=None)._local_tensor.clone()
        if isinstance(tensor, Corrected):
            return Corrected(self._local(tensor.coarse), self._local(tensor.rest))
        return Int8Weight(self._local(tensor.values), self._local(tensor.scale), tensor.block)

    def fill_optimizer(self) -> None:
        moments = {"exp_avg": int8(self._seed + 2, SHAPE, block=BLOCK), "exp_avg_sq": corrected(self._seed + 3, SHAPE)}
        spread = {name: self._spread(moment) for name, moment in moments.items()}
        self.optimizer.state[self.model.plain] = {"step": torch.tensor(float(self._seed)), **spread}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, Tensor]:
        state = self.optimizer.state[self.model.plain]
        return {**dict(self.model.named_parameters()), **{name: state[name] for name in ("exp_avg", "exp_avg_sq")}}

    def differs_from(self, other: Case) -> list[str]:
        expected = other.tensors()
        found = [name for name, tensor in self.tensors().items() if not alike(tensor, expected[name])]
        return found + (["step"] if self.optimizer.state[self.model.plain]["step"] != other._seed else [])


def alike(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, DTensor) != isinstance(b, DTensor) or a.shape != b.shape or a.stride() != b.stride():
        return False
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        if a.placements != b.placements:
            return False
        a, b = a._local_tensor, b._local_tensor
    return same(a.detach() if type(a) is nn.Parameter else a, b.detach() if type(b) is nn.Parameter else b)


def save_case(rank: int, world_size: int, path: str, name: str) -> None:
    case = Case(LAYOUTS[name], 1)
    case.fill_optimizer()
    bcp.save(path, case.state, options=OPTIONS)


def load_cases(rank: int, world_size: int, root: str, name: str) -> dict[str, list[str]]:
    """By source: what is wrong on this rank, in a fresh optimizer and in one whose state is filled in its place."""
    expected = Case(LAYOUTS[name], 1)
    expected.fill_optimizer()
    problems: dict[str, list[str]] = {}
    for source in LAYOUTS:
        case = Case(LAYOUTS[name], 50)
        bcp.load(f"{root}/{source}", case.state)
        problems[source] = case.differs_from(expected)
        case = Case(LAYOUTS[name], 50)
        case.fill_optimizer()
        before = case.tensors()
        bcp.load(f"{root}/{source}", case.state)
        problems[source] += case.differs_from(expected)
        problems[source] += [name for name, tensor in case.tensors().items() if tensor is not before[name]]
    return problems


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("subclasses"))
    for name, layout in LAYOUTS.items():
        workers.run(save_case, f"{root}/{name}", name, world_size=layout.world_size)
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_loads_what_each_layout_has_saved(workers: WorkerPool, saved: str, name: str) -> None:
    found = workers.run(load_cases, saved, name, world_size=LAYOUTS[name].world_size)
    assert found == [{source: [] for source in LAYOUTS}] * LAYOUTS[name].world_size


def test_every_layout_writes_the_same_tensors_and_facts(saved: str) -> None:
    checkpoints = [bcp.open(f"{saved}/{name}") for name in LAYOUTS]
    for path, part in parts(int8(1, SHAPE, block=BLOCK), "model.weight").items():
        assert all(torch.equal(checkpoint[path][...], part) for checkpoint in checkpoints)
    assert all(checkpoint.objects == checkpoints[0].objects for checkpoint in checkpoints)
    assert checkpoints[0].objects["model"]["weight.@subclass"][0]["shape"] == list(SHAPE)


def resume_plain_state(rank: int, world_size: int, path: str, name: str) -> bool:
    """Saves where `name` is the first layout; returns True if a fresh optimizer gets the state cut as its parameter."""
    case = Case(LAYOUTS[name], 1)
    state = case._spread(torch.arange(80.0).view(SHAPE))
    optimizer = torch.optim.SGD([("weight", case.model.weight)])
    if name == "rows by 3":
        optimizer.state[case.model.weight] = {"momentum_buffer": state}
        bcp.save(path, {"optimizer": optimizer}, options=OPTIONS)
        optimizer.state.clear()
    bcp.load(path, {"optimizer": optimizer})
    return alike(optimizer.state[case.model.weight]["momentum_buffer"], state)


def test_plain_state_of_a_subclass_in_a_fresh_optimizer(workers: WorkerPool, tmp_path: Path) -> None:
    for name in ("rows by 3", "rows by 4", "both", "one"):
        world_size = LAYOUTS[name].world_size
        assert workers.run(resume_plain_state, str(tmp_path), name, world_size=world_size) == [True] * world_size


def load_into_meta(rank: int, world_size: int, root: str, name: str) -> list[bool]:
    expected, case = Case(LAYOUTS[name], 1), Case(LAYOUTS[name], 50)
    for of_module, parameter in list(case.model.named_parameters()):
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
        meta = local.to("meta") if type(local) is Tensor else local.mapped(on_meta)
        if isinstance(parameter, DTensor):
            meta = DTensor(meta, parameter._spec, requires_grad=False)
        setattr(case.model, of_module, nn.Parameter(meta, requires_grad=parameter.requires_grad))
    assert all(parameter.is_meta for parameter in case.model.parameters())
    bcp.load(f"{root}/rows by 3", {"model": case.model})
    pairs = zip(case.model.parameters(), expected.model.parameters(), strict=True)
    return [alike(a, b) for a, b in pairs]


def on_meta(tensor: Any) -> Any:
    return tensor.mapped(on_meta) if isinstance(tensor, Flattened) else tensor.to("meta")


@pytest.mark.parametrize("name", ["one", "rows by 4", "both"])
def test_modules_on_the_meta_device_are_given_memory(workers: WorkerPool, saved: str, name: str) -> None:
    found = workers.run(load_into_meta, saved, name, world_size=LAYOUTS[name].world_size)
    assert found == [[True] * 3] * LAYOUTS[name].world_size


class Tabled(Flattened):
    """Blocks of the flat tensor, and a table that all elements are looked up in, as low-bit optimizer states have."""

    inner = ("values", "scale", "qmap")

    def __init__(self, values: Tensor, scale: Tensor, qmap: Tensor) -> None:
        self.values, self.scale, self.qmap = values, scale, qmap

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, qmap: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __tensor_flatten__(self) -> Any:
        return ["values", "scale", "qmap"], [True, self.shape]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        assert context == [True, inner["values"].shape] == [True, size]
        return cls(inner["values"], inner["scale"], inner["qmap"])


def tabled(seed: int, rank: int, world_size: int) -> Any:
    """This rank's rows of 8, each of 16 columns and one block of 8 elements after the other."""
    whole = int8(seed, (8, 16), block=8)
    rows = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    return Tabled(whole.values[rows].clone(), whole.scale[rows].reshape(-1).clone(), torch.arange(16.0) + seed)


def resume_tabled(rank: int, world_size: int, path: str, source: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (world_size,))

    def spread(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)

    def optimizer(state: Any) -> torch.optim.Optimizer:
        parameter = nn.Parameter(distribute_tensor(torch.zeros(8, 16), mesh, [Shard(0)], src_data_rank=None))
        made = LowBitSGD([("weight", parameter)])
        if state is not None:
            made.state[parameter] = {"momentum": state}
        return made

    if source == world_size:
        bcp.save(path, {"optimizer": optimizer(spread(tabled(1, rank, world_size)))}, options=OPTIONS)
    found = []
    for own in (None, spread(tabled(5, rank, world_size))):
        target = optimizer(own)
        bcp.load(path, {"optimizer": target})
        (state,) = target.state.values()
        found.append(alike(state["momentum"], spread(tabled(1, rank, world_size))))
    return found


def test_blocks_of_the_flat_tensor_and_tables(workers: WorkerPool, tmp_path: Path) -> None:
    for source in (2, 4):
        path = str(tmp_path / str(source))
        for world_size in (source, 6 - source, 1):
            found = workers.run(resume_tabled, path, source, world_size=world_size)
            assert found == [[True, True]] * world_size


def save_columns(rank: int, world_size: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = DTensor.from_local(tabled(1, 0, 1), mesh, [Shard(1)], run_check=False)
    bcp.save(path, {"it": {"w": tensor}}, options=OPTIONS)


def test_a_part_whose_region_cannot_be_said_is_refused_by_name(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as error:
        workers.run(save_columns, str(tmp_path), world_size=2)
    for of_rank in error.value.errors.values():
        assert isinstance(of_rank, bcp.CheckpointSaveError)
        assert of_rank.kind == "unsupported_value"
        assert "it.w.scale is part of a DTensor, [16] for [8, 16] of [8, 32]" in str(of_rank)


def save_scale_for_each_rank(rank: int, world_size: int, path: str) -> list[str]:
    """One scale for all rows of a rank: a block of as many rows, which no other number of ranks has."""
    mesh = init_device_mesh("cpu", (world_size,))
    local = Int8Weight(torch.zeros(4, 8, dtype=torch.int8), torch.ones(1, 2), BLOCK)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    bcp.save(path, {"it": {"w": tensor}}, options=OPTIONS)
    bcp.load(path, {"it": {"w": tensor}})
    texts = []
    for rows in (2, 1):
        local = Int8Weight(torch.zeros(8 // rows, 8, dtype=torch.int8), torch.ones(1, 2), BLOCK)
        placements = [Shard(0)] if rows == 2 else [Replicate()]
        tensor = DTensor.from_local(local, mesh, placements, run_check=False)
        try:
            bcp.load(path, {"it": {"w": tensor}})
        except bcp.CheckpointMismatchError as error:
            texts.append(str(error))
    return texts


def test_blocks_of_another_size_are_a_mismatch(workers: WorkerPool, tmp_path: Path) -> None:
    for texts in workers.run(save_scale_for_each_rank, str(tmp_path), world_size=2):
        assert len(texts) == 1
        assert "it.w.scale: shape [2, 2] in the checkpoint, [1, 2] in the state" in texts[0]


class Rows(Flattened):
    """One scale for some rows each; the last of them may be for fewer."""

    inner = ("values", "scale")

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> Any:
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Any:
        return cls(inner["values"], inner["scale"])


def optimizer_of_rows(world_size: int, num_rows: int, block: int = 0) -> torch.optim.Optimizer:
    """With state where there is a block."""
    mesh = init_device_mesh("cpu", (world_size,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(num_rows, 4), mesh, [Shard(0)], src_data_rank=None))
    optimizer = LowBitSGD([("weight", weight)])
    if block:
        num_local = len(weight._local_tensor)
        local = Rows(torch.ones(num_local, 4, dtype=torch.int8), torch.ones(-(-num_local // block), 1))
        optimizer.state[weight] = {"momentum": DTensor(local, weight._spec, requires_grad=False)}
    return optimizer


def save_rows(rank: int, world_size: int, path: str, num_rows: int, block: int) -> None:
    bcp.save(path, {"optimizer": optimizer_of_rows(world_size, num_rows, block)}, options=OPTIONS)


def load_rows(rank: int, world_size: int, path: str, num_rows: int) -> str:
    try:
        bcp.load(path, {"optimizer": optimizer_of_rows(world_size, num_rows)})
    except bcp.CheckpointMismatchError as error:
        return str(error)
    return "loaded"


def test_a_shard_that_ends_within_a_block_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as error:
        workers.run(save_rows, str(tmp_path / "cut"), 6, 2, world_size=2)
    for of_rank in error.value.errors.values():
        assert "optimizer.state.weight.momentum.scale is part of a DTensor, [2, 1] for [3, 4] of [6, 4]" in str(of_rank)
    workers.run(save_rows, str(tmp_path / "ends with blocks"), 8, 2, world_size=2)
    for world_size in (1, 2, 3, 4):
        for text in workers.run(load_rows, str(tmp_path / "ends with blocks"), 8, world_size=world_size):
            assert (text == "loaded") == (world_size != 3), text


def test_state_is_not_built_where_shards_end_within_blocks(workers: WorkerPool, tmp_path: Path) -> None:
    """Blocks of 3 rows, 4 of them: each of 2 ranks would have 2 scales, and the last has other rows than those."""
    workers.run(save_rows, str(tmp_path), 10, 3, world_size=1)
    for text in workers.run(load_rows, str(tmp_path), 10, world_size=2):
        assert "cannot be cut as its parameter is" in text


class Divided(Tabled):
    """Cannot be made of nothing: how many elements a scale is for is found by division."""

    def __init__(self, values: Tensor, scale: Tensor, qmap: Tensor) -> None:
        super().__init__(values, scale, qmap)
        self.block = values.numel() // scale.numel()


def resume_beside_nothing(rank: int, world_size: int, path: str, mesh_size: int) -> list[bool]:
    mesh = DeviceMesh("cpu", list(range(mesh_size)))

    def make(value: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(distribute_tensor(torch.zeros(2, 16), mesh, [Shard(0)], src_data_rank=None))
        optimizer = LowBitSGD([("weight", weight)])
        local = weight._local_tensor
        if value and local.numel():
            codes = torch.full(local.shape, value, dtype=torch.int8)
            state = Divided(codes, torch.full((2 * len(local),), float(value)), torch.arange(4.0))
            optimizer.state[weight] = {"momentum": DTensor(state, weight._spec, requires_grad=False)}
        return weight, optimizer

    bcp.save(path, {"optimizer": make(3)[1]}, options=OPTIONS)
    weight, optimizer = make(0)
    found = []
    for _ in range(2):
        bcp.load(path, {"optimizer": optimizer})
        local = optimizer.state[weight]["momentum"]._local_tensor
        found.append(not local.numel() or bool((local.values == 3).all() and (local.scale == 3).all()))
    return found


@pytest.mark.parametrize("mesh_size", [2, 3], ids=["off the mesh", "without elements"])
def test_a_rank_that_holds_nothing_loads_twice(workers: WorkerPool, tmp_path: Path, mesh_size: int) -> None:
    found = workers.run(resume_beside_nothing, str(tmp_path), mesh_size, world_size=3)
    assert found == [[True, True]] * 3


def load_blocks_as_large_as_shards(rank: int, world_size: int, path: str) -> bool:
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = []
    for rows, placement, value in ((6, Replicate(), 1), (2, Shard(0), 0)):
        local = Int8Weight(torch.full((rows, 4), value, dtype=torch.int8), torch.ones(rows, 1), 4, [2, 4])
        tensors.append(DTensor.from_local(local, mesh, [placement], run_check=False))
    bcp.save(path, {"it": {"w": tensors[0]}}, options=OPTIONS)
    bcp.load(path, {"it": {"w": tensors[1]}})
    return bool(tensors[1]._local_tensor.values.all())


def test_a_list_that_equals_the_shape_of_a_shard_is_no_shape(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(load_blocks_as_large_as_shards, str(tmp_path), world_size=3) == [True] * 3
