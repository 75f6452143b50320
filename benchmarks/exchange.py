"""What it is worth that ranks read once what several of them want: loading with the exchange on and off, and with torch
DCP, from a simulated object store and from a local folder, all in turn within each round.

    python benchmarks/exchange.py [--mb 256] [--ranks 4] [--rounds 3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from slow_store import register
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp

MB = 1_000_000
COLUMNS = 1024
NUM_TENSORS = 16
LAYOUTS = {"DDP": Replicate(), "FSDP2 to TP": Shard(1)}
STORES = {"object store": "slow://", "local folder": ""}
LATENCY_S, BYTES_PER_S = 0.02, 100e6


class Load(NamedTuple):
    """One load, as a rank saw it."""

    seconds: float
    num_bytes_read: int


State = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where the checkpoints go, for a while")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="exchange-", dir=arguments.folder)
    try:
        mp.spawn(run_rank, (arguments, folder, port), nprocs=arguments.ranks)
    finally:
        shutil.rmtree(folder)


def run_rank(rank: int, arguments: argparse.Namespace, folder: str, port: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, arguments.ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    rows = arguments.mb * MB // (NUM_TENSORS * COLUMNS * 4)
    saved = make_state(mesh, rows, Shard(0))
    bcp.save(f"{folder}/bcp", {"s": saved})
    dcp.save(saved, checkpoint_id=f"{folder}/dcp")
    loads: dict[tuple[str, str, str], list[list[Load]]] = {}
    for number in range(arguments.rounds):
        for store_name, prefix in STORES.items():
            for layout, placement in LAYOUTS.items():
                state = make_state(mesh, rows, placement)
                expected = {name: tensor.to_local().clone() for name, tensor in state.items()}
                for contestant, load in contestants(prefix + folder).items():
                    for tensor in state.values():
                        tensor.to_local().zero_()
                    found = timed(load, state)
                    loads.setdefault((store_name, layout, contestant), []).append(found)
                    if number == 0:
                        check(state, expected, contestant)
    if rank == 0:
        print_table(loads, rows * COLUMNS * 4 * NUM_TENSORS, arguments)
    dist.barrier()
    dist.destroy_process_group()


def make_state(mesh: DeviceMesh, rows: int, placement: Any) -> dict[str, DTensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"w{number}": distribute_tensor(torch.randn(rows, COLUMNS, generator=generator), mesh, [placement])
        for number in range(NUM_TENSORS)
    }


def check(state: State, expected: State, contestant: str) -> None:
    wrong = [name for name, tensor in state.items() if not torch.equal(tensor.to_local(), expected[name])]
    if wrong:
        raise SystemExit(f"{contestant} loaded {wrong} wrongly")


def contestants(folder: str) -> dict[str, Callable[[State], int | None]]:
    """How to load a state; each gives the bytes that it says it has read, if it does."""

    def load(exchange: Any) -> Callable[[State], int]:
        options = bcp.LoadOptions(exchange=exchange)
        return lambda state: bcp.load(f"{folder}/bcp", {"s": state}, options=options).num_bytes_read

    def load_dcp(state: State) -> None:
        if folder.startswith("slow://"):
            dcp.load(state, storage_reader=FsspecReader(f"{folder}/dcp"))
        else:
            dcp.load(state, checkpoint_id=f"{folder}/dcp")

    return {"exchange on": load("on"), "exchange off": load("off"), "torch DCP": load_dcp}


def timed(load: Callable[[State], int | None], state: State) -> list[Load]:
    """The load on every rank."""
    storage = register(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
    dist.barrier()
    began = time.perf_counter()
    num_bytes = load(state)
    dist.barrier()
    mine = Load(time.perf_counter() - began, storage.num_bytes_read or num_bytes or 0)
    found: list[Load] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def print_table(
    loads: dict[tuple[str, str, str], list[list[Load]]], state_bytes: int, arguments: argparse.Namespace
) -> None:
    print(
        f"{arguments.ranks} ranks, {state_bytes / MB:.0f} MB, {arguments.rounds} rounds; object store: "
        f"{LATENCY_S * 1000:.0f} ms and {BYTES_PER_S / MB:.0f} MB/s a request"
    )
    print(f"{'':31}{'median s':>10}{'min s':>8}{'max s':>8}{'of DCP':>8}{'read':>8}")
    for (store, layout, contestant), rounds in loads.items():
        seconds = [found[0].seconds for found in rounds]
        peer = statistics.median(found[0].seconds for found in loads[store, layout, "torch DCP"])
        read = sum(load.num_bytes_read for load in rounds[-1]) / state_bytes
        median = statistics.median(seconds)
        print(
            f"{store:14}{layout:12} {contestant:13}{median:>1.2f}".ljust(41)
            + f"{min(seconds):8.2f}{max(seconds):8.2f}{median / peer:8.2f}"
            + (f"{read:7.2f}x" if read else f"{'-':>8}")
        )


if __name__ == "__main__":
    main()
