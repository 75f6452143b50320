"""Runs examples/ray_train.py in a cluster of Ray's on this machine: undisturbed, with a worker that is killed, and with
one that is sent SIGTERM, twice under one name. Then a run keeps the best by a metric, and one reports a step twice. All
processes are ended.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

import psutil
import ray
import ray.cloudpickle
import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import bytecheckpoint as bcp
from bytecheckpoint.integrations.ray import report, run_path

SCORES = (1.0, 3.0, 0.0, 2.0)
"""Of steps 0 to 3 in the run that keeps the best."""
EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_train.py"


def the_example() -> Any:
    spec = spec_from_file_location("ray_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ray_train"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import it
    return module


def save_scored(_: dict[str, Any]) -> None:
    for step, score in enumerate(SCORES):
        handle = bcp.save(run_path(), {"weight": torch.full((4,), score)}, step=step, async_save=True)
        report({"score": score}, handle)


def run_scored(storage: Path) -> dict[str, Any]:
    best = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score", checkpoint_score_order="max")
    run = RunConfig(name="scored", storage_path=str(storage), checkpoint_config=best)
    result = TorchTrainer(save_scored, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()
    found = result.get_best_checkpoint("score", "max")
    return {"best": found.path, "newest": result.checkpoint.path}


def save_first_step(config: dict[str, Any]) -> None:
    for value in config["values"]:
        options = bcp.SaveOptions(overwrite=True)
        handle = bcp.save(run_path(), {"weight": torch.full((4,), value)}, step=0, async_save=True, options=options)
        report({}, handle)


def run_repeated(storage: Path, values: list[float]) -> tuple[str, float]:
    """Runs a job that saves step 0 once for each value, and keeps one checkpoint. Returns its error and that value."""
    run = RunConfig(name="repeated", storage_path=str(storage), checkpoint_config=CheckpointConfig(num_to_keep=1))
    trainer = TorchTrainer(
        save_first_step,
        train_loop_config={"values": values},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run,
    )
    message = ""
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        message = str(error)
    return message, bcp.load_tree(storage / "repeated" / "step_00000000")["weight"][0].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bcp-ray-", dir="/tmp")  # the names of Ray's sockets must be short
    try:
        ray.init(
            num_cpus=4,
            object_store_memory=200 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        example = the_example()
        results = {}
        killed, stopped = ["--kill-at", "7"], ["--kill-at", "6", "--signal", "SIGTERM"]
        runs = {"whole": [], "killed": killed, "stopped": stopped, "resumed": stopped}
        for name, more in runs.items():
            folder_of = "stopped" if name == "resumed" else name
            result = example.main(["--storage", str(arguments.storage), "--name", folder_of, *more])
            results[name] = {"checkpoint": result.checkpoint.path, "metrics": result.metrics}
        results["scored"] = run_scored(arguments.storage)
        results["repeated"] = [run_repeated(arguments.storage, values) for values in ([1.0, 2.0], [3.0])]
        arguments.report.write_text(json.dumps(results))
    finally:
        begun = psutil.Process().children(recursive=True)
        ray.shutdown()
        _, alive = psutil.wait_procs(begun, timeout=20)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=20)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
