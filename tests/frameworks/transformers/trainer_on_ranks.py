"""Programs on ranks for test_transformers_ranks.py; the first argument names one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from trainer_runs import (
    AtStep,
    BcpTrainer,
    Masked,
    are_equal,
    folders,
    kill_after,
    losses,
    parameters,
    small_model,
    terminate_and_be_heard,
    trainer,
)
from transformers import TrainingArguments

HALF = {"per_device_train_batch_size": 4}
FSDP: Mapping[str, Any] = HALF | {
    "fsdp": True,
    "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
}
LORA = LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.1, fan_in_fan_out=True, task_type="CAUSAL_LM")


class ShardedOnCpu(BcpTrainer):
    """FSDP2 on CPUs: accelerate takes it up on accelerators only, and DDP instead here, so it is told of one."""

    def __init__(self, model: Any, args: TrainingArguments, **given: Any) -> None:
        args._setup_devices  # noqa: B018  a property that joins the ranks
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        super().__init__(model, args, **given)


def killed(out: Path) -> None:
    """DDP: both ranks die after step 5."""
    trainer(out, at_step={5: kill_after(out / "checkpoint-4")}, **HALF).train()


def resumed(out: Path) -> None:
    """DDP: goes on after `killed`, and compares with a run that was not interrupted."""
    again = trainer(out, **HALF)
    again.train(resume_from_checkpoint=True)
    whole = trainer(out.with_name("whole"), **HALF)
    whole.train()
    assert are_equal(parameters(again), parameters(whole))
    assert losses(again) == losses(whole)
    constant = trainer(out.with_name("without_dropout"), dropout=0.0, **HALF)
    constant.train()


def fsdp(out: Path) -> None:
    """FSDP2: rank 1 gets a signal; the run goes on, as one that was not interrupted; its model is loaded by others."""
    first = trainer(out, kind=ShardedOnCpu, **FSDP)
    if os.environ["RANK"] == "1":
        first.add_callback(AtStep(3, lambda: terminate_and_be_heard(first)))
    first.train()
    steps = [0, 0]
    dist.all_gather_object(steps, first.state.global_step)
    assert (first.bcp_stop_reason, steps[0]) == ("SIGTERM", steps[1])
    assert 3 <= steps[0] < 10
    assert {type(each) for each in first.model.parameters()} == {DTensor}
    again = trainer(out, save_total_limit=2, kind=ShardedOnCpu, **FSDP)
    again.train(resume_from_checkpoint=True)
    whole = trainer(out.with_name("whole"), kind=ShardedOnCpu, **FSDP)
    whole.train()
    assert are_equal(parameters(again), parameters(whole))
    again.save_model(str(out / "final"))


def fsdp_killed(out: Path) -> None:
    """FSDP2: both ranks die after step 5."""
    trainer(out, at_step={5: kill_after(out / "checkpoint-4")}, kind=ShardedOnCpu, **FSDP).train()


def fsdp_resumed(out: Path) -> None:
    """FSDP2: goes on after `fsdp_killed`, and compares with a run that was not interrupted."""
    again = trainer(out, kind=ShardedOnCpu, save_total_limit=2, **FSDP)
    again.train(resume_from_checkpoint=True)
    whole = trainer(out.with_name("whole"), kind=ShardedOnCpu, **FSDP)
    whole.train()
    assert are_equal(parameters(again), parameters(whole))
    assert losses(again) == losses(whole)
    assert folders(out) == ["checkpoint-10", "checkpoint-8"]


class ScoredOnCpu(ShardedOnCpu):
    """Its evaluations say that step 4 is the best, after a real evaluation."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().evaluate(*args, **kwargs) | {"eval_loss": abs(self.state.global_step - 4.0)}


def fsdp_best(out: Path) -> None:
    """FSDP2: the best checkpoint stays, and is loaded at the end."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    run = trainer(out, kind=ScoredOnCpu, max_steps=8, **best, **FSDP)
    at: dict[int, Any] = {}
    for step in (4, 8):
        run.add_callback(AtStep(step, lambda step=step: at.update({step: parameters(run)})))
    run.train()
    assert run.state.best_model_checkpoint == str(out / "checkpoint-4")
    assert are_equal(parameters(run), at[4])
    assert not are_equal(parameters(run), at[8])
    assert folders(out) == ["checkpoint-4"]


def fsdp_adapters(out: Path) -> None:
    """FSDP2 with PEFT: adapters alone are saved, and the run goes on."""
    first = trainer(out, model=get_peft_model(small_model(), LORA), kind=ShardedOnCpu, **FSDP)
    first.train()
    again = trainer(out, model=get_peft_model(small_model(), LORA), kind=ShardedOnCpu, **FSDP)
    again.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert are_equal(parameters(again), parameters(first))


def dispatched(out: Path) -> None:
    """DDP, with rank 0 reading samples that are drawn at random for both: goes on in the first epoch and the second."""
    given = HALF | {"accelerator_config": {"dispatch_batches": True}}
    whole = trainer(out, **given)
    whole.train_dataset = Masked()
    whole.train()
    for step in (4, 8):
        again = trainer(out, **given)
        again.train_dataset = Masked()
        again.train(resume_from_checkpoint=str(out / f"checkpoint-{step}"))
        assert are_equal(parameters(again), parameters(whole))
        assert losses(again) == losses(whole)


if __name__ == "__main__":
    ways = (killed, resumed, dispatched, fsdp, fsdp_killed, fsdp_resumed, fsdp_best, fsdp_adapters)
    {each.__name__: each for each in ways}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()
