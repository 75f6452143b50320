"""Costs of converting a checkpoint to Hugging Face's layout, against torch's tools for it, and of writing a link and
loading through it. Candidates are interleaved in each round, each in a process of its own, and end when their files are
on the disk.

    python benchmarks/run.py convert                      2 GB, in folders under /tmp
    python benchmarks/run.py convert --gb 0.5 --folder /data

The targets: half the time of torch's consolidation; no more memory than --memory and 300 MB; a link of less than 1 % of
the bytes, through which a load takes at most 1.2 times that of the same bytes as the library saves them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import bytecheckpoint as bcp
import bytecheckpoint.conversion.convert
from bytecheckpoint.tools.main import cli
from shared.child_process import in_a_process
from shared.memory import PeakMemory, own_memory
from shared.page_cache import opened

LAYER_BYTES = 1 << 26
PARTS_OF_LAYER = 8
NUM_SHARDS = 2
MEMORY = "512MB"
CONVERT_TARGET, LOAD_TARGET, LINK_TARGET = 0.5, 1.2, 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gb", type=float, default=2.0, help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more goes before them")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where there is room for them")


def run(arguments: argparse.Namespace) -> None:
    """Prints a line for each conversion, and one for loads."""
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="bcp-convert-"))
    try:
        for write in (write_sharded, write_dcp, write_own):
            in_a_process(write, folder, arguments.gb)
        compare_conversions(folder, arguments.rounds)
        compare_loads(folder, arguments.rounds)
    finally:
        shutil.rmtree(folder)


def state(gb: float) -> dict[str, torch.Tensor]:
    num_layers = max(1, round(gb * 1e9 / LAYER_BYTES))
    rows = LAYER_BYTES // PARTS_OF_LAYER // 2 // 1024
    return {
        f"layers.{layer}.part{part}.weight": torch.full((rows, 1024), float(part), dtype=torch.bfloat16)
        for layer in range(num_layers)
        for part in range(PARTS_OF_LAYER)
    }


def write_sharded(folder: Path, gb: float) -> None:
    """Writes as ranks of FSDP do with HuggingFaceStorageWriter: files of parts of tensors, cut by rows."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=write_shard, args=(folder, gb, rank)) for rank in range(NUM_SHARDS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit("writing the sharded safetensors failed")


def write_shard(folder: Path, gb: float, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_SHARDS)
    mesh = init_device_mesh("cpu", (NUM_SHARDS,))
    sharded = {
        fqn: DTensor.from_local(tensor.chunk(NUM_SHARDS)[rank].contiguous(), mesh, [Shard(0)])
        for fqn, tensor in state(gb).items()
    }
    mapping = dict.fromkeys(sharded, 1)
    path = str(folder / "sharded")
    writer = dcp.HuggingFaceStorageWriter(path, fqn_to_index_mapping=mapping, save_distributed=True)
    dcp.save(sharded, storage_writer=writer)
    dist.destroy_process_group()


def write_dcp(folder: Path, gb: float) -> None:
    warnings.simplefilter("ignore")  # that it is one process is meant
    dcp.save(state(gb), checkpoint_id=folder / "dcp", no_dist=True)


def write_own(folder: Path, gb: float) -> None:
    bcp.save(folder / "own", state(gb))


def convert_sharded(folder: Path) -> None:
    convert(folder / "sharded", folder / "target", "hf")


def consolidate_sharded(folder: Path) -> None:
    names = [path.name for path in (folder / "sharded").iterdir() if path.suffix == ".safetensors"]
    fqns = list(bcp.open(folder / "sharded").keys())
    (folder / "target").mkdir()
    consolidate_safetensors_files(
        str(folder / "sharded"),
        str(folder / "target"),
        fqn_to_index_mapping=dict.fromkeys(fqns, 1),
        num_threads=len(names),
    )


def convert_dcp(folder: Path) -> None:
    convert(folder / "dcp", folder / "target.pt", "torch")


def dcp_to_torch(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dcp_to_torch_save(folder / "dcp", folder / "target.pt")


def convert(source: Path, target: Path, to: str) -> None:
    try:
        cli.main(["convert", str(source), str(target), "--to", to, "--memory", MEMORY, "--json"])
    except SystemExit as ended:  # as the program does
        if ended.code:
            raise RuntimeError(f"bcp convert ended with {ended.code}") from ended


PAIRS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "sharded safetensors to hf": (convert_sharded, consolidate_sharded),
    "DCP to torch.save": (convert_dcp, dcp_to_torch),
}


def compare_conversions(folder: Path, rounds: int) -> None:
    print(f"{'conversion':>30}{'own s':>9}{'torch s':>9}{'ratio':>8}{'own peak MB':>13}{'torch peak MB':>15}")
    for name, pair in PAIRS.items():
        found: list[list[tuple[float, float]]] = [[], []]
        for round_number in range(rounds + 1):
            for index, candidate in enumerate(pair):
                measured = timed(candidate, folder)
                if round_number:
                    found[index].append(measured)
        seconds = [statistics.median(each[0] for each in of_one) for of_one in found]
        peaks = [max(each[1] for each in of_one) for of_one in found]
        ratio = seconds[0] / seconds[1]
        verdict = "" if ratio <= CONVERT_TARGET and peaks[0] <= 512 + 300 else "  MISSED"
        row = f"{name:>30}{seconds[0]:>9.2f}{seconds[1]:>9.2f}{ratio:>8.2f}{peaks[0]:>13.0f}{peaks[1]:>15.0f}"
        print(row + verdict, flush=True)


def timed(candidate: Callable[[Path], None], folder: Path) -> tuple[float, float]:
    """Returns seconds until the files are on the disk, and the peak of memory beyond that of the imports, in MB."""
    for target in (folder / "target", folder / "target.pt"):
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
    os.sync()
    return in_a_process(measure, candidate, folder)


def measure(candidate: Callable[[Path], None], folder: Path) -> tuple[float, float]:
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - of this process, which ends with it
    with PeakMemory(own_memory) as peak:
        started = time.perf_counter()
        candidate(folder)
        for path in [folder / "target", folder / "target.pt", *(folder / "target").glob("*")]:
            if path.exists():
                with opened(path) as fd:
                    os.fsync(fd)
        seconds = time.perf_counter() - started
    return seconds, peak.bytes / 1e6


def compare_loads(folder: Path, rounds: int) -> None:
    command = [sys.executable, "-m", "bytecheckpoint.tools", "convert", str(folder / "sharded"), str(folder / "link")]
    subprocess.run([*command, "--to", "bcp", "--link"], check=True, stdout=subprocess.DEVNULL)
    num_bytes = sum(path.stat().st_size for path in (folder / "sharded").iterdir())
    part = sum(path.stat().st_size for path in (folder / "link").iterdir()) / num_bytes
    verdict = "" if part < LINK_TARGET else "  MISSED"
    print(f"a link writes {part:.4%} of the bytes{verdict}", flush=True)
    seconds: dict[str, list[float]] = {"link": [], "own": []}
    for round_number in range(rounds + 1):
        for name, of_name in seconds.items():
            load_s = in_a_process(load_once, folder / name)
            if round_number:
                of_name.append(load_s)
    medians = {name: statistics.median(of_name) for name, of_name in seconds.items()}
    ratio = medians["link"] / medians["own"]
    verdict = "" if ratio <= LOAD_TARGET else "  MISSED"
    print(f"a load takes {medians['link']:.2f} s through it, {medians['own']:.2f} s natively, {ratio:.2f}{verdict}")


def load_once(path: Path) -> float:
    options = bcp.LoadOptions(follow_links=True)
    described = bcp.open(path, options=options)
    target = {fqn: torch.ones(described[fqn].shape, dtype=described[fqn].dtype) for fqn in described}
    started = time.perf_counter()
    bcp.load(path, target, options=options)
    return time.perf_counter() - started
