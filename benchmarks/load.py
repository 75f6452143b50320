"""Times loads and counts the bytes that they read: bytecheckpoint beside torch DCP, torchsnapshot, the open-source
ByteCheckpoint, torch.load, safetensors and what the machine can do, on the layout that saved and on others, interleaved
in one run so that a change of the machine's speed hits all alike.

    python benchmarks/run.py load --json r.json --markdown r.md           # everything, at full size: W1 has 2.1 GB
    python benchmarks/run.py load --workloads W1 4to8 --size 0.1          # on a laptop
    python benchmarks/run.py load --workloads W1 W3 --against PATH    # beside another checkout of the library
    python benchmarks/run.py load --json r.json --resume                  # what r.json does not have yet
    python benchmarks/run.py load --read r.json                           # the same figures again, nothing measured

torchsnapshot and the open-source ByteCheckpoint run in an environment of their own (see requirements-peers.txt), whose
Python --peers names. Needs Linux and, at full size, 16 GiB of memory and 20 GB of disk.

Every candidate loads into the memory of a state that is there and paged in, each from a checkpoint of its own kind,
which is saved once. Its first load is not timed: after it every value is compared with what it must be.

Columns:
  warm      all files are in the page cache.
  cold      none is. What lies below the machine, such as the cache of a virtual disk's host, is out of reach.
  x limit   against preadv straight into the tensors from files that lie as the loading ranks want them, with an xxh3
            of every block, by 2 or 8 threads, the better of both.
  read by calls          bytes that all ranks together got by read, pread and the like, as the kernel counts them, by
                         those of the state (of a slice: of the slice). Messages between ranks do not count. What is
                         mapped into memory does not either: torch.load with mmap and safetensors read that way.
  from disk when cold    bytes that came from the disk, mapped or not. A file that several ranks read comes once.
  slow      from a store whose every request takes its time, simulated by loads/slow_files.py, through fsspec for all.
            Bytes read are those of the requests.
"""

from __future__ import annotations

import argparse
import sys

from loads.registry import CANDIDATES
from loads.report import report
from loads.rounds import LoadRounds
from shared import comparison, page_cache
from shared.results import Row
from shared.rounds import Settings
from shared.workloads import WORKLOADS, Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    comparison.add_arguments(parser, WORKLOADS, CANDIDATES, rounds=3)
    parser.add_argument(
        "--drop-all", action="store_true", help="for cold loads drop the whole machine's caches, which takes root"
    )


def run(arguments: argparse.Namespace) -> None:
    if arguments.drop_all and not page_cache.can_drop_all():
        sys.exit(f"--drop-all: {page_cache.DROP_ALL} cannot be written")
    cold = "fsync and posix_fadvise(DONTNEED) of every file" + (", then drop_caches" if arguments.drop_all else "")
    comparison.run(arguments, WORKLOADS, measure, report, cold=cold)


def measure(workload: Workload, names: list[str], settings: Settings) -> tuple[dict[str, Row], int]:
    rounds = LoadRounds(workload, names, settings)
    rounds.run()
    return rounds.rows, rounds.state_bytes
