"""Hugging Face's Trainer with the mixin, on ranks: DDP and FSDP2 with gloo, and another number of ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from rank_programs import run_ranks

import bytecheckpoint as bcp

transformers = pytest.importorskip("transformers")

from frameworks.transformers.trainer_runs import (  # noqa: E402
    are_equal,
    losses,
    small_model,
    trainer,
)

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("default"),  # of the packages
    pytest.mark.timeout(600),  # each start of a program imports torch and transformers on both ranks
]
PROGRAM = Path(__file__).with_name("trainer_on_ranks.py")
ENVIRONMENT = {"PYTHONPATH": "tests"}


def test_ddp_goes_on_after_both_ranks_were_killed_and_on_one_rank(tmp_path: Path) -> None:
    out = tmp_path / "run"
    killed = [-signal.SIGKILL] * 2
    run_ranks(PROGRAM, ["killed", out], world_size=2, exit_codes=killed, environment=ENVIRONMENT)
    run_ranks(PROGRAM, ["resumed", out], world_size=2, environment=ENVIRONMENT)
    assert bcp.open(out / "checkpoint-10").info.world_size == 2
    # One process with the same global batch trains on the same samples; its sums are rounded in another order.
    whole = tmp_path / "without_dropout"
    alone = trainer(whole, dropout=0.0)
    expected = json.loads((whole / "checkpoint-10" / "trainer_state.json").read_text())["log_history"]
    alone.train(resume_from_checkpoint=str(whole / "checkpoint-4"))
    assert losses(alone) == pytest.approx({each["step"]: each["loss"] for each in expected}, abs=1e-4)


def test_fsdp2_stops_by_a_signal_to_one_rank_goes_on_and_loads_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_ranks(PROGRAM, ["fsdp", out], world_size=2, environment=ENVIRONMENT)
    newest = out / "checkpoint-10"
    files = [path.name for path in (newest / "data").iterdir()]
    assert {name.split("-")[1] for name in files} == {"00000", "00001"}  # each rank has written its part
    final = transformers.AutoModelForCausalLM.from_pretrained(out / "final")
    model = small_model()
    bcp.load(newest, {"model": model})
    assert are_equal(dict(model.named_parameters()), dict(final.named_parameters()))
    alone = trainer(out, max_steps=12)
    alone.train(resume_from_checkpoint=True)
    assert alone.state.global_step == 12
    assert sorted(losses(alone)) == list(range(1, 13))


def test_fsdp2_goes_on_bit_for_bit_after_both_ranks_were_killed(tmp_path: Path) -> None:
    out, killed = tmp_path / "run", [-signal.SIGKILL] * 2
    run_ranks(PROGRAM, ["fsdp_killed", out], world_size=2, exit_codes=killed, environment=ENVIRONMENT)
    assert not (out / "checkpoint-6").exists()
    run_ranks(PROGRAM, ["fsdp_resumed", out], world_size=2, environment=ENVIRONMENT)
    ends = [bcp.open(tmp_path / name / "checkpoint-10").state_dict() for name in ("run", "whole")]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_fsdp2_loads_the_best_checkpoint_at_the_end_and_keeps_it_alone(tmp_path: Path) -> None:
    run_ranks(PROGRAM, ["fsdp_best", tmp_path], world_size=2, environment=ENVIRONMENT)


def test_fsdp2_saves_the_adapters_of_peft_alone(tmp_path: Path) -> None:
    run_ranks(PROGRAM, ["fsdp_adapters", tmp_path], world_size=2, environment=ENVIRONMENT)
    names = [name for name in bcp.open(tmp_path / "checkpoint-10") if name.startswith("model.")]
    assert names
    assert all("lora_" in name for name in names)
