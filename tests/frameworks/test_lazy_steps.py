"""Real optimizers of frameworks and a lazy snapshot: their steps wait for it."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, before

import bytecheckpoint as bcp
from bytecheckpoint.staging import file_image
from distributed.workers import WorkerPool
from frameworks import real_megatron
from frameworks.real_deepspeed import SETUPS, engine_of, join_deepspeed, state_of, train, unequal, weights_of

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # the frameworks warn of what is not installed
    pytest.mark.timeout(600),
]

LAZY = bcp.SaveOptions(snapshot="lazy", timeout_s=120)


def save_and_step(path: str, state: dict[str, Any], step: Callable[[], object]) -> bool:
    """Whether the step returned only after staging, which is held up, was let go. One that had nothing to wait for has
    not waited, however long it took.
    """
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go.wait(60)

    with before(Seam(file_image.LiveFile, "gather"), wait):
        handle = bcp.save(path, state, async_save=True, options=LAZY)
        timer = threading.Timer(0.3, go.set)
        timer.start()
        step()
        has_waited = begun.is_set() and go.is_set()
        handle.result(60)
        timer.join()
    return has_waited


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_step_of_accelerate_waits_at_every_save(tmp_path: Path) -> None:
    from accelerate import Accelerator

    model = torch.nn.Linear(4, 4)
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    for number in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        state = {"model": model, "optimizer": optimizer}
        assert save_and_step(str(tmp_path / str(number)), state, optimizer.step)
        saved = bcp.open(tmp_path / str(number)).state_dict(prefix="model.")
        assert unequal({name.removeprefix("model."): value for name, value in saved.items()}, expected) == []


def step_engines(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    join_deepspeed(rank)
    wrong: dict[str, Any] = {}
    for name in ("zero_1", "zero_2", "zero_3", "bf16_optimizer"):
        engine = engine_of(SETUPS[name], seed=3)
        train(engine, 1)
        expected = weights_of(engine)
        has_waited = save_and_step(f"{folder}/{name}", state_of(engine), lambda engine=engine: train(engine, 1))
        resumed = engine_of(SETUPS[name], seed=8)
        bcp.load(f"{folder}/{name}", state_of(resumed))
        wrong[name] = has_waited, unequal(weights_of(resumed), expected)
    return wrong | {"muon": refusal_of_muon(folder)}


def refusal_of_muon(folder: str) -> str:
    """The flag is the one that DeepSpeed's own `MuonWithAuxAdam` needs on each of its groups."""
    engine = engine_of(SETUPS["zero_1"], seed=3)
    train(engine, 1)
    engine.optimizer.optimizer.param_groups[0]["use_muon"] = True
    with pytest.raises(bcp.CheckpointSaveError) as caught:
        bcp.save(f"{folder}/muon", state_of(engine), async_save=True, options=LAZY)
    return caught.value.message


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_steps_of_deepspeed_wait_and_its_muon_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    for found in workers.run(step_engines, str(tmp_path), world_size=2, timeout_s=300):
        refusal = found.pop("muon")
        assert "DeepSpeed's Muon" in refusal
        assert 'snapshot="copy"' in refusal
        assert found == dict.fromkeys(found, (True, []))


def step_megatron(rank: int, world_size: int, path: str, layout: real_megatron.Layout) -> dict[str, Any]:
    with real_megatron.on_host(layout):
        built = real_megatron.build(layout)
        real_megatron.fill(built)
        has_waited = save_and_step(path, built.state, lambda: real_megatron.step(built))
        has_changed = bool(real_megatron.differences(built))
        bcp.load(path, built.state)
        return {"has_waited": has_waited, "has_changed": has_changed, "wrong": real_megatron.differences(built)}


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize(("is_distributed", "is_half"), [(True, True), (True, False), (False, True)])
def test_a_step_of_megatron_waits(workers: WorkerPool, tmp_path: Path, *, is_distributed: bool, is_half: bool) -> None:
    layout = real_megatron.Layout(is_distributed=is_distributed, is_half=is_half)
    found = workers.run(step_megatron, str(tmp_path / "step"), layout, world_size=2, timeout_s=300)
    # Replicas this small are all written by rank 0, and the other rank has nothing to wait for.
    waiting = [True, is_distributed]
    assert found == [{"has_waited": has_waited, "has_changed": True, "wrong": []} for has_waited in waiting]
