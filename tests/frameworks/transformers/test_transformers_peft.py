"""Hugging Face's Trainer with the mixin and PEFT: adapters alone, or all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp

peft = pytest.importorskip("peft")

from frameworks.transformers.trainer_runs import (  # noqa: E402
    BcpTrainer,
    are_equal,
    parameters,
    small_model,
    trainer,
)

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]  # of the packages
LORA: dict[str, Any] = {"target_modules": ["c_attn"], "r": 2, "lora_dropout": 0.1, "fan_in_fan_out": True}


class WithBase(BcpTrainer):
    bcp_save_base = True


def adapted(**changed: Any) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(small_model(), peft.LoraConfig(task_type="CAUSAL_LM", **LORA | changed))


def names_of_model(folder: Path) -> list[str]:
    return [name for name in bcp.open(folder) if name.startswith("model.")]


@pytest.mark.parametrize("kind", [BcpTrainer, WithBase], ids=["adapters alone", "all"])
def test_a_run_with_adapters_goes_on(tmp_path: Path, kind: type[Any]) -> None:
    whole = trainer(tmp_path, model=adapted(), kind=kind)
    whole.train()
    has_base = any("lora_" not in name for name in names_of_model(tmp_path / "checkpoint-4"))
    assert has_base is (kind is WithBase)
    resumed = trainer(tmp_path, model=adapted(), kind=kind)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert are_equal(parameters(resumed), parameters(whole))


def test_a_checkpoint_of_adapters_is_small(tmp_path: Path) -> None:
    run = trainer(tmp_path, model=adapted(), max_steps=2)
    run.train()
    trained = sum(each.numel() for each in run.model.parameters() if each.requires_grad)
    model_bytes = sum(
        bcp.open(tmp_path / "checkpoint-2")[name].nbytes for name in names_of_model(tmp_path / "checkpoint-2")
    )
    assert model_bytes == 4 * trained


def test_the_choice_at_the_save_counts(tmp_path: Path) -> None:
    whole = trainer(tmp_path, model=adapted(), kind=WithBase)
    whole.train()
    resumed = trainer(tmp_path, model=adapted())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert are_equal(parameters(resumed), parameters(whole))


def test_adapters_load_into_a_peft_model_without_the_trainer_and_are_exported(tmp_path: Path) -> None:
    run = trainer(tmp_path, model=adapted(), max_steps=2)
    run.train()
    model = adapted()
    report = bcp.load(tmp_path / "checkpoint-2", {"model": model}, strict=False)
    assert report.unexpected == []
    assert are_equal(dict(model.named_parameters()), parameters(run))
    run.save_model(str(tmp_path / "final"))
    loaded = peft.PeftModel.from_pretrained(small_model(), tmp_path / "final")
    assert are_equal(dict(loaded.named_parameters()), parameters(run))


def test_layers_that_are_trained_in_full_and_other_adapters_are_saved(tmp_path: Path) -> None:
    model = adapted(modules_to_save=["ln_f"])
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    run = trainer(tmp_path, model=model, max_steps=2)
    run.train()
    names = names_of_model(tmp_path / "checkpoint-2")
    assert any("ln_f.modules_to_save.default.weight" in name for name in names)
    assert any("lora_A.other.weight" in name for name in names)
    assert not any("base_layer" in name for name in names)


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    class Worse(BcpTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return super().evaluate(*args, **kwargs) | {"eval_loss": float(self.state.global_step)}

    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    run = trainer(tmp_path, model=adapted(), kind=Worse, save_total_limit=1, **best)
    run.train()
    kept = adapted()
    bcp.load(tmp_path / "checkpoint-2", {"model": kept}, strict=False)
    assert are_equal(parameters(run), dict(kept.named_parameters()))


def test_an_optimizer_with_frozen_parameters_is_saved_with_the_whole_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> Any:
        model = adapted()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made = trainer(tmp_path, model=model, max_steps=4)
        made.optimizer = optimizer
        return made

    whole, resumed = run(), run()
    whole.train()
    assert any("the whole model is saved" in each.message for each in caplog.records)
    assert any("lora_" not in name for name in names_of_model(tmp_path / "checkpoint-2"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert are_equal(parameters(resumed), parameters(whole))
