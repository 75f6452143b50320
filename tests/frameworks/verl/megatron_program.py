"""Trains by verl's Megatron engine, which saves and loads by the manager that `install` gives it.

Arguments are a folder, the last step, and words: `async`, `offload`, `kill`, and `tp2` for tensor parallelism.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

from bytecheckpoint.integrations import verl
from frameworks.megatron.train_gpt import tracker_on_host
from frameworks.real_megatron import Layout, on_host
from frameworks.verl.megatron_engine import EngineOnHost
from frameworks.verl.verl_program import wait_for_tracker

SAVED_AT = 2


def main() -> None:
    root, last, words = Path(sys.argv[1]), int(sys.argv[2]), set(sys.argv[3:])
    dist.init_process_group("gloo")
    verl.install()
    layout = Layout(tp=2 if "tp2" in words else 1)
    with on_host(layout), tracker_on_host():
        from megatron.core.tensor_parallel import random as megatron_random

        megatron_random.model_parallel_cuda_manual_seed(5)
        engine = EngineOnHost(layout, async_save="async" in words, offload="offload" in words)
        engine.initialize()
        run(engine, root, last, words)
    dist.destroy_process_group()


def run(engine: EngineOnHost, root: Path, last: int, words: set[str]) -> None:
    first, found = 0, find_latest_ckpt_path(str(root))
    if found is not None:
        torch.manual_seed(99)
        engine.load_checkpoint(f"{found}/actor")
        first = int(found.rpartition("_")[2])
    for step in range(first + 1, last + 1):
        engine.to("cuda")
        loss = engine.step(step)
        if "offload" in words:
            engine.to("cpu")  # room for the rollout
        if dist.get_rank() == 0:
            print(f"loss {step} {loss.hex()}", flush=True)  # noqa: T201 - the test reads it
        if step % SAVED_AT == 0:
            folder = root / f"global_step_{step}"
            engine.save_checkpoint(str(folder / "actor"), None, step, max_ckpt_to_keep=2)
            if dist.get_rank() == 0:  # as verl's driver
                torch.save({}, folder / "data.pt")
                if "async" not in words:
                    Path(get_checkpoint_tracker_filename(str(root))).write_text(str(step))
            dist.barrier()
    if "kill" in words:
        wait_for_tracker(root, last - last % SAVED_AT)
        os.kill(os.getpid(), signal.SIGKILL)
    engine.manager.wait()


if __name__ == "__main__":
    main()
