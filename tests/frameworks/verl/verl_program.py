"""Trains a tiny model of transformers under fully_shard, and saves and loads it by the manager as verl's engine does.

Arguments are a folder, the last step, and words: `lora`, `async`, `kill`, `no-optimizer`, and `streams` for shuffled
streams and dropout that is another on each rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

import bytecheckpoint as bcp
from bytecheckpoint.integrations.verl import BcpFSDPCheckpointManager

SAVED_AT = 2


def tiny(*, lora: bool, seed: int, hidden_size: int = 16, intermediate_size: int = 24) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    return model


def parts(*, lora: bool = False, seed: int = 0) -> tuple[Any, Any, Any]:
    model = sharded(tiny(lora=lora, seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def driver_loader() -> Any:
    """The loader of verl's driver, over shuffled streams; a batch has rows for two ranks."""
    generator = torch.Generator().manual_seed(2)
    samples = list(torch.randint(0, 64, (32, 8), generator=generator))
    sources = {str(k): bcp.data.ShuffleBuffer(samples[k::4], 4, seed=k) for k in range(4)}
    return StatefulDataLoader(bcp.data.Streams(sources, rank=0, size=1), batch_size=4)


def step_on(model: Any, optimizer: Any, scheduler: Any, step: int, tokens: torch.Tensor | None = None) -> float:
    if tokens is None:
        tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return float(loss.detach())


def wait_for_tracker(root: Path, step: int) -> None:
    tracker, deadline = Path(get_checkpoint_tracker_filename(str(root))), time.monotonic() + 60
    while time.monotonic() < deadline and not (tracker.exists() and tracker.read_text() == str(step)):
        time.sleep(0.05)


def main() -> None:
    root, last, words = Path(sys.argv[1]), int(sys.argv[2]), set(sys.argv[3:])
    dist.init_process_group("gloo")
    contents = ["model", "optimizer", "extra"]
    config = CheckpointConfig(
        save_contents=contents,
        load_contents=[each for each in contents if not (each == "optimizer" and "no-optimizer" in words)],
        async_save="async" in words,
        save_lora_only="lora" in words,
    )
    found = find_latest_ckpt_path(str(root))
    model, optimizer, scheduler = parts(lora="lora" in words, seed=0 if found is None or "lora" in words else 1)
    is_streamed, rank = "streams" in words, dist.get_rank()
    torch.manual_seed(7 + rank * is_streamed)  # else ranks draw alike, so that their number does not count
    loader = driver_loader()
    manager = BcpFSDPCheckpointManager(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, checkpoint_config=config
    )
    first = 0
    if found is not None:
        manager.load_checkpoint(f"{found}/actor")
        first = int(found.rpartition("_")[2])
    if is_streamed and found is not None:
        loader.load_state_dict(torch.load(f"{found}/data.pt", weights_only=False))
    with torch.random.fork_rng():  # the driver is a process of its own
        batches = iter(loader)
    for step in range(first + 1, last + 1):
        with torch.random.fork_rng():
            tokens = next(batches).chunk(2)[rank] if is_streamed else None
        loss = step_on(model, optimizer, scheduler, step, tokens)
        if dist.get_rank() == 0:
            print(f"loss {step} {loss.hex()}", flush=True)  # noqa: T201 - the test reads it
        if step % SAVED_AT == 0:
            folder = root / f"global_step_{step}"
            manager.save_checkpoint(str(folder / "actor"), None, step, max_ckpt_to_keep=2)
            if dist.get_rank() == 0:  # as verl's driver
                torch.save(loader.state_dict() if is_streamed else {}, folder / "data.pt")
                if not config.async_save:
                    Path(get_checkpoint_tracker_filename(str(root))).write_text(str(step))
            dist.barrier()
        if "kill" in words and step == last:
            if "async" in words:
                wait_for_tracker(root, last - last % SAVED_AT)
            os.kill(os.getpid(), signal.SIGKILL)
    manager.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
