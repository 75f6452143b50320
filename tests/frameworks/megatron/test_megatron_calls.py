"""`save_checkpoint` and `load_checkpoint` by the arguments of Megatron-LM."""

from __future__ import annotations

import importlib.util
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.real_megatron import Built, Layout, build, differences, fill, on_host, step

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(300),
]

DOUBLES = str(Path(__file__).parent / "doubles")
TRACKER = "latest_checkpointed_iteration.txt"
LAYOUT = Layout(tp=2)


class Counting:
    """Stands for Megatron's scheduler."""

    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]

    def step(self, increment: int) -> None:
        self.num_steps += increment


def arguments(folder: str, **others: Any) -> Namespace:
    defaults: dict[str, Any] = {
        "save": folder,
        "load": Path(folder),
        **dict.fromkeys(("pretrained_checkpoint", "non_persistent_ckpt_type", "non_persistent_global_ckpt_dir")),
        **dict.fromkeys(("ckpt_step", "save_retain_interval", "override_ckpt_iteration")),
        **dict.fromkeys(("async_save", "finetune", "no_load_optim", "no_load_rng", "no_save_optim"), False),
        **dict.fromkeys(("no_save_rng", "data_parallel_random_init", "fp16"), False),
        "bf16": True,
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "global_batch_size": 8,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 2,
        "rank": dist.get_rank(),
        "params_dtype": torch.bfloat16,
        "consumed_train_samples": 800,
        "skipped_train_samples": 1,
        "consumed_valid_samples": 2,
    }
    return Namespace(**(defaults | others))


@contextmanager
def training(folder: str, **others: Any) -> Iterator[tuple[Namespace, Built, Any, Any]]:
    """The arguments, a model with its optimizer, and both functions, as a run of Megatron-LM has them."""
    if DOUBLES not in sys.path:
        sys.path.append(DOUBLES)
    from megatron.core import num_microbatches_calculator
    from megatron.training.global_vars import set_args

    from bytecheckpoint.integrations.megatron import load_checkpoint, save_checkpoint

    args = arguments(folder, **others)
    set_args(args)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(args.rank, None, 8, 8, 1)
    with on_host(LAYOUT):
        yield args, build(LAYOUT), save_checkpoint, load_checkpoint


def load_by_arguments(rank: int, world_size: int, folder: str) -> list[str]:
    wrong = []
    with training(folder) as (args, built, save, load):
        fill(built)
        scheduler = Counting()
        scheduler.num_steps = 800
        random.seed(4)
        save(100, built.chunks, built.optimizer, scheduler, 5e3)
        drawn = random.random()
        metadata = bcp.open(f"{folder}/iter_0000100").metadata["megatron"]
        assert (metadata["iteration"], metadata["args"]["params_dtype"]) == (100, "torch.bfloat16")
        args.consumed_train_samples, args.save = 808, Path(folder)
        save(101, built.chunks, None, None, 6e3)

    with training(folder, ckpt_step=100, consumed_train_samples=0) as (args, built, _, load):
        scheduler = Counting()
        random.seed(9)
        found = load(built.chunks, built.optimizer, scheduler)
        wrong += differences(built)
        wrong += [] if found == (100, 5e3) and scheduler.num_steps == 800 else [f"resumed: {found}"]
        wrong += [] if random.random() == drawn else ["random numbers"]
        counts = args.consumed_train_samples, args.skipped_train_samples, args.consumed_valid_samples
        wrong += [] if counts == (800, 1, 2) else [f"counts: {counts}"]
    with training(folder, consumed_train_samples=0) as (args, built, _, load):  # a model alone, and the newest
        found = load(built.chunks, None, None)
        wrong += [] if found == (101, 6e3) and args.consumed_train_samples == 808 else [f"newest: {found}"]
    for name in ("finetune", "no_load_optim"):
        with training(folder, ckpt_step=100, consumed_train_samples=0, **{name: True}) as (args, built, _, load):
            scheduler = Counting()
            iteration, _ = load(built.chunks, built.optimizer, scheduler, strict=True)
            is_tuned = name == "finetune"
            wrong += [] if iteration == (0 if is_tuned else 100) and scheduler.num_steps == 0 else [name]
            wrong += [] if args.consumed_train_samples == (0 if is_tuned else 800) else [f"{name}: samples"]
            weights = [parameter.detach().clone() for parameter in built.chunks[0].parameters()]
            fill(built)
            wanted = [parameter.detach() for parameter in built.chunks[0].parameters()]
            wrong += [] if all(map(torch.equal, weights, wanted)) else [f"{name}: weights"]
    with training(folder, ckpt_step=100, num_attention_heads=8) as (_, built, _, load):
        before = [parameter.detach().clone() for parameter in built.chunks[0].parameters()]
        with pytest.raises(AssertionError, match="num_attention_heads"):
            load(built.chunks, built.optimizer, None)
        unchanged = all(map(torch.equal, before, built.chunks[0].parameters()))
        wrong += [] if unchanged else ["a model of other arguments was filled"]
    with training(folder, ckpt_step=100, override_ckpt_iteration=30) as (args, built, _, load):
        assert load(built.chunks, built.optimizer, None)[0] == 30
        assert (args.consumed_train_samples, args.skipped_train_samples) == (240, 0)
    return wrong


def test_arguments_of_a_load_are_those_of_megatron(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(load_by_arguments, str(tmp_path), world_size=2, timeout_s=280) == [[], []]
    assert (tmp_path / TRACKER).read_text() == "101"


def load_without_positions(rank: int, world_size: int, folder: str) -> None:
    """A checkpoint of bcp.save says nothing of iterations: only its weights are taken, and only where asked."""
    with training(folder) as (_, built, _, _):
        fill(built)
        bcp.save(f"{folder}/iter_0000007", {"model": built.chunks, "optimizer": built.optimizer})
        if rank == 0:
            Path(folder, TRACKER).write_text("7")
        dist.barrier()
    with (
        training(folder) as (_, built, _, load),
        pytest.raises(bcp.CheckpointMismatchError, match="has no iteration and no counts of samples"),
    ):
        load(built.chunks, built.optimizer, None)
    with training(folder, no_load_optim=True) as (_, built, _, load):  # for inference, where nothing begins anew
        assert load(built.chunks, None, None) == (0, 0)
    with training(folder, override_ckpt_iteration=7) as (_, built, _, load):
        assert load(built.chunks, built.optimizer, None)[0] == 7
        assert differences(built) == []
    with training(folder, finetune=True) as (_, built, _, load):
        assert load(built.chunks, built.optimizer, None) == (0, 0)


def test_a_checkpoint_that_does_not_say_where_training_was_is_no_silent_new_beginning(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(load_without_positions, str(tmp_path), world_size=2, timeout_s=280)


def load_masters(rank: int, world_size: int, folder: str) -> bool:
    """A step after a load of weights alone goes on from them, and not from what the optimizer had."""
    with training(folder) as (_, built, save, _):
        fill(built)
        save(7, built.chunks, built.optimizer, None, 0)
    with training(folder, finetune=True) as (_, built, _, load):
        load(built.chunks, built.optimizer, None)
        loaded = [parameter.detach().clone() for parameter in built.chunks[0].parameters()]
        step(built)
        return max((p - q).abs().max() for p, q in zip(built.chunks[0].parameters(), loaded, strict=True)) < 0.2


def test_weights_alone_reach_the_optimizers_copies(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(load_masters, str(tmp_path), world_size=2, timeout_s=280) == [True, True]


def choose_folders(rank: int, world_size: int, folder: str) -> None:
    kept = {"non_persistent_ckpt_type": "global"}
    with training(folder, **kept) as (_, built, save, load):
        assert load(built.chunks, built.optimizer, None) == (0, 0)
        save(10, built.chunks, built.optimizer, None, 1)
        for iteration in (11, 12):
            save(iteration, built.chunks, built.optimizer, None, 2, non_persistent_ckpt=True)
        dist.barrier()
        assert load(built.chunks, built.optimizer, None)[0] == 12
        names = sorted(path.name for path in Path(folder, "non_persistent").iterdir())
        assert names == ["iter_0000012", TRACKER], names
    with training(folder) as (_, built, save, load):
        assert load(built.chunks, built.optimizer, None)[0] == 10
        save(20, built.chunks, built.optimizer, None, 1, release=True)
        assert load(built.chunks, built.optimizer, None)[0] == 0
        assert Path(folder, TRACKER).read_text() == "release"
    fresh = f"{folder}/fresh"
    with training(fresh, pretrained_checkpoint=folder) as (args, built, _, load):
        assert load(built.chunks, built.optimizer, None)[0] == 0
        assert args.finetune
    with (
        training(fresh, exit_on_missing_checkpoint=True) as (_, built, _, load),
        pytest.raises(bcp.CheckpointNotFoundError, match="there is no latest_checkpointed_iteration"),
    ):
        load(built.chunks, built.optimizer, None)
    with training(folder) as (_, built, _, load):
        dist.barrier()
        if rank == 0:
            Path(folder, TRACKER).write_text("")
        dist.barrier()
        with pytest.raises(bcp.CheckpointNotFoundError, match="write the iteration, as 100 for iter_0000100, of a"):
            load(built.chunks, built.optimizer, None)
    with (
        training(folder, ckpt_step=9) as (_, built, _, load),
        pytest.raises(bcp.CheckpointNotFoundError, match="committed are: iter_0000010, release"),
    ):
        load(built.chunks, built.optimizer, None)


def test_folders_are_chosen_as_megatron_chooses_them(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(choose_folders, str(tmp_path), world_size=2, timeout_s=280)


def retain(rank: int, world_size: int, folder: str) -> None:
    context: dict[str, Any] = {}
    with training(folder, save_retain_interval=20) as (_, built, save, _):
        for iteration in (10, 20, 30, 40):
            save(iteration, built.chunks, built.optimizer, None, 1, context)
            if rank == 0 and iteration == 30:
                Path(folder, "iter_0000030", "pin.json").write_text("{}")
        for replaced in context.values():
            replaced.folders.close(60)
        save(50, built.chunks, built.optimizer, None, 1)  # by a loop that has no context


def test_replaced_checkpoints_go_but_for_those_of_the_interval_and_pinned_ones(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(retain, str(tmp_path), world_size=2, timeout_s=280)
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == [
        f"iter_{iteration:07d}" for iteration in (20, 30, 40, 50)
    ]


def retain_beside_damaged(rank: int, world_size: int, folder: str) -> None:
    context: dict[str, Any] = {}
    with training(folder, save_retain_interval=1000) as (_, built, save, _):
        for iteration in (10, 20, 30):
            save(iteration, built.chunks, built.optimizer, None, 1, context)
            if rank == 0 and iteration == 10:
                Path(folder, "iter_0000010", "manifest.bcp").write_bytes(b"damaged")
        for replaced in context.values():
            replaced.folders.close(60)


def test_a_damaged_checkpoint_stays_and_does_not_stop_deletions(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(retain_beside_damaged, str(tmp_path), world_size=2, timeout_s=280)
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000010", "iter_0000030"]


def refuse(rank: int, world_size: int, folder: str) -> None:
    with training(folder, non_persistent_ckpt_type="local") as (_, built, save, load):
        for call in (
            lambda: save(1, built.chunks, built.optimizer, None, 0, non_persistent_ckpt=True),
            lambda: load(built.chunks, built.optimizer, None),
        ):
            with pytest.raises(bcp.CheckpointMismatchError, match="--non-persistent-ckpt-type local is not supported"):
                call()
    with training(folder) as (_, built, save, _):
        with pytest.raises(bcp.CheckpointMismatchError, match="tensor_rank is not supported"):
            save(1, built.chunks, built.optimizer, None, 0, tensor_rank=1)
        with pytest.raises(bcp.CheckpointMismatchError, match="rng_state_key_prefix"):
            save(1, built.chunks, built.optimizer, None, 0, rng_state_key_prefix="vision.")
    with (
        training(folder, freeze_all_layers=True) as (_, built, save, _),
        pytest.raises(bcp.CheckpointMismatchError, match="--freeze-all-layers"),
    ):
        save(1, built.chunks, built.optimizer, None, 0)
    assert not list(Path(folder).iterdir())


def test_what_is_not_supported_is_refused_by_name(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(refuse, str(tmp_path), world_size=2, timeout_s=280)


def load_megatrons_own(rank: int, world_size: int, folder: str) -> None:
    with training(folder) as (_, built, _, load):
        from megatron.training import checkpointing

        place = Path(folder, "iter_0000003", f"mp_rank_{rank:02d}")
        place.mkdir(parents=True)
        torch.save({"model": {"weight": torch.ones(2)}, "iteration": 3}, place / "model_optim_rng.pt")
        Path(folder, TRACKER).write_text("3")
        dist.barrier()
        called = len(checkpointing.CALLED)
        assert load(built.chunks, built.optimizer, None, tp_group=None) == (77, 7.0)
        assert checkpointing.CALLED[called:] == [
            "load_checkpoint ['checkpointing_context', 'load_arg', 'strict', 'tp_group']"
        ]


def test_a_checkpoint_of_megatrons_own_is_loaded_by_megatron(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(load_megatrons_own, str(tmp_path), world_size=2, timeout_s=280)


def repeat_a_step(rank: int, world_size: int, folder: str) -> list[str]:
    from megatron.core import rerun_state_machine as rerun

    modes = {"mode": rerun.RerunMode.REPORT_DETERMINISM_STATS}
    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(**modes)
    machine = rerun.get_rerun_state_machine()
    machine.state, machine.current_iteration = rerun.RerunState.RERUNNING_FROM_CHECKPOINT, 41
    machine.failed_validation_call = rerun.Call(rerun.Caller("loss", rank), 2)
    machine.initial_result, machine.max_values = torch.tensor(0.5 + rank), {"grad": 2.0}
    with training(folder) as (_, built, save, _):
        save(40, built.chunks, built.optimizer, None, 0)
    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(**modes)
    with training(folder) as (_, built, _, load):
        load(built.chunks, built.optimizer, None)
    found = rerun.get_rerun_state_machine()
    names = ("mode", "state", "current_iteration", "failed_validation_call", "initial_result", "max_values")
    wrong = [name for name in names if getattr(found, name) != getattr(machine, name)]
    rerun.destroy_rerun_state_machine()
    return wrong


def test_a_step_that_is_to_be_repeated_is_known_after_a_restart(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(repeat_a_step, str(tmp_path), world_size=2, timeout_s=280) == [[], []]


@pytest.mark.parametrize("name", ["destroy_rerun_state_machine", "defaultdict", "of_another_release"])
def test_a_checkpoint_names_nothing_but_enums_and_named_tuples(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(DOUBLES)
    from megatron.core import rerun_state_machine

    from bytecheckpoint.integrations.megatron.plain import with_classes

    with pytest.raises(bcp.CheckpointMismatchError, match=f"the checkpoint names '{name}'"):
        with_classes({"state": [{"class": name, "items": []}]}, rerun_state_machine)


def test_install_replaces_both_functions_where_the_loop_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOUBLES)
    from megatron.training import checkpointing
    from megatron.training import training as loop

    from bytecheckpoint.integrations import megatron

    for module in (checkpointing, loop):
        for name in ("save_checkpoint", "load_checkpoint"):
            monkeypatch.setattr(module, name, getattr(module, name))
    megatron.install(options=bcp.SaveOptions(max_file_bytes=2**30))
    assert checkpointing.save_checkpoint is loop.save_checkpoint
    assert checkpointing.save_checkpoint.func is megatron.save_checkpoint
    assert loop.load_checkpoint.func is megatron.load_checkpoint
