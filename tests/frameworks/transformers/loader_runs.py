"""Runs of Hugging Face's Trainer with a train loader of the user's own, which has a state: of torchdata, or of streams.
As a program, on ranks: `loader_runs.py DOING KIND FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import bytecheckpoint as bcp
from bytecheckpoint.integrations.transformers import folders
from frameworks.transformers.trainer_runs import BcpTrainer, Tokens, kill_after, trainer


class Counted(Tokens):
    """Counts the samples that it is asked for."""

    num_read = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_read += 1
        return super().__getitem__(index)


class WithTorchdata(BcpTrainer):
    """Reads a shuffling loader of torchdata, on one rank."""

    def get_train_dataloader(self) -> Any:
        return StatefulDataLoader(self.train_dataset, batch_size=8, shuffle=True)

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), inputs["input_ids"].tolist()]
        return super().training_step(model, inputs, *args)


class WithStreams(WithTorchdata):
    """Reads eight streams, with the same global batches on any number of ranks."""

    def get_train_dataloader(self) -> Any:
        rank, size = self.args.process_index, self.args.world_size
        samples = list(Tokens())
        sources = {str(k): bcp.data.ShuffleBuffer(samples[k::8], 4, seed=k) for k in range(8)}
        return DataLoader(bcp.data.Streams(sources, rank=rank, size=size), batch_size=8 // size)


KINDS = {"torchdata": WithTorchdata, "streams": WithStreams}


def run(kind: str, out: Path, **changed: Any) -> Any:
    """A trainer of 10 steps; with torchdata an epoch has 6."""
    made = trainer(out, kind=KINDS[kind], **changed)
    made.train_dataset = Counted()
    return made


def seen_by_all(of: Any) -> list[list[list[int]]]:
    """The samples of each step of all ranks, sorted."""
    parts = [of.seen] * dist.get_world_size()
    dist.all_gather_object(parts, of.seen)
    return [sorted(row for part in step for row in part) for step in zip(*parts, strict=True)]


def only_rank_0(path: object) -> bool:
    raise AssertionError(f"this rank looks at {path} by itself")


def main(doing: str, kind: str, folder: Path) -> None:
    if doing == "killed":
        run(kind, folder, at_step={5: kill_after(folder / "checkpoint-4")}).train()
    resumed = run(kind, folder)
    if resumed.args.process_index:
        folders.is_committed = only_rank_0
    resumed.train(resume_from_checkpoint=True)
    resumed._load_from_checkpoint(str(folder / "checkpoint-10"))
    seen = seen_by_all(resumed)
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    dist.destroy_process_group()
