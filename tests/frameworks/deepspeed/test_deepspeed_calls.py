"""`save_checkpoint` and `load_checkpoint` beside those of DeepSpeed's engines, on two ranks and more."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import distributed as dist

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.going_on import go_on
from frameworks.real_deepspeed import (
    SETUPS,
    Net,
    engine_of,
    join_deepspeed,
    optimizer_state_of,
    train,
    unequal,
    unlike_checkpoint,
    weights_of,
)

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(600),
]

STAGES = ["bf16_without_zero", "zero_1", "zero_2", "zero_3"]
STEPS, MORE = 3, 2


def on_ranks(program: Any, *arguments: Any, world_size: int = 2) -> list[Any]:
    pool = WorkerPool()
    try:
        return pool.run(program, *arguments, world_size=world_size, timeout_s=500)
    finally:
        pool.close()


def trained(stage: str, *, seed: int = 3, steps: int = STEPS) -> Any:
    engine = engine_of(SETUPS[stage], seed=seed)
    train(engine, steps)
    return engine


def save_and_go_on(rank: int, world_size: int, folder: str) -> list[str]:
    join_deepspeed(rank)
    from bytecheckpoint.integrations.deepspeed import load_checkpoint, save_checkpoint

    wrong = []
    for stage in STAGES:
        engine = trained(stage)
        mine = {"rank": rank, "seen": torch.arange(4), "notes": ["a", None, 0.5], "nested": {}}
        handle = save_checkpoint(engine, f"{folder}/{stage}", client_state=mine)
        assert handle
        losses = train(engine, MORE)  # while it is written
        assert handle.result().path.endswith("global_step3")
        resumed = engine_of(SETUPS[stage], seed=8)
        path, client_state = load_checkpoint(resumed, f"{folder}/{stage}")
        wrong += [] if path == f"{folder}/{stage}/global_step3" else [f"{stage}: {path}"]
        wrong += [] if torch.equal(client_state.pop("seen"), torch.arange(4)) else [f"{stage}: tensor"]
        mine.pop("seen")
        wrong += [] if client_state == mine else [f"{stage}: {client_state}"]
        wrong += [] if train(resumed, MORE) == losses else [f"{stage}: losses"]
        wrong += unequal(weights_of(resumed), weights_of(engine))
        wrong += unequal(optimizer_state_of(resumed), optimizer_state_of(engine))
        wrong += [] if resumed.lr_scheduler.last_epoch == STEPS + MORE else [f"{stage}: scheduler"]
    return wrong


def load_on_three(rank: int, world_size: int, folder: str) -> list[str]:
    join_deepspeed(rank)
    from bytecheckpoint.integrations.deepspeed import load_checkpoint

    wrong = []
    for stage in STAGES:
        engine = engine_of(SETUPS[stage], seed=8)
        path, client_state = load_checkpoint(engine, f"{folder}/{stage}")
        wrong += unlike_checkpoint(engine, path)
        # A rank that is new has the client state of rank 0.
        wrong += [] if client_state["rank"] == (rank if rank < 2 else 0) else [f"{stage}: {client_state}"]
        train(engine, 1)
    return wrong


def test_saves_in_the_background_resume_to_the_same_bits_and_on_three_ranks(tmp_path: Path) -> None:
    assert on_ranks(save_and_go_on, str(tmp_path)) == [[], []]
    assert (tmp_path / "zero_2" / "latest").read_text() == "global_step3"
    assert on_ranks(load_on_three, str(tmp_path), world_size=3) == [[], [], []]
    for stage in STAGES:
        model = Net(0)
        bcp.load(tmp_path / stage / "global_step3", {"model": model}, cast=True)
        assert torch.equal(model.gain, bcp.open(tmp_path / stage / "global_step3")["model.gain"][...].float())


def choose_parts(rank: int, world_size: int, folder: str) -> list[str]:
    join_deepspeed(rank)
    from bytecheckpoint.integrations.deepspeed import load_checkpoint, save_checkpoint

    wrong = []
    for stage in ("zero_2", "zero_3"):
        engine, root = trained(stage), f"{folder}/{stage}"
        save_checkpoint(engine, root, tag="all", client_state={"epoch": 4})
        weights = weights_of(engine)

        module_only = trained(stage, seed=8, steps=1)
        states = optimizer_state_of(module_only)
        assert load_checkpoint(module_only, root, load_module_only=True)[1] == {"epoch": 4}
        wrong += unequal(weights_of(module_only), weights) + unequal(optimizer_state_of(module_only), states)
        wrong += [] if module_only.global_steps == 1 else ["module only: steps"]

        no_states = trained(stage, seed=8, steps=1)
        load_checkpoint(no_states, root, load_optimizer_states=False)
        wrong += unequal(weights_of(no_states), weights) + unequal(optimizer_state_of(no_states), states)
        wrong += [] if (no_states.global_steps, no_states.lr_scheduler.last_epoch) == (3, 3) else ["no states: steps"]

        no_scheduler = trained(stage, seed=8, steps=1)
        load_checkpoint(no_scheduler, root, load_lr_scheduler_states=False)
        wrong += unequal(optimizer_state_of(no_scheduler), optimizer_state_of(engine))
        found = no_scheduler.global_steps, no_scheduler.lr_scheduler.last_epoch
        wrong += [] if found == (3, 1) else [f"no scheduler: {found}"]
    return wrong


def test_parts_of_a_checkpoint_are_loaded_as_deepspeed_chooses_them(tmp_path: Path) -> None:
    assert on_ranks(choose_parts, str(tmp_path)) == [[], []]


def leave_out_frozen(rank: int, world_size: int, folder: str) -> list[str]:
    join_deepspeed(rank)
    from bytecheckpoint.integrations.deepspeed import load_checkpoint, save_checkpoint

    wrong = []
    for stage in STAGES:
        engine, root = trained(stage), f"{folder}/{stage}"
        save_checkpoint(engine, root, exclude_frozen_parameters=True).result()
        assert "model.frozen" not in bcp.open(f"{root}/global_step3")
        assert "model.body.3.bias" in bcp.open(f"{root}/global_step3")
        resumed = engine_of(SETUPS[stage], seed=3)
        with pytest.raises(bcp.CheckpointMismatchError, match=r"missing_key: model\.frozen"):
            load_checkpoint(resumed, root)
        load_checkpoint(resumed, root, load_module_strict=False)
        wrong += [] if train(resumed, MORE) == train(engine, MORE) else [f"{stage}: losses"]
    return wrong


def test_frozen_parameters_are_left_out_where_asked(tmp_path: Path) -> None:
    assert on_ranks(leave_out_frozen, str(tmp_path)) == [[], []]


def test_extra_state_stays_where_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    from bytecheckpoint.integrations.deepspeed import _trained

    class Scaled(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 2}

    model = torch.nn.Sequential(Scaled(2, 2), torch.nn.Linear(2, 2).requires_grad_(False))
    bcp.save(tmp_path, {"model": _trained(model)})
    assert bcp.load_tree(tmp_path)["model"]["0._extra_state"] == {"scale": 2}


def test_a_buffer_that_is_a_parameter_stays_where_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    from bytecheckpoint.integrations.deepspeed import _trained

    model = torch.nn.Linear(2, 2, bias=False)
    model.register_buffer("scale", torch.nn.Parameter(torch.full((2,), 3.0), requires_grad=False))
    model.register_parameter("frozen", torch.nn.Parameter(torch.ones(2), requires_grad=False))
    bcp.save(tmp_path, {"model": _trained(model)})
    with bcp.open(tmp_path) as checkpoint:
        assert set(checkpoint) == {"model.weight", "model.scale"}
        assert checkpoint["model.scale"][...].tolist() == [3, 3]


def keep_tags(rank: int, world_size: int, folder: str) -> list[str]:
    """Tags, `latest`, replaced and deleted checkpoints, and what is refused."""
    join_deepspeed(rank)
    from bytecheckpoint.integrations.deepspeed import load_checkpoint, save_checkpoint

    engine = trained("zero_2")
    with _Warnings() as warnings:
        assert load_checkpoint(engine, folder) == (None, None)
    assert ("begins anew" in warnings.text) == (rank == 0)
    save_checkpoint(engine, folder, tag="first", client_state={"n": 1})
    save_checkpoint(engine, folder, tag="side", client_state={"n": 2}, save_latest=False)
    assert load_checkpoint(engine, folder)[1] == {"n": 1}  # of the save that was in flight
    train(engine, 1)
    save_checkpoint(engine, folder, tag="first", client_state={"n": 3})
    save_checkpoint(engine, folder, tag=5, client_state={"n": 4}, async_save=False)
    dist.barrier()
    assert load_checkpoint(engine, folder)[0] == f"{folder}/5"
    assert go_on(f"{folder}/first", "DeepSpeed", engine=engine)[1] == {"n": 3}

    if rank == 0:
        bcp.delete(f"{folder}/5")
    dist.barrier()
    with pytest.raises(bcp.CheckpointNotFoundError, match="committed are: first, side"):
        load_checkpoint(engine, folder)
    with pytest.raises(bcp.CheckpointNotFoundError, match="'third', the tag that was asked for"):
        load_checkpoint(engine, folder, tag="third")
    with pytest.raises(bcp.CheckpointMismatchError, match="custom_load_fn"):
        load_checkpoint(engine, folder, custom_load_fn=lambda *_: None)
    with pytest.raises(bcp.CheckpointSaveError, match=r"extra_state.client_state.hook"):
        save_checkpoint(engine, folder, tag="bad", client_state={"hook": object()})
    with pytest.raises(ValueError, match="save_dir"):
        save_checkpoint(engine, "")
    return [path.name for path in sorted(Path(folder).iterdir())]


class _Warnings(logging.Handler):
    """What the library warns of."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()

    def __enter__(self) -> Self:
        logging.getLogger("bytecheckpoint").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("bytecheckpoint").removeHandler(self)


def test_tags_and_latest_are_as_deepspeed_keeps_them(tmp_path: Path) -> None:
    names = on_ranks(keep_tags, str(tmp_path))[0]
    assert {"first", "side", "latest"} <= set(names)


def fail_to_track(rank: int, world_size: int, folder: str) -> str:
    join_deepspeed(rank)
    from bytecheckpoint.integrations.deepspeed import load_checkpoint, save_checkpoint

    if rank == 0:
        Path(folder, "latest").mkdir()
    dist.barrier()
    engine = trained("zero_2", steps=1)
    handle = save_checkpoint(engine, folder)
    with pytest.raises(bcp.CheckpointError) as caught:
        handle.result()
    load_checkpoint(engine, folder, tag="global_step1")
    return str(caught.value)


def test_a_latest_that_cannot_be_written_is_an_error_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    for message in on_ranks(fail_to_track, str(tmp_path)):
        assert "is committed and complete, but latest beside it" in message


def save_with_deepspeed(rank: int, world_size: int, folder: str) -> None:
    join_deepspeed(rank)
    for stage in STAGES[1:]:
        engine = trained(stage)
        mine = {"epoch": 7, "seen": torch.arange(4), "notes": [torch.ones(2), "a"]}
        mine |= {"engine.hours": 3, "ema._extra_state": 5}
        engine.save_checkpoint(f"{folder}/{stage}", client_state=mine)


def load_what_deepspeed_saved(rank: int, world_size: int, folder: str) -> list[str]:
    join_deepspeed(rank)
    from bytecheckpoint.integrations.deepspeed import load_checkpoint

    wrong = []
    for stage in STAGES[1:]:
        engine = engine_of(SETUPS[stage], seed=8)
        _, client_state = load_checkpoint(engine, f"{folder}/{stage}")
        ones, note = client_state["notes"]
        numbers = [client_state.get(key) for key in ("epoch", "engine.hours", "ema._extra_state")]
        is_right = (numbers, note) == ([7, 3, 5], "a")
        is_right = is_right and torch.equal(client_state["seen"], torch.arange(4))
        wrong += [] if is_right and torch.equal(ones, torch.ones(2)) else [f"{stage}: {client_state}"]
        wrong += [] if engine.global_steps == STEPS else [f"{stage}: {engine.global_steps}"]
        train(engine, 1)
    return wrong


def test_three_ranks_go_on_from_deepspeeds_own_checkpoint_of_two(tmp_path: Path) -> None:
    on_ranks(save_with_deepspeed, str(tmp_path))
    assert on_ranks(load_what_deepspeed_saved, str(tmp_path), world_size=3) == [[], [], []]
