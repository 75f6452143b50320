"""Saves and loads the actor of a verl job by its checkpoint manager, as verl's FSDP engine calls it.

    torchrun --nproc-per-node 2 examples/verl_manager.py --out run --steps 4
    torchrun --nproc-per-node 3 examples/verl_manager.py --out run --steps 6

The second command goes on where the first one ended, on another number of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

from bytecheckpoint.integrations.verl import BcpFSDPCheckpointManager  # was: FSDPCheckpointManager of verl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    manager = BcpFSDPCheckpointManager(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, checkpoint_config=CheckpointConfig()
    )
    first = 0
    found = find_latest_ckpt_path(str(arguments.out))
    if found is not None:
        manager.load_checkpoint(f"{found}/actor")
        first = int(found.rpartition("_")[2])

    for step in range(first + 1, arguments.steps + 1):
        tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 2 == 0:
            manager.save_checkpoint(
                str(arguments.out / f"global_step_{step}/actor"), global_step=step, max_ckpt_to_keep=2
            )
            if dist.get_rank() == 0:  # as verl's driver does
                Path(get_checkpoint_tracker_filename(str(arguments.out))).write_text(str(step))
                print(f"step {step}: loss {loss.item():.4f}")
    manager.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
