"""A run of Lightning's Trainer on several ranks, as tests start it: arguments are one JSON object."""

import errno
import json
import os
import signal
import sys
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning_runs import Regression, kill, train_loader, trainer_of
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from bytecheckpoint.integrations.lightning import BcpDDPStrategy, BcpFSDPStrategy, BcpModelParallelStrategy, saves


class FSDPOnCPU(BcpFSDPStrategy):
    """torch takes the CPU for FSDP only if it is named; Lightning names the index of a GPU, or nothing."""

    def _setup_model(self, model: torch.nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class FullyShardedRegression(Regression):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for module in (self.net[0], self.net[3], self.net):
            fully_shard(module, mesh=mesh)


def fail(_: object) -> None:
    raise ValueError("a bad batch")


def refuse_copies(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "the disk is full")


ACTS = {"kill": kill, "fail": fail, "signal": lambda _: os.kill(os.getpid(), signal.SIGTERM)}


def main(folder: str, strategy: str = "ddp", steps: int = 20, act: Any = None, **options: Any) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = {"process_group_backend": "gloo", **options.get("strategy_options", {})}
    sharded = {"data_parallel_size": size, "tensor_parallel_size": 1}
    new_strategy = {
        "ddp": lambda: BcpDDPStrategy(**shared),
        "fsdp": lambda: FSDPOnCPU(**shared),
        "model_parallel": lambda: BcpModelParallelStrategy(**sharded, **shared),
    }[strategy]
    torch.manual_seed(5)
    kind = FullyShardedRegression if strategy == "model_parallel" else Regression
    at = {act["step"]: ACTS[act["what"]]} if act and rank in act["ranks"] else {}
    module = kind(at)
    if rank in options.get("refuse_copies", []):
        saves.copy_step = refuse_copies
    callback = ModelCheckpoint(folder, save_last=True, **{"every_n_train_steps": 3, **options.get("saves", {})})
    trainer = trainer_of(new_strategy(), [callback, Timer()], max_steps=steps, devices=size)
    try:
        trainer.fit(module, train_loader(rank, size), ckpt_path=options.get("ckpt_path"))
    finally:
        paths = [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
        printed = {"losses": module.losses, "rows": module.rows, "paths": list(filter(None, paths))}
        sys.stdout.write(json.dumps(printed) + "\n")
    if options.get("tests"):
        tester = trainer_of(new_strategy(), [], devices=size)
        (tested,) = tester.test(kind(), train_loader(rank, size), ckpt_path=options["tests"])
        sys.stdout.write(json.dumps({**printed, "test_loss": tested["val_loss"]}) + "\n")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
