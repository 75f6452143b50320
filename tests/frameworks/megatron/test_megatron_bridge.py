"""The manager for Megatron-Bridge, by the calls that its loop makes: setup, save, finalize."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.megatron.bridge_parts import TrainState, config_of, context_of
from frameworks.megatron.test_megatron_calls import TRACKER, Counting, training
from frameworks.real_megatron import differences, fill

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(300),
]


def run_bridge(rank: int, world_size: int, folder: str) -> list[str]:
    with training(folder) as (_, built, _, _):
        from megatron.bridge.training import checkpointing

        from bytecheckpoint.integrations.megatron_bridge import BcpBridgeManager

        manager = BcpBridgeManager(config_of(folder, save=Path(folder)))
        called = len(checkpointing.CALLED)
        assert manager.load(context_of(built, Counting(), TrainState())) == (
            0,
            0,
        )  # Bridge's own manager looks for its own
        assert len(checkpointing.CALLED) == called + 1
        fill(built)
        for step in (1, 2, 3):
            ctx = context_of(built, Counting(), TrainState(step, 8 * step, 5.0))
            ctx.opt_param_scheduler.num_steps = step
            manager.save(ctx, None)
            manager.finalize_async_saves(ctx.state)
        manager.finalize_async_saves(ctx.state, blocking=True, terminate=True)
        with pytest.raises(bcp.CheckpointMismatchError, match="non_persistent_ckpt_type='local'"):
            BcpBridgeManager(config_of(folder, non_persistent_ckpt_type="local")).save(
                context_of(built, Counting(), TrainState(4), non_persistent_ckpt=True), None
            )
    with training(folder) as (_, built, _, _):
        ctx = context_of(built, Counting(), TrainState())
        assert BcpBridgeManager(config_of(folder)).load(ctx) == (3, 5.0)
        assert (ctx.state.train_state.consumed_train_samples, ctx.opt_param_scheduler.num_steps) == (24, 3)
        wrong = differences(built)
    with training(folder) as (_, built, _, _):
        ctx = context_of(built, Counting(), TrainState())
        assert BcpBridgeManager(config_of(folder, finetune=True)).load(ctx)[0] == 0
        assert ctx.opt_param_scheduler.num_steps == 0
    return wrong


def test_the_manager_of_bridge_saves_keeps_and_resumes(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(run_bridge, str(tmp_path), world_size=2, timeout_s=280) == [[], []]
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000002", "iter_0000003"]


def load_across(rank: int, world_size: int, folder: str) -> list[str]:
    """Loads by Bridge what Megatron-LM's loop has saved, and the other way round."""
    with training(folder) as (_, built, save, _):
        fill(built)
        scheduler = Counting()
        scheduler.num_steps = 7
        save(7, built.chunks, built.optimizer, scheduler, 3.0)
    with training(folder) as (_, built, _, _):
        from bytecheckpoint.integrations.megatron_bridge import BcpBridgeManager

        ctx = context_of(built, Counting(), TrainState())
        assert BcpBridgeManager(config_of(folder)).load(ctx) == (7, 3.0)
        state = ctx.state.train_state
        assert (state.consumed_train_samples, ctx.opt_param_scheduler.num_steps) == (800, 7)
        wrong = differences(built)
        state.step, state.consumed_train_samples = 9, 72
        manager = BcpBridgeManager(config_of(folder, async_save=False))
        manager.save(ctx)
        manager.finalize_async_saves(ctx.state, blocking=True, terminate=True)
    with training(folder, consumed_train_samples=0) as (args, built, _, load):
        assert load(built.chunks, built.optimizer, Counting()) == (9, 5.0)
        assert args.consumed_train_samples == 72
        return wrong + differences(built)


def test_bridge_and_megatrons_loop_load_from_one_another(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(load_across, str(tmp_path), world_size=2, timeout_s=280) == [[], []]


def load_weights_alone(rank: int, world_size: int, folder: str) -> list[str]:
    """A checkpoint of bcp.save, under the name of an iteration and as a release."""
    with training(folder) as (_, built, _, _):
        from bytecheckpoint.integrations.megatron_bridge import BcpBridgeManager

        fill(built)
        bcp.save(f"{folder}/iter_0000007", {"model": built.chunks})
        bcp.save(f"{folder}/release", {"model": built.chunks})
        parameters = list(built.chunks[0].parameters())
        wanted = [each.detach().clone() for each in parameters]
        manager, tracker = BcpBridgeManager(config_of(folder, load_optim=False)), Path(folder, TRACKER)
        for text, is_trained in (("7", False), ("release", True)):
            if rank == 0:
                tracker.write_text(text)
            dist.barrier()
            ctx = context_of(built, Counting(), TrainState())
            if not is_trained:
                with pytest.raises(bcp.CheckpointMismatchError, match="has no iteration and no counts of samples"):
                    manager.load(ctx)
                ctx.optimizer = ctx.opt_param_scheduler = None  # for inference, where nothing begins anew
            for each in parameters:
                each.data.zero_()
            assert manager.load(ctx)[0] == 0
            assert all(map(torch.equal, parameters, wanted))
            dist.barrier()
    return []


def test_weights_alone_are_loaded_where_nothing_begins_anew(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(load_weights_alone, str(tmp_path), world_size=2, timeout_s=280) == [[], []]


def go_back(rank: int, world_size: int, folder: str) -> list[str]:
    with training(folder) as (_, built, _, _):
        from bytecheckpoint.integrations.megatron_bridge import BcpBridgeManager

        fill(built)
        for step in (10, 20, 30):
            BcpBridgeManager(config_of(folder, async_save=False)).save(context_of(built, Counting(), TrainState(step)))
        manager = BcpBridgeManager(config_of(folder, async_save=False, most_recent_k=1, ckpt_step=20))
        ctx = context_of(built, Counting(), TrainState())
        assert manager.load(ctx)[0] == 20
        ctx.state.train_state.step = 21
        manager.save(ctx)
        manager.finalize_async_saves(ctx.state, blocking=True, terminate=True)
        dist.barrier()
        return sorted(path.name for path in Path(folder).iterdir())


def test_after_going_back_the_newest_checkpoint_stays(workers: WorkerPool, tmp_path: Path) -> None:
    names = workers.run(go_back, str(tmp_path), world_size=2, timeout_s=280)[0]
    assert names == ["iter_0000021", "iter_0000030", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "21"
