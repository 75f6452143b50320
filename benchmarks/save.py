"""Times saves, the stall of training, the training time lost, and measures the memory that saves need: bytecheckpoint
beside torch DCP, torchsnapshot, the open-source ByteCheckpoint, torch.save, safetensors and what the machine can do,
interleaved in one run so that a change of the machine's speed hits all alike.

    python benchmarks/run.py save                                        # everything, at full size: W1 has 2 GB
    python benchmarks/run.py save --size 0.1 --workloads W1 --rounds 3   # on a laptop
    python benchmarks/run.py save --workloads W1 W3 --against PATH           # beside another checkout of the library
    python benchmarks/run.py save --json r.json --markdown r.md --plot r.png
    python benchmarks/run.py save --read r.json --plot r.png             # the same figures again, nothing measured

torchsnapshot and the open-source ByteCheckpoint run in an environment of their own (see requirements-peers.txt), whose
Python --peers names. Needs Linux and, at full size, 20 GiB of memory.

Columns:
  durable   from the call until the checkpoint is on disk. Candidates that do not sync are synced within that time.
  stall     for which the call holds the training thread.
  lost      of training time by an asynchronous save: the stall, and what the steps until the checkpoint is durable
            took longer than as many undisturbed ones, measured just before and after.
  limit: ... in the second table: timed as an asynchronous save is, once a round, while ranks that have returned train.
  memory    what two saves need beyond the state and what training needs, all processes, without the page cache.
bytecheckpoint gets modules and optimizers and takes them apart within the measured time; the others get the same
tensors ready by name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from saves.plot import plot
from saves.registry import CANDIDATES
from saves.report import report
from saves.rounds import SaveRounds
from shared import comparison
from shared.results import Row
from shared.rounds import Settings
from shared.workloads import SAVED, Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    comparison.add_arguments(parser, SAVED, CANDIDATES, rounds=5)
    parser.add_argument("--memory", nargs="*", default=["W1", "W2"], help="workloads whose memory is measured as well")
    parser.add_argument("--plot", type=Path, help="draw stall and durable there, as PNG; needs matplotlib")


def run(arguments: argparse.Namespace) -> None:
    def measure(workload: Workload, names: list[str], settings: Settings) -> tuple[dict[str, Row], int]:
        rounds = SaveRounds(workload, names, settings)
        rounds.time()
        if workload.name in arguments.memory:
            rounds.measure_memory()
        return rounds.rows, rounds.state_bytes

    results = comparison.run(arguments, SAVED, measure, report)
    if arguments.plot is not None:
        plot(results, arguments.plot)
