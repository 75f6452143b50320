"""A loop of Fabric on several ranks, as tests start it: arguments are one JSON object."""

import json
import os
import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import bytecheckpoint as bcp
from bytecheckpoint.integrations.lightning import BcpFabricDDPStrategy, BcpFabricFSDPStrategy


class FabricFSDPOnCPU(BcpFabricFSDPStrategy):
    """torch takes the CPU for FSDP only if it is named; Fabric names the index of a GPU, or nothing."""

    def setup_module(self, module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def refuse_filter(fabric: Fabric, folder: str, state: dict[str, Any]) -> None:
    try:
        fabric.save(f"{folder}/filtered", state, filter={"model": lambda name, _: "bias" not in name})
    except bcp.CheckpointMismatchError as error:
        if "the filter of 'model'" not in error.message or os.path.exists(f"{folder}/filtered"):
            raise
    else:
        raise AssertionError("a filter for a flattened module was taken")


def main(folder: str, strategy: str, *, loads: bool) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    used = {"ddp": BcpFabricDDPStrategy, "fsdp": FabricFSDPOnCPU}[strategy](process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=size, strategy=used)
    fabric.launch()
    torch.manual_seed(7 + loads)
    model = fabric.setup_module(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.manual_seed(100 + rank)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, "rng": bcp.RngState()}
    if loads:
        fabric.load(f"{folder}/three", state)
    losses = {}
    while state["step"] < 6:
        if state["step"] == 3 and not loads:
            fabric.save(f"{folder}/three", state)
            if strategy == "fsdp":
                refuse_filter(fabric, folder, state)
        loss = model(torch.full((2, 4), 0.1 * (state["step"] + rank))).square().sum()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[state["step"]] = loss.item()
        state["step"] += 1
    sys.stdout.write(json.dumps(losses) + "\n")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
