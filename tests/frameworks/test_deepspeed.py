"""Real engines of DeepSpeed, which train: what they save is what DeepSpeed says that they hold, and training goes on
from it to the same bits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.real_deepspeed import (
    SETUPS,
    Net,
    engine_of,
    join_deepspeed,
    optimizer_state_of,
    state_of,
    train,
    unequal,
    unlike_checkpoint,
    weights_of,
)

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(900),
]

MIXED_UP = {"zero_1_round_robin"}
"""Where DeepSpeed's own functions for single parameters give those of others; training shows that ours are right."""
BETWEEN = [("zero_2", "zero_3"), ("zero_3", "zero_1"), ("zero_1_fp32", "zero_3_fp32"), ("zero_3_offloaded", "zero_1")]
BETWEEN += [("zero_1_round_robin", "zero_2"), ("bf16_without_zero", "zero_1"), ("zero_3", "bf16_without_zero")]


class Outcome(NamedTuple):
    """What one rank saw."""

    weights: dict[str, dict[str, torch.Tensor]]
    """By setup, as DeepSpeed gave them when they were saved."""
    states: dict[str, dict[str, torch.Tensor]]
    wrong: dict[str, list[str]]
    """By setup, or by two of them: what a resumed engine has other than it should."""


def train_and_resume(rank: int, world_size: int, folder: str) -> Outcome:
    join_deepspeed(rank)
    outcome = Outcome({}, {}, {})
    went_on: dict[str, Any] = {}
    for name in SETUPS:
        train_and_save(name, folder, outcome, went_on)
        # At once, because hpZ, the last of them, makes every later engine of ZeRO 3 one of hpZ.
        for source, destination in [(name, name), *BETWEEN]:
            is_due = {source, destination} <= went_on.keys()
            if is_due and f"{source} to {destination}" not in outcome.wrong:
                outcome.wrong[f"{source} to {destination}"] = resume(source, destination, folder, outcome, went_on)
    return outcome


def train_and_save(name: str, folder: str, outcome: Outcome, went_on: dict[str, Any]) -> None:
    engine = engine_of(SETUPS[name], seed=3)
    train(engine, 3)
    bcp.save(f"{folder}/{name}", state_of(engine), options=bcp.SaveOptions(timeout_s=120))
    outcome.weights[name], outcome.states[name] = weights_of(engine), optimizer_state_of(engine)
    went_on[name] = train(engine, 3), weights_of(engine), optimizer_state_of(engine)


def resume(source: str, destination: str, folder: str, outcome: Outcome, went_on: dict[str, Any]) -> list[str]:
    resumed = engine_of(SETUPS[destination], seed=8)
    bcp.load(f"{folder}/{source}", state_of(resumed))
    wrong = unlike_checkpoint(resumed, f"{folder}/{source}")
    if not {source, destination} & MIXED_UP and weights_of(resumed):
        wrong += unequal(weights_of(resumed), outcome.weights[source])
    losses, weights, states = went_on[source]
    if resumed.global_steps != 3 or train(resumed, 3) != losses:
        wrong.append("losses")
    if source == destination:
        wrong += unequal(weights_of(resumed), weights) + unequal(optimizer_state_of(resumed), states)
        wrong += [] if resumed.lr_scheduler.last_epoch == 6 else ["lr_scheduler"]
    return wrong


def load_on_others(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    join_deepspeed(rank)
    found: dict[str, Any] = {}
    for name, setup in SETUPS.items():
        if "hpz" in name:
            continue  # in groups of two ranks
        engine = engine_of(setup, seed=8)
        bcp.load(f"{folder}/{name}", state_of(engine))
        found[name] = unlike_checkpoint(engine, f"{folder}/{name}"), weights_of(engine)
        train(engine, 1)
    return found


def pair(actor: Any, critic: Any) -> dict[str, Any]:
    """The torch optimizer that one engine was made with, and the other engine without any."""
    return {"actor": actor, "optimizer": actor.optimizer.optimizer, "critic": critic}


def load_two_engines(rank: int, world_size: int, folder: str) -> list[str]:
    join_deepspeed(rank)
    wrong = []
    for name in ("zero_1", "zero_3"):
        saved = [engine_of(SETUPS[name], seed=seed) for seed in (3, 4)]
        losses = [train(engine, 2) for engine in saved]
        assert losses[0] != losses[1]
        bcp.save(f"{folder}/pair_{name}", pair(*saved), options=bcp.SaveOptions(timeout_s=120))
        resumed = [engine_of(SETUPS[name], seed=seed) for seed in (8, 9)]
        bcp.load(f"{folder}/pair_{name}", pair(*resumed))
        for found, wanted in zip(resumed, saved, strict=True):
            wrong += unequal(weights_of(found), weights_of(wanted))
        wrong += [] if train(resumed[0], 2) == train(saved[0], 2) else [f"losses with {name}"]
        wrong += unequal(optimizer_state_of(resumed[0]), optimizer_state_of(saved[0]))
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Iterator[list[Outcome]]:
    pool = WorkerPool()  # of its own, because DeepSpeed keeps the process group that it met first
    yield pool.run(train_and_resume, str(folder), world_size=2, timeout_s=800)
    pool.close()


@pytest.mark.parametrize("name", SETUPS)
def test_a_resumed_engine_trains_on_to_the_same_bits(outcomes: list[Outcome], name: str) -> None:
    assert [outcome.wrong[f"{name} to {name}"] for outcome in outcomes] == [[], []]


@pytest.mark.parametrize(("source", "destination"), BETWEEN)
def test_another_stage_goes_on_with_the_same_losses(outcomes: list[Outcome], source: str, destination: str) -> None:
    assert [outcome.wrong[f"{source} to {destination}"] for outcome in outcomes] == [[], []]


@pytest.mark.parametrize("name", [name for name in SETUPS if name not in MIXED_UP | {"bf16_without_zero"}])
def test_a_plain_model_gets_what_deepspeed_says(outcomes: list[Outcome], folder: Path, name: str) -> None:
    model = Net(0)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    is_cast = SETUPS[name].is_bf16  # what does not train is in low precision
    bcp.load(folder / name, {"model": model, "optimizer": optimizer}, cast=is_cast)
    parameters = dict(model.named_parameters())
    weights = {fqn: parameters[fqn].detach() for fqn in outcomes[0].weights[name]}
    assert weights
    assert unequal(weights, outcomes[0].weights[name]) == []
    states = {
        f"{fqn}.{key}": optimizer.state[parameters[fqn]][key] for fqn in weights for key in ("exp_avg", "exp_avg_sq")
    }
    assert unequal(states, outcomes[0].states[name]) == []
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_engines_on_three_ranks_load_what_two_saved(outcomes: list[Outcome], folder: Path) -> None:
    pool = WorkerPool()
    try:
        by_rank = pool.run(load_on_others, str(folder), world_size=3, timeout_s=600)
    finally:
        pool.close()
    for found in by_rank:
        for name, (wrong, weights) in found.items():
            assert wrong == [], name
            assert name in MIXED_UP or unequal(weights, outcomes[0].weights[name]) == [], name


def test_two_engines_and_a_torch_optimizer_in_one_state_are_loaded_in_full_precision(tmp_path: Path) -> None:
    pool = WorkerPool()
    try:
        assert pool.run(load_two_engines, str(tmp_path), world_size=2, timeout_s=600) == [[], []]
    finally:
        pool.close()


def load_from_before_the_first_step(rank: int, world_size: int, folder: str) -> list[str]:
    join_deepspeed(rank)
    wrong = []
    for name in ("zero_1", "zero_3", "bf16_without_zero"):
        engine, loaded = engine_of(SETUPS[name], seed=3), engine_of(SETUPS[name], seed=8)
        bcp.save(f"{folder}/{name}", state_of(engine))
        train(loaded, 3)
        bcp.load(f"{folder}/{name}", state_of(loaded))
        wrong += [] if train(engine, 2) == train(loaded, 2) else [f"{name}: losses"]
        wrong += unequal(optimizer_state_of(loaded), optimizer_state_of(engine))
    return wrong


def test_an_engine_that_has_trained_loads_a_checkpoint_from_before_the_first_step(tmp_path: Path) -> None:
    pool = WorkerPool()
    try:
        assert pool.run(load_from_before_the_first_step, str(tmp_path), world_size=2, timeout_s=500) == [[], []]
    finally:
        pool.close()
