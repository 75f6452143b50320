"""Trains on workers of Ray Train, saves in the background, and goes on from the newest checkpoint when a worker dies.

python examples/ray_train.py --storage /tmp/ray_results --kill-at 7   # kills a worker once; --signal SIGTERM stops
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from bytecheckpoint.integrations.ray import SigtermTorchConfig, WorkerStop, checkpoint_path, report, run_path


def train(config: dict[str, Any]) -> None:
    rank, size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    sources = {str(k): bcp.data.ShuffleBuffer(list(torch.randn(10, 8)), 4, seed=k) for k in range(8)}
    loader = DataLoader(bcp.data.Streams(sources, rank=rank, size=size), batch_size=8 // size)
    torch.manual_seed(rank)
    model = prepare_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress: dict[str, Any] = {"next_step": 0, "losses": [], "starts": []}
    data = bcp.DataLoaderState(loader, rank=rank, size=size)
    state = {"model": model, "optimizer": optimizer, "data": data, "rng": bcp.RngState(), "extra_state": progress}
    loaded = (found := ray.train.get_checkpoint()) and bcp.load(checkpoint_path(found), state)
    batches = iter(loader)
    if loaded:
        loaded.restore_rng()  # the loader has drawn a seed
    progress["starts"].append(progress["next_step"])
    with WorkerStop() as stop:
        for step, batch in zip(range(progress["next_step"], config["steps"]), batches, strict=False):
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress["losses"].append(loss.item())
            if (step, rank) == (config["kill_at"], 1) and not Path(run_path(), "hit").exists():
                hit(Path(run_path()), config["signal"], stop)
            is_last = stop.end_step()
            if (step + 1) % 2 == 0 or is_last:
                progress["next_step"], again = step + 1, bcp.SaveOptions(overwrite=True)  # what Ray has not heard of
                handle = bcp.save(run_path(), state, step=step, async_save=True, options=again)
                report({"step": step, "loss": loss.item()}, handle)
            if is_last:
                return


def hit(run: Path, name: str, stop: WorkerStop) -> None:
    while not (run / "checkpoint_manager_snapshot.json").exists():  # Ray knows a checkpoint
        time.sleep(0.1)
    (run / "hit").touch()
    signal.raise_signal(signal.Signals[name])
    while not stop.reason:  # else so short a run is over before all have agreed
        time.sleep(0.1)


def main(words: list[str] | None = None) -> ray.train.Result:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"storage": "runs", "name": "run", "signal": "SIGKILL", "steps": 10, "kill-at": -1}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    arguments = parser.parse_args(words)
    keep, retry = CheckpointConfig(num_to_keep=2), FailureConfig(max_failures=3)
    run = RunConfig(name=arguments.name, storage_path=arguments.storage, checkpoint_config=keep, failure_config=retry)
    given = {"train_loop_config": vars(arguments), "torch_config": SigtermTorchConfig()}
    return TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=run, **given).fit()


if __name__ == "__main__":
    print(main().checkpoint)
