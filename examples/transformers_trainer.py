"""Trains a small GPT-2 with Hugging Face's Trainer, whose checkpoints are this library's: one more base class.

    python examples/transformers_trainer.py --out run --steps 20
    torchrun --nproc-per-node 2 examples/transformers_trainer.py --out run --steps 40 --batch-size 4

The second command goes on where the first one ended, on two processes with the same global batch. Send SIGTERM, and the
run saves, ends, and goes on with the next start.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from bytecheckpoint.integrations.transformers import BcpTrainerMixin, last_checkpoint


class BcpTrainer(BcpTrainerMixin, Trainer):
    """The Trainer with other checkpoints."""


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sums of two random numbers, written in tokens."""

    def __init__(self, size: int) -> None:
        self.numbers = torch.randint(0, 50, (size, 2), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        left, right = self.numbers[index]
        tokens = torch.stack([left, right, left + right])
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="of one process")
    arguments = parser.parse_args()
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=8, n_embd=32, n_layer=2, n_head=2))
    trainer = BcpTrainer(
        model,
        TrainingArguments(
            output_dir=str(arguments.out),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            save_steps=10,
            save_total_limit=2,
            logging_steps=10,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=Sequences(400),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(arguments.out))
    if trainer.bcp_stop_reason:
        print(f"stopped after step {trainer.state.global_step}: start the same command again")
        return
    trainer.save_model()  # a folder for from_pretrained, as ever


if __name__ == "__main__":
    main()
