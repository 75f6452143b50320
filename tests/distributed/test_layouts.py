"""That the layouts of the matrix hold the truth: torch itself puts each together again, and it is compared with what
truth.py says. The matrix then needs to compare local parts only.
"""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from distributed import truth
from distributed.layouts import LAYOUTS, Builder, differences, local_parts
from distributed.workers import WorkerPool


def whole_state(rank: int, world_size: int, layout: str, optimizer: str) -> dict[str, Any]:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it has advice about slow gathers
    parts = local_parts(Builder(layout, rank).truth(optimizer))
    return {name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in parts.items()}


def shard_numels(rank: int, world_size: int, layout: str) -> dict[str, int]:
    parts = local_parts(Builder(layout, rank).truth("sgd"))
    return {name: part.to_local().numel() for name, part in parts.items() if isinstance(part, DTensor)}


def differences_from_noise(rank: int, world_size: int, layout: str, optimizer: str) -> tuple[int, int, list[str]]:
    builder = Builder(layout, rank)
    expected = builder.truth(optimizer)
    noise, stateless = builder.noise(optimizer), builder.stateless(optimizer)
    again = differences(builder.truth(optimizer), expected)
    assert not stateless["optimizer"].state
    return len(differences(noise, expected)), len(local_parts(expected)), again


OF_THE_DAY = {*((layout, "adamw") for layout in LAYOUTS), ("single", "sgd"), ("fsdp2_tp2", "sgd")}


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        pytest.param(*case, marks=() if case in OF_THE_DAY else pytest.mark.long)
        for case in product(LAYOUTS, truth.OPTIMIZERS)
    ],
)
def test_put_together_a_layout_is_the_truth(workers: WorkerPool, layout: str, optimizer: str) -> None:
    world_size = LAYOUTS[layout].world_size
    states = workers.run(
        whole_state, layout, optimizer, world_size=world_size, process_group=bool(LAYOUTS[layout].axes)
    )
    names = set()
    for state in states:
        names |= state.keys()
        for name, part in state.items():
            check_against_truth(name, part, optimizer)
    assert names == expected_names(optimizer)


def check_against_truth(name: str, part: Any, optimizer: str) -> None:
    kind, _, fqn = name.removeprefix("optimizer.").partition(".")
    if kind == "groups":
        assert part["weight_decay"] == (truth.WEIGHT_DECAY if fqn in matrices() else 0.0)
        assert truth.HYPERPARAMETERS[optimizer].items() <= part.items()
    elif fqn.endswith(".step"):
        assert torch.equal(part, truth.step(fqn.removesuffix(".step")))
    else:
        assert torch.equal(part, truth.value(fqn, part))


def matrices() -> set[str]:
    return {fqn for fqn, parameter in truth.Transformer().named_parameters() if parameter.ndim > 1}


def expected_names(optimizer: str) -> set[str]:
    model = truth.Transformer()
    entries = [*truth.STATE_TENSORS[optimizer], *(["step"] if optimizer == "adamw" else [])]
    trained = [fqn for fqn, parameter in model.named_parameters() if parameter.requires_grad]
    names = {f"model.{fqn}" for fqn in model.state_dict()} | {f"optimizer.groups.{fqn}" for fqn in trained}
    return names | {f"optimizer.state.{fqn}.{entry}" for fqn in trained for entry in entries}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_differs_from_the_truth_everywhere(workers: WorkerPool, layout: str) -> None:
    results = workers.run(
        differences_from_noise,
        layout,
        "adamw",
        world_size=LAYOUTS[layout].world_size,
        process_group=bool(LAYOUTS[layout].axes),
    )
    for num_different, num_parts, again in results:
        assert again == []
        # A rank may hold no element of a small tensor, and no noise can be put there.
        assert num_different >= num_parts * 0.8


def test_fsdp_over_three_is_uneven_and_over_four_leaves_ranks_empty(workers: WorkerPool) -> None:
    over_three = workers.run(shard_numels, "fsdp3", world_size=3)
    assert len({numels["model.head.weight"] for numels in over_three}) > 1
    over_four = workers.run(shard_numels, "fsdp4", world_size=4)
    assert [numels["model.layers.0.gain"] for numels in over_four] == [1, 0, 0, 0]


def tied_parameters(rank: int, world_size: int, layout: str) -> tuple[bool, int, bool]:
    state = Builder(layout, rank, tied=True).truth("adamw")
    model, optimizer = state["model"], state["optimizer"]
    parts = local_parts(state)
    weight = parts["model.head.weight"]
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return (
        weight is parts["model.embedding.weight"],
        len(optimizer.state) - len([parameter for parameter in model.parameters() if parameter.requires_grad]),
        torch.equal(whole, truth.value("embedding.weight", whole)),
    )


@pytest.mark.parametrize("layout", ["single", "ddp2", "fsdp3", "hsdp2x2", "tp2"])
def test_tied_weights_stay_tied_when_sharded(workers: WorkerPool, layout: str) -> None:
    world_size = LAYOUTS[layout].world_size
    results = workers.run(tied_parameters, layout, world_size=world_size, process_group=bool(LAYOUTS[layout].axes))
    assert results == [(True, 0, True)] * world_size
