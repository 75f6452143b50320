"""Models and optimizers that lie as Megatron's do, saved and loaded on any number of ranks along each axis: what
arrives is bit-equal to a truth that the library under test has no part in.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron_like import (
    ChainedOptimizer,
    DistributedOptimizer,
    Float16Optimizer,
    GradScaler,
    Grid,
    Model,
    Spec,
    Wrapper,
    full_shape,
    layout_of,
    sharded,
)
from torch import Tensor

import bytecheckpoint as bcp
from distributed import truth
from distributed.workers import WorkerPool

LAYERS, WIDTH, HIDDEN, VOCABULARY = 3, 6, 10, 37
GRIDS = {
    "single": Grid(1, 1, 1),
    "pp2": Grid(1, 2, 1),
    "tp3": Grid(3, 1, 1),
    "dp3": Grid(1, 1, 3),
    "tp2_pp2_dp2": Grid(2, 2, 2),
}


class Kind(NamedTuple):
    """What kind of model and optimizer it is."""

    is_stacked: bool = True
    dtype: torch.dtype = torch.bfloat16
    is_distributed: bool = True
    is_tied: bool = False
    bucket_size: int | None = None
    num_chunks: int = 1


KINDS = {
    "bf16_distributed": Kind(),
    "bf16_buckets_tied": Kind(bucket_size=150, is_tied=True),
    "fp32_distributed": Kind(dtype=torch.float32, is_stacked=False),
    "bf16_replicated": Kind(is_distributed=False),
    "bf16_chunks": Kind(num_chunks=2, is_stacked=False),
}


def grids_of(kind: str) -> tuple[str, ...]:
    return tuple(GRIDS) if kind == "bf16_distributed" else ("dp3", "tp2_pp2_dp2")


CELLS = [(source, to, kind) for kind in KINDS for source in grids_of(kind) for to in grids_of(kind)]


def chunks_of(grid: Grid, kind: Kind) -> list[list[Spec]]:
    """What each chunk of this rank has: layers go round over the stages, chunk by chunk."""
    num_stages = grid.pp * kind.num_chunks
    by_stage = torch.arange(LAYERS).tensor_split(num_stages)
    return [
        list(_specs(grid, kind, chunk * grid.pp + grid.pp_rank, num_stages, by_stage))
        for chunk in range(kind.num_chunks)
    ]


def _specs(grid: Grid, kind: Kind, stage: int, num_stages: int, by_stage: Sequence[Tensor]) -> Iterator[Spec]:
    padded_rows = -(-VOCABULARY // (8 * grid.tp)) * 8 * grid.tp
    vocabulary = Spec("", (VOCABULARY, WIDTH), tp_axis=0, padded_rows=padded_rows, dtype=kind.dtype)
    if stage == 0:
        yield vocabulary._replace(key="embedding.word_embeddings.weight")
        yield Spec("embedding.frozen", (5,), kind="frozen", dtype=kind.dtype)
    for index in by_stage[stage].tolist():
        prefix = "decoder.layers." if kind.is_stacked else f"decoder.layers.{index}."
        layer = (index, LAYERS) if kind.is_stacked else None
        yield Spec(f"{prefix}norm.weight", (WIDTH,), layer)
        yield Spec(f"{prefix}linear_qkv.weight", (9, WIDTH), layer, tp_axis=0, dtype=kind.dtype)
        yield Spec(f"{prefix}linear_proj.weight", (WIDTH, 9), layer, tp_axis=1, dtype=kind.dtype)
        yield Spec(f"{prefix}fc1.weight", (2 * HIDDEN, WIDTH), layer, tp_axis=0, is_swiglu=True, dtype=kind.dtype)
        yield Spec(f"{prefix}fc2.weight", (WIDTH, HIDDEN), layer, tp_axis=1, dtype=kind.dtype)
        yield Spec(f"{prefix}positions", (3,), layer, kind="buffer")
    if stage == num_stages - 1:
        yield Spec("decoder.final_norm.weight", (WIDTH,))
        if not kind.is_tied:
            yield vocabulary._replace(key="output_layer.weight")
        elif stage:
            yield vocabulary._replace(key="embedding.word_embeddings.weight", is_copy=True)


def source(prefix: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return truth.value(prefix + key, torch.empty(shape)).to(dtype)


class Built(NamedTuple):
    """A state, and the truth about it."""

    state: dict[str, Any]
    chunks: list[Model]
    optimizers: list[Any]


def build(grid: Grid, kind: Kind, prefix: str = "", *, has_state: bool = True) -> Built:
    """With the values under FQNs that start with `prefix`, and padding that is zero only for the truth."""
    chunks = [Model(specs, grid, partial(source, prefix)) for specs in chunks_of(grid, kind)]
    trained = [parameter for chunk in chunks for parameter, _ in chunk.trained()]
    rate = 0.5 if prefix else 0.0123
    scaler = GradScaler(7.0 if prefix else 1024.0)
    optimizers = []
    # Two, as Megatron chains that of experts to the other.
    for of_one in (trained[: len(trained) // 2], trained[len(trained) // 2 :]):
        groups = [
            ([parameter for parameter in of_one if parameter.dim() > 1], {"lr": rate, "weight_decay": 0.07}),
            ([parameter for parameter in of_one if parameter.dim() < 2], {"lr": rate, "weight_decay": 0.0}),
        ]
        if kind.is_distributed:
            made: Any = DistributedOptimizer(groups, _adam, grid, bucket_size=kind.bucket_size, scaler=scaler)
        else:
            made = Float16Optimizer(groups, _adam, scaler=scaler)
        optimizers.append(made)
    state = {"model": [Wrapper(chunk) for chunk in chunks], "optimizer": ChainedOptimizer(optimizers)}
    built = Built(state, chunks, optimizers)
    fill(built, prefix, has_state=has_state)
    return built


def _adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # torch refuses groups without parameters only where all are empty
    optimizer = torch.optim.AdamW([{**groups[0], "params": [torch.zeros(1)]}, *groups[1:]], eps=3e-7)
    optimizer.param_groups[0]["params"] = groups[0]["params"]
    return optimizer


def fill(built: Built, prefix: str, *, has_state: bool) -> None:
    for parameter, spec, held, elements, inner in held_by(built):
        value = partial(_flat_value, spec, built.chunks[0].grid, elements)
        with torch.no_grad():
            if parameter.dtype != torch.float32:
                held.copy_(value(prefix + spec.key).view(held.shape))
        if has_state:
            inner.state[held] = {
                "step": truth.step(prefix + spec.key),
                "exp_avg": value(f"{prefix}{spec.key}.exp_avg").view(held.shape),
                "exp_avg_sq": value(f"{prefix}{spec.key}.exp_avg_sq").view(held.shape),
            }
    if prefix:
        with torch.no_grad():
            for chunk in built.chunks:
                for parameter, spec in chunk.trained():
                    if spec.padded_rows is not None:
                        parameter.fill_(55)


def _flat_value(spec: Spec, grid: Grid, elements: slice, fqn: str) -> Tensor:
    full = truth.value(fqn, torch.empty(full_shape(spec)))
    return spec.local(full, grid).reshape(-1)[elements].clone()


def held_by(built: Built) -> Iterator[tuple[Tensor, Spec, Tensor, slice, torch.optim.Optimizer]]:
    specs = {id(parameter): spec for chunk in built.chunks for parameter, spec in chunk.trained()}
    for optimizer in built.optimizers:
        for parameter, held, elements in optimizer.held():
            yield parameter, specs[id(parameter)], held, elements, optimizer.optimizer


def differences(built: Built) -> list[str]:
    """What is not as the truth says."""
    wrong = []
    grid = built.chunks[0].grid
    for chunk in built.chunks:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            spec = chunk.specs[name]
            wanted = spec.local(source("", spec.key, full_shape(spec), spec.dtype), grid)
            wrong += [] if torch.equal(tensor, wanted) else [f"{spec.key} {spec.layer}"]
    for _, spec, held, elements, inner in held_by(built):
        name = f"{spec.key} {spec.layer} {elements}"
        wanted = {key: _flat_value(spec, grid, elements, f"{spec.key}.{key}") for key in ("exp_avg", "exp_avg_sq")}
        wanted["step"] = truth.step(spec.key)
        found = inner.state.get(held, {})
        if spec.dtype != torch.float32:
            found, wanted = (
                found | {"fp32 copy": held},
                wanted | {"fp32 copy": _flat_value(spec, grid, elements, spec.key)},
            )
        for key, value in wanted.items():
            if key not in found or not torch.equal(found[key].reshape(-1), value.reshape(-1)):
                wrong.append(f"{name}: {key}")
    for optimizer in built.optimizers:
        if optimizer.grad_scaler.scale.item() != 1024.0:
            wrong.append("grad scaler")
        for index, group in enumerate(optimizer.optimizer.param_groups):
            if group["params"] and (group["lr"], group["weight_decay"]) != (0.0123, 0.07 if index == 0 else 0.0):
                wrong.append(f"group {index}: {group['lr']}, {group['weight_decay']}")
    return wrong


def save_truth(rank: int, world_size: int, name: str, kind: str, path: str) -> None:
    bcp.save(path, build(GRIDS[name]._replace(rank=rank), KINDS[kind]).state)


def load_each(rank: int, world_size: int, name: str, kind: str, paths: dict[str, str]) -> dict[str, list[str]]:
    """What is wrong, by source. Every other time the optimizer has no state before."""
    wrong: dict[str, list[str]] = {}
    grid = GRIDS[name]._replace(rank=rank)
    for index, (of_source, path) in enumerate(paths.items()):
        built = build(grid, KINDS[kind], "noise.", has_state=(index + len(name)) % 2 == 0)
        try:
            bcp.load(path, built.state, options=bcp.LoadOptions(timeout_s=60))
        except bcp.CheckpointError:
            wrong[of_source] = [traceback.format_exc()]
        else:
            wrong[of_source] = differences(built)
    return wrong


class Matrix:
    """Each grid saves once, and loads all in one call."""

    def __init__(self, workers: WorkerPool, folder: Path) -> None:
        self._workers = workers
        self._folder = folder
        self._loaded: dict[tuple[str, str], list[dict[str, list[str]]]] = {}

    def wrong(self, of_source: str, destination: str, kind: str) -> list[list[str]]:
        if (destination, kind) not in self._loaded:
            paths = {name: self._saved(name, kind) for name in grids_of(kind)}
            self._loaded[destination, kind] = self._run(load_each, destination, kind, paths)
        return [by_source[of_source] for by_source in self._loaded[destination, kind]]

    def _saved(self, name: str, kind: str) -> str:
        path = self._folder / f"{name}-{kind}"
        if not path.exists():
            self._run(save_truth, name, kind, str(path))
        return str(path)

    def _run(self, function: Callable[..., Any], name: str, *args: Any) -> list[Any]:
        world_size = GRIDS[name].world_size
        return self._workers.run(
            function, name, *args, world_size=world_size, process_group=world_size > 1, timeout_s=120
        )


@pytest.fixture(scope="session")
def matrix(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(workers, tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize(("of_source", "destination", "kind"), CELLS)
def test_a_model_and_its_optimizer_change_their_grid(
    matrix: Matrix, of_source: str, destination: str, kind: str
) -> None:
    for rank, wrong in enumerate(matrix.wrong(of_source, destination, kind)):
        assert not wrong, "\n".join([f"rank {rank}:", *wrong[:20]])


def test_the_checkpoint_holds_whole_tensors_without_padding_of_buffers(matrix: Matrix) -> None:
    matrix.wrong("tp2_pp2_dp2", "single", "bf16_distributed")
    path = matrix._saved("tp2_pp2_dp2", "bf16_distributed")
    stored = bcp.open(path)
    key = "decoder.layers.fc1.weight"
    found = stored[f"model.{key}"][...]
    assert found.dtype == torch.float32
    assert torch.equal(found, source("", key, (LAYERS, 2 * HIDDEN, WIDTH), torch.float32))
    average = stored[f"optimizer.state.{key}.exp_avg"][...]
    assert torch.equal(average, source("", f"{key}.exp_avg", (LAYERS, 2 * HIDDEN, WIDTH), torch.float32))
    assert stored["model.embedding.word_embeddings.weight"][...].shape == (48, WIDTH)


@pytest.mark.parametrize(
    ("dp", "bucket_size", "buckets", "owned"),
    [
        (2, None, [(0, 768, 684)], [[(3, 0, 130, 0), (2, 0, 10, 192), (1, 0, 100, 256)], [(0, 0, 300, 384)]]),
        (
            3,
            None,
            [(0, 768, 684)],
            [[(3, 0, 130, 0), (2, 0, 10, 192)], [(1, 0, 100, 256), (0, 0, 128, 384)], [(0, 128, 300, 512)]],
        ),
        (
            2,
            150,
            [(0, 256, 202), (256, 768, 428)],
            [
                [(3, 0, 128, 0), (1, 0, 100, 256), (0, 0, 128, 384)],
                [(3, 128, 130, 128), (2, 0, 10, 192), (0, 128, 300, 512)],
            ],
        ),
    ],
)
def test_flat_buffers_are_laid_out_as_megatron_does(
    dp: int, bucket_size: int | None, buckets: list[Any], owned: list[Any]
) -> None:
    """The table of parameters of 300, 100, 10 and 130 elements that was made by Megatron's own code."""
    layout = layout_of([300, 100, 10, 130], dp, bucket_size)
    assert [tuple(bucket) for bucket in layout.buckets] == buckets
    found = [[(index, r.start, r.stop, at) for index, r, at in layout.owned(dp, rank)] for rank in range(dp)]
    assert found == owned


def save_before_the_gather(rank: int, world_size: int, kind: str, path: str) -> None:
    """After a step, while parameters are up to date only in what the rank itself steps, or in its copy of that."""
    built = build(GRIDS["dp3"]._replace(rank=rank), KINDS[kind])
    stepped = [(held, held.clone()) for _, _, held, _, _ in held_by(built)]
    with torch.no_grad():
        for chunk in built.chunks:
            for parameter, _ in chunk.trained():
                parameter.fill_(-7)
        for held, value in stepped:
            held.copy_(value)
    bcp.save(path, built.state)


@pytest.mark.parametrize("kind", ["fp32_distributed", "bf16_distributed"])
def test_parameters_are_saved_by_the_ranks_that_step_them(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "checkpoint")
    workers.run(save_before_the_gather, kind, path, world_size=3)
    (wrong,) = workers.run(load_each, "single", kind, {"dp3": path}, world_size=1, process_group=False)
    assert wrong == {"dp3": []}


FORMS: dict[str, Callable[[Any], Any]] = {
    "stage": lambda stage: stage,
    "stages": lambda stage: [stage],
    "schedule": lambda stage: SimpleNamespace(step=print, _stage=stage),
}


def save_stage(rank: int, world_size: int, path: str, form: str, framework: str) -> None:
    model = Model([Spec("w", (6, 4), tp_axis=0)], Grid(2, 1, 1, rank), partial(source, ""))
    bcp.save(path, {"model": FORMS[form](SimpleNamespace(submod=model, stage_index=0))}, framework)


@pytest.mark.parametrize("framework", ["auto", "megatron"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_megatron_inside_a_stage_is_one(
    workers: WorkerPool, tmp_path: Path, form: str, framework: str
) -> None:
    workers.run(save_stage, str(tmp_path), form, framework, world_size=2)
    stored = bcp.open(tmp_path)
    assert list(stored) == ["model.w"]
    assert torch.equal(stored["model.w"][...], source("", "w", (6, 4), torch.float32))


def save_odd(rank: int, world_size: int, path: str, case: str) -> str:
    """What the save of two parts that contradict one another raises."""
    data = torch.full((3, 2), float(rank))
    shape = (6 + (rank if case == "shapes" else 0), 2)
    offset = 3 * rank - (rank if case == "overlap" else 0)
    part = sharded("w", data, global_shape=shape, global_offset=(offset, 0))
    try:
        bcp.save(path, {"model": {"part": part}}, "megatron")
    except bcp.CheckpointMismatchError as error:
        return f"{error.kind}: {error}"
    return "saved"


@pytest.mark.parametrize(("case", "kind"), [("shapes", "conflict"), ("overlap", "conflict")])
def test_ranks_that_contradict_one_another_are_refused(
    workers: WorkerPool, tmp_path: Path, case: str, kind: str
) -> None:
    for text in workers.run(save_odd, str(tmp_path), case, world_size=2):
        assert text.startswith(f"{kind}: ")
        assert "model.w" in text


def save_copies_only(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"model": {"w": sharded("w", torch.arange(4.0), replica_id=(1, 0, rank))}})


def test_replicas_are_saved_though_none_of_them_is_the_main_one(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_copies_only, str(tmp_path), world_size=2)
    assert torch.equal(bcp.open(tmp_path)["model.w"][...], torch.arange(4.0))
