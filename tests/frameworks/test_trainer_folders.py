"""Folders that the Trainer of transformers and Accelerate have saved, and files of Lightning: model, optimizer and
scheduler go on from them, also once they were converted, and no tensor in them is unaccounted for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from formats.accounting import lost
from formats.foreign_files import assert_same, convert

import bytecheckpoint as bcp

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def assert_equal(state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Values of all three, the optimizer's by parameter."""
    assert_same(dict(state["model"].state_dict()), dict(saved["model"].state_dict()))
    for of_new, of_saved in zip(state["model"].parameters(), saved["model"].parameters(), strict=True):
        assert_same(state["optimizer"].state[of_new], saved["optimizer"].state[of_saved])
    for of_new, of_saved in zip(state["optimizer"].param_groups, saved["optimizer"].param_groups, strict=True):
        assert {**of_new, "params": None} == {**of_saved, "params": None}
    assert state["scheduler"].state_dict() == saved["scheduler"].state_dict()


def llama(seed: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def trainer_of(model: torch.nn.Module, folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    data = [{key: torch.randint(0, 64, (8,)) for key in ("input_ids", "labels")} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        warmup_steps=1,
        weight_decay=0.1,
        disable_tqdm=True,
        lr_scheduler_type="cosine",
    )
    return Trainer(model=model, args=arguments, train_dataset=data)


def parts_of(trainer: Any) -> dict[str, Any]:
    """Torch's own objects, without Accelerate around them."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {"model": trainer.model, "optimizer": optimizer, "scheduler": trainer.lr_scheduler}


@needs("transformers")
def test_a_folder_of_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(llama(0), tmp_path / "run")
    trainer.train()
    source = tmp_path / "run" / "checkpoint-3"
    convert(source, tmp_path / "own")
    for path in (source, tmp_path / "own"):
        new = trainer_of(llama(1), tmp_path / "other")
        new.create_optimizer_and_scheduler(3)
        state = parts_of(new)
        assert bcp.load(path, state).step == 3
        assert_equal(state, parts_of(trainer))
        bcp.load(path, {"net": llama(2)})
    assert lost(source) == []
    for name in ("rng_state.pth", "trainer_state.json", "training_args.bin"):
        assert name in bcp.open(source).info.metadata["left_out"]


@needs("accelerate")
@pytest.mark.parametrize("is_safe", [True, False])
def test_a_folder_of_accelerate(tmp_path: Path, *, is_safe: bool) -> None:
    from accelerate import Accelerator

    def new_state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 + seed)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10 + seed)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "model_1": torch.nn.Linear(2, 2)}

    saved = new_state(0)
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, _ = accelerator.prepare(*saved.values())
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 3)).square().sum())
        optimizer.step()
        scheduler.step()
    accelerator.save_state(str(tmp_path / "c"), safe_serialization=is_safe)
    convert(tmp_path / "c", tmp_path / "own")
    for path in (tmp_path / "c", tmp_path / "own"):
        state = new_state(1)
        bcp.load(path, state)
        assert_equal(state, saved)
        assert_same(state["model_1"].state_dict(), saved["model_1"].state_dict())
    assert lost(tmp_path / "c") == []


@needs("lightning")
def test_a_file_of_lightning(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    module = Module()
    best = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, monitor="loss", every_n_train_steps=2)
    quiet = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", default_root_dir=tmp_path, callbacks=[best], devices=1, **quiet
    )
    trainer.fit(module, torch.utils.data.DataLoader([torch.ones(3) * number for number in range(8)], batch_size=2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    saved = {
        "model": module,
        "optimizer": trainer.optimizers[0],
        "scheduler": trainer.lr_scheduler_configs[0].scheduler,
    }
    convert(tmp_path / "x.ckpt", tmp_path / "own")
    key_map = [("^state_dict", "model"), ("^optimizer_states", "optimizer"), ("^lr_schedulers", "scheduler")]
    for path in (tmp_path / "x.ckpt", tmp_path / "own"):
        for is_renamed in (True, False):
            new = Module()
            made = new.configure_optimizers()
            state = {"model": new, "optimizer": made["optimizer"], "scheduler": made["lr_scheduler"]}
            named = dict(zip(("state_dict", "optimizer_states", "lr_schedulers"), state.values(), strict=True))
            bcp.load(path, state if is_renamed else named, key_map=key_map if is_renamed else None)
            assert_equal(state, saved)
    assert lost(tmp_path / "x.ckpt") == []
