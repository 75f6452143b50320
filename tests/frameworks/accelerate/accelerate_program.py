"""Trains a small model with accelerate: saved at a step, stopped or killed there, and resumed. Says what tests compare:
the samples, the loss and the learning rate of each step, in full precision, and a digest of all parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bytecheckpoint as bcp
from bytecheckpoint.integrations.accelerate import load_state, save_state

NUM_SAMPLES, NUM_EPOCHS = 24, 3


class Noted:
    """An object that a user registers."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Positioned(IterableDataset[Any]):
    """Samples in order, with a position that is its state."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples, self.position = samples, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.samples):
            self.position += 1
            yield (self.samples[self.position - 1],)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8))


def loader_of(arguments: argparse.Namespace) -> DataLoader[Any]:
    samples = torch.arange(NUM_SAMPLES * 8, dtype=torch.float32).reshape(NUM_SAMPLES, 8) / 100
    if arguments.iterable:
        return DataLoader(Positioned(samples), arguments.batch, num_workers=arguments.workers)
    generator = torch.Generator().manual_seed(arguments.seed) if arguments.generator else None
    return DataLoader(
        TensorDataset(samples), arguments.batch, shuffle=True, num_workers=arguments.workers, generator=generator
    )


def batches_of(accelerator: Any, loader: Any, first_epoch: int, num_to_skip: int) -> Iterator[Any]:
    """Yields the batches of all epochs; the first ones of a resumed run are left out where the loader has no state."""
    first = accelerator.skip_first_batches(loader, num_to_skip) if num_to_skip else loader
    for epoch in range(first_epoch, NUM_EPOCHS):
        yield from first if epoch == first_epoch else loader


def digest(model: nn.Module) -> str:
    values = model.state_dict().values()
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in whole)).hexdigest()[:16]


def take_cpus_for_gpus() -> None:
    """Makes accelerate use FSDP on CPUs. It has DDP there, and says nothing, whatever plugin it gets."""
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))


def prepared(arguments: argparse.Namespace) -> tuple[Any, ...]:
    set_seed(arguments.seed)
    plugin = None
    if arguments.fsdp:
        take_cpus_for_gpus()
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
        )
    accelerator = accelerate.Accelerator(
        cpu=not arguments.fsdp,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=arguments.accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=arguments.stateful,
            use_seedable_sampler=arguments.seedable,
            split_batches=arguments.split,
            dispatch_batches=arguments.dispatch or None,
        ),
        project_config=ProjectConfiguration(
            project_dir=str(arguments.out), automatic_checkpoint_naming=arguments.named, total_limit=2
        ),
    )
    if accelerator.is_fsdp2 != arguments.fsdp:
        raise RuntimeError(f"accelerate runs {accelerator.distributed_type}")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    return accelerator, *accelerator.prepare(model, optimizer, loader_of(arguments), scheduler)


def train(arguments: argparse.Namespace, tell: Callable[[str], object]) -> None:
    accelerator, model, optimizer, loader, scheduler = prepared(arguments)
    if arguments.hook_fails and not accelerator.is_main_process:
        of = {"save": "register_save_state_pre_hook", "load": "register_load_state_pre_hook"}[arguments.hook_fails]
        getattr(accelerator, of)(fail)
    elif arguments.hook_on_rank_0 and accelerator.is_main_process:
        accelerator.register_save_state_pre_hook(nothing)
        accelerator.register_load_state_pre_hook(nothing)
    noted = Noted()
    accelerator.register_for_checkpointing(noted)
    if arguments.resume:
        load_state(accelerator, None if arguments.named else arguments.out)
    if arguments.signal_at:
        signal.signal(signal.SIGTERM, lambda *_: accelerator.set_trigger())
    handle: bcp.SaveHandle | None = None
    first_epoch = noted.step // len(loader)
    for (batch,) in batches_of(accelerator, loader, first_epoch, arguments.skip):
        model.train()
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        step = noted.step = noted.step + 1
        samples = ",".join(str(round(value)) for value in (batch[:, 0] * 100 / 8).tolist())
        tell(f"step {step}: {samples} {loss.item().hex()} {scheduler.get_last_lr()[0].hex()}")
        if step == arguments.save_at:
            handle = save_state(accelerator, arguments.out, step=step)
        if arguments.named:
            handle = save_state(accelerator)
        if step == arguments.stop_at:
            if handle is not None:
                handle.result()
            return
        if step == arguments.die_at:
            assert handle is not None
            handle.result()
            accelerator.wait_for_everyone()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == arguments.signal_at and accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGTERM)
        if arguments.signal_at and accelerator.check_trigger():
            save_state(accelerator, arguments.out, step=step).result()
            tell(f"stopped {step}")
            return
    tell(f"parameters {digest(model)}")


def told(given: Sequence[object]) -> list[str]:
    """Trains in this process, with nothing left of what accelerate knew before. Returns what was told."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    lines: list[str] = []
    train(parsed(list(map(str, given))), lines.append)
    return lines


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    for name, default in {"seed": 1, "batch": 3, "accumulate": 1, "workers": 0, "skip": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hook-fails", choices=["save", "load"])
    for name in ("save-at", "stop-at", "die-at", "signal-at"):
        parser.add_argument(f"--{name}", type=int)
    loader_flags = ("stateful", "seedable", "generator", "split", "dispatch", "iterable")
    for name in (*loader_flags, "fsdp", "resume", "named", "hook-on-rank-0"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(given)


def nothing(*_: object) -> None:
    pass


def fail(*_: object) -> None:
    raise OSError("the hook failed")


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    train(parsed(), write)
