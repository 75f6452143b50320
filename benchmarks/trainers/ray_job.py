"""A loop on workers of Ray Train. Each run has a cluster of its own on this machine and fresh workers, whose first save
does not count.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import bytecheckpoint as bcp
from bytecheckpoint.integrations.ray import checkpoint_path, report, run_path
from trainers.digests import digests
from trainers.meter import Meter, by_age
from trainers.model import BATCH, WIDTH, Blocks
from trainers.options import save_options

OWN = ("own", "own-async")
CANDIDATES = {
    "own": "Ray Train, torch.save and report",
    "own-async": "Ray Train, the same, uploaded in the background",
    "bcp": "bytecheckpoint, save and report",
    "bcp-async": "bytecheckpoint, save and report, async",
    "bcp-lazy-async": "bytecheckpoint, save and report, async, lazy",
}
RUN = "run"
TIMEOUT_S = 250.0


def checkpoints(folder: Path) -> list[Path]:
    return [path for path in by_age(folder / RUN) if path.is_dir()][1:]


def train(candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
    settings = {"candidate": candidate, "mb": mb, "save_every": save_every, "num_steps": num_steps + save_every}
    meter.take(on_workers(work, folder, settings | {"notes_state": meter.notes_state}), skipped=1)


def resume(candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
    del num_steps
    found: dict[str, str] = json.loads(on_workers(go_on, folder, {"candidate": candidate, "mb": mb}))
    return found


def on_workers(loop: Callable[[dict[str, Any]], None], folder: Path, settings: dict[str, Any]) -> str:
    """Runs the loop on as many workers as there are ranks; returns what the worker of this rank wrote down."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    records = folder / f"{loop.__name__}-{num_ranks}"
    done = records / "done"
    if rank == 0:
        records.mkdir()
        fit(loop, folder, settings | {"records": str(records)}, num_ranks)
        done.touch()
    deadline = time.monotonic() + TIMEOUT_S
    while not done.exists():  # rank 0 has the cluster
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run of Ray did not end within {TIMEOUT_S:.0f} s")
        time.sleep(0.05)
    return (records / f"{rank}.json").read_text()


def fit(loop: Callable[[dict[str, Any]], None], folder: Path, settings: dict[str, Any], num_ranks: int) -> None:
    sockets = tempfile.mkdtemp(prefix="bcp-ray-", dir="/tmp")  # their names must be short
    ray.init(
        num_cpus=num_ranks + 1,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=sockets,
        _node_ip_address="127.0.0.1",
    )
    try:
        run_config = RunConfig(name=RUN, storage_path=str(folder))
        workers = ScalingConfig(num_workers=num_ranks)
        TorchTrainer(loop, train_loop_config=settings, scaling_config=workers, run_config=run_config).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(sockets, ignore_errors=True)


def work(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    meter = Meter(samples_memory=True, notes_state=settings["notes_state"])
    model = prepare_model(Blocks(settings["mb"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    meter.watch(optimizer)
    meter.holds(partial(digests, model.module, optimizer))
    state = {"model": model, "optimizer": optimizer}
    save, handle = meter.timed(way_to_save(settings["candidate"], state, is_writer=rank == 0)), None
    for step in range(1, settings["num_steps"] + 1):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        model(inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % settings["save_every"] == 0:
            handle = save(step)
    if handle is not None:
        handle.result()
    Path(settings["records"], f"{rank}.json").write_text(meter.record())


def go_on(settings: dict[str, Any]) -> None:
    blocks = Blocks(settings["mb"])
    model = prepare_model(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpoint = ray.train.get_checkpoint()
    if settings["candidate"].startswith("own"):
        with checkpoint.as_directory() as folder:
            whole = torch.load(Path(folder, "state.pt"))
        blocks.load_state_dict(whole["model"])
        optimizer.load_state_dict(whole["optimizer"])
    else:
        bcp.load(checkpoint_path(checkpoint), {"model": model, "optimizer": optimizer})
    rank = ray.train.get_context().get_world_rank()
    Path(settings["records"], f"{rank}.json").write_text(json.dumps(digests(blocks, optimizer)))


def way_to_save(candidate: str, state: dict[str, Any], *, is_writer: bool) -> Callable[[int], Any]:
    """Returns what saves and reports a step on a worker."""
    mode = CheckpointUploadMode.ASYNC if candidate == "own-async" else CheckpointUploadMode.SYNC

    def own(step: int) -> None:
        if not is_writer:
            ray.train.report({"step": step})
            return
        folder = tempfile.mkdtemp()
        whole = {"model": state["model"].module.state_dict(), "optimizer": state["optimizer"].state_dict()}
        torch.save(whole, Path(folder, "state.pt"))
        ray.train.report(
            {"step": step},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=True,
        )

    def by_library(step: int) -> Any:
        is_async = candidate.endswith("async")
        handle = bcp.save(run_path(), state, step=step, async_save=is_async, options=save_options(candidate))
        report({"step": step}, handle)
        return handle

    return own if candidate.startswith("own") else by_library
