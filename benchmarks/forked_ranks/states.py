"""Builds states with the same bytes on each rank whatever the number of ranks, shards of a few kB with AdamW's moments
and small tensors that all ranks hold; saves, loads and compares them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
import bytecheckpoint.api  # the package imports it when it is first used, and that would be in each rank
from bytecheckpoint.distributed.ranks import Subject, join_ranks
from bytecheckpoint.storage.layout import MANIFEST_NAME

ROWS, COLUMNS = 7, 61
"""Shape of a shard of the dict: 1.7 kB."""
NUM_NORMS = 20
OUT, WIDTH = 16, 128
"""Shape of a shard of a Linear: 8 kB."""
WEIGHTS_OF_LAYER = 8
"""Weights of the dict for one layer of the module: so both states have about as many bytes."""


class Calls:
    """State of one rank, and the calls that are measured with it."""

    def __init__(self, *, library: str, state: str, tensors: int, parts: int, folder: str) -> None:
        """`parts` is the number of ranks that save: the global shapes follow from it."""
        self._library, self._folder = library, folder
        build = dict_state if state == "dict" else module_state
        self._expected, _ = build(tensors, parts, value=1.0)
        self._held, self._state = build(tensors, parts, value=1.0)
        self._objects = self._state if state == "objects" else {}
        self.came_at = self.woken_at = 0.0
        """Times on the monotonic clock at which this rank came to the last meeting, and was woken in it."""

    def prepare(self, call: str) -> None:
        if call.startswith("load"):
            for tensor in self._held.values():
                tensor.zero_()
        dist.barrier()

    def run(self, call: str, number: int) -> int | None:
        """Makes the call; returns the bytes that it has read of the checkpoint, if the library reports them."""
        if call.startswith("late"):
            self._meet(late_s=float(call.split()[1]))
            return 0
        if call == "save":
            path = f"{self._folder}/{number}"
            if self._library == "bcp":
                bcp.save(path, self._state)
            else:
                dcp.save(self._as_dict(), checkpoint_id=path)
            return None
        path = f"{self._folder}/0"
        if self._library == "dcp":
            self._load_dcp(path)
            return None
        exchange: Any = "on" if call.endswith("exchanged") else "off"
        report = bcp.load(path, self._state, options=bcp.LoadOptions(exchange=exchange, timeout_s=120))
        # One rank reads the manifest for all.
        return report.num_bytes_read + (Path(path, MANIFEST_NAME).stat().st_size if dist.get_rank() == 0 else 0)

    def _meet(self, *, late_s: float) -> None:
        is_own = self._library == "bcp"
        ranks = join_ranks(None, 600.0, about=Subject("(a meeting)", None, is_save=False)) if is_own else None
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(late_s)
        self.came_at = time.monotonic()
        if ranks is not None:
            ranks.barrier()
        else:
            of_dcp = _DistWrapper(None, use_dist=True, coordinator_rank=0)
            of_dcp.reduce_scatter("meeting", lambda: None, lambda parts: parts)
        self.woken_at = time.monotonic()
        if ranks is not None:
            ranks.close()

    def check(self, call: str) -> None:
        wrong = [name for name, tensor in self._held.items() if not torch.equal(tensor, self._expected[name])]
        if wrong:
            raise ValueError(f"{call}: {wrong[:3]} of {len(wrong)} tensors are not what was saved")

    def local_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    def _load_dcp(self, path: str) -> None:
        content = self._as_dict()
        dcp.load(content, checkpoint_id=path)
        if self._objects:
            model, optimizer = self._objects["model"], self._objects["optimizer"]
            set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])

    def _as_dict(self) -> dict[str, Any]:
        if not self._objects:
            return dict(self._state)
        model, optimizer = get_state_dict(self._objects["model"], self._objects["optimizer"])
        return {"model": model, "optimizer": optimizer}


def dict_state(num_tensors: int, parts: int, *, value: float) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
    """Returns local tensors by name, and the state that holds them."""
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,))
    rows, columns = ROWS * parts // num_ranks, COLUMNS
    first = ROWS * parts // num_ranks * dist.get_rank()
    held: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for number in range(num_tensors):
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            place = torch.arange(first * columns, (first + rows) * columns, dtype=torch.float32)
            local = held[f"{number}.{name}"] = (place + value + number + len(name)).reshape(rows, columns)
            shape = (rows * num_ranks, columns)
            state[f"{number}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(columns, 1))
        state[f"{number}.step"] = held[f"{number}.step"] = torch.tensor(value + number)
    for number in range(min(NUM_NORMS, num_tensors)):
        state[f"{number}.norm"] = held[f"{number}.norm"] = torch.full((64,), value + number)
    return held, state


def module_state(num_tensors: int, parts: int, *, value: float) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
    """Does the same for Linears that FSDP2 has sharded and an AdamW that has made a step."""
    torch.manual_seed(int(value))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        layers = [torch.nn.Linear(WIDTH, OUT * parts) for _ in range(max(num_tensors // WEIGHTS_OF_LAYER, 1))]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = torch.nn.Sequential(*layers)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = {}
    for number, parameter in enumerate(model.parameters()):
        for name, tensor in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            local = held[f"{number}.{name}"] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            first = local.numel() * dist.get_rank() if isinstance(tensor, DTensor) else 0
            local.copy_(torch.arange(first, first + local.numel()).reshape(local.shape) % 65521 + number + len(name))
    return held, {"model": model, "optimizer": optimizer}
