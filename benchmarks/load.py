"""How long a load takes and how many bytes it reads: bytecheckpoint beside torch DCP, torchsnapshot, the open-source
ByteCheckpoint, torch.load, safetensors and what the machine can do, on the layout that saved and on others, interleaved
in one run so that a change of the machine's speed hits all alike.

    python benchmarks/load.py --json r.json --markdown r.md           # everything, at full size: W1 has 2.1 GB
    python benchmarks/load.py --workloads W1 4to8 --size 0.1          # on a laptop
    python benchmarks/load.py --json r.json --resume                  # what r.json does not have yet
    python benchmarks/load.py --read r.json                           # the same figures again, nothing measured

torchsnapshot and the open-source ByteCheckpoint run in an environment of their own (see requirements-peers.txt), whose
Python --peers names. Needs Linux and, at full size, 16 GiB of memory and 20 GB of disk.

Every contestant loads into the memory of a state that is there and paged in, each from a checkpoint of its own kind,
which is saved once. Its first load is not timed: after it every value is compared with what it must be.

What the columns say:
  warm      all files are in the page cache.
  cold      none is. What lies below the machine, such as the cache of a virtual disk's host, is out of reach.
  x limit   against preadv straight into the tensors from files that lie as the loading ranks want them, with an xxh3
            of every block, by 2 or 8 threads, the better of both.
  read by calls          bytes that all ranks together got by read, pread and the like, as the kernel counts them, by
                         those of the state (of a slice: of the slice). Messages between ranks do not count. What is
                         mapped into memory does not either: torch.load with mmap and safetensors read that way.
  from disk when cold    bytes that came from the disk, mapped or not. A file that several ranks read comes once.
  slow      from a store whose every request takes its time, simulated by slow_files.py, through fsspec for all. Bytes
            read are those of the requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import page_cache
from load_catalogue import CONTESTANTS, WORKLOADS
from load_report import report
from load_rounds import LoadRounds, Settings
from machine import machine_facts
from results import Results, read_results


def main() -> None:
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that files and processes go in that case too
    results = read_results(arguments.read) if arguments.read else measured(arguments)
    text = report(results)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--size", type=float, default=1.0, help="1.0 is the full size of every state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder if not given")
    parser.add_argument("--peers", metavar="PYTHON", help="the Python that has torchsnapshot and ByteCheckpoint")
    parser.add_argument(
        "--drop-all", action="store_true", help="for cold loads drop the whole machine's caches, which takes root"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a load has failed")
    parser.add_argument("--json", type=Path, help="write all figures there, after every workload")
    parser.add_argument("--resume", action="store_true", help="keep what the file of --json has, measure the rest")
    parser.add_argument("--markdown", type=Path, help="write the tables there as well")
    parser.add_argument("--read", type=Path, help="take the figures from a file that --json has written")
    arguments = parser.parse_args()
    if arguments.drop_all and not page_cache.can_drop_all():
        parser.error(f"--drop-all: {page_cache.DROP_ALL} cannot be written")
    if arguments.resume and arguments.json is None:
        parser.error("--resume goes with --json")
    return arguments


def measured(arguments: argparse.Namespace) -> Results:
    results = begun(arguments)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    settings = Settings(
        size=arguments.size,
        rounds=arguments.rounds,
        folder=folder,
        own_python=sys.executable,
        peers_python=arguments.peers,
        drops_all=arguments.drop_all,
        timeout_s=arguments.timeout,
    )
    try:
        for name in arguments.workloads:
            if name in results.rows:
                continue
            print(f"{name}: {WORKLOADS[name].title}", file=sys.stderr, flush=True)
            started = time.monotonic()
            rounds = LoadRounds(WORKLOADS[name], arguments.contestants, settings)
            rounds.run()
            print(f"  {time.monotonic() - started:.0f} s in all", file=sys.stderr, flush=True)
            results.rows[name], results.state_bytes[name] = rounds.rows, rounds.state_bytes
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(dataclasses.asdict(results), indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


def begun(arguments: argparse.Namespace) -> Results:
    """Without figures yet, or with those of an earlier run with the same settings."""
    cold = "fsync and posix_fadvise(DONTNEED) of every file" + (", then drop_caches" if arguments.drop_all else "")
    settings = {"size": arguments.size, "rounds": arguments.rounds, "cold": cold}
    if arguments.resume and arguments.json.exists():
        earlier = read_results(arguments.json)
        if earlier.settings != settings:
            sys.exit(f"{arguments.json} was measured with {earlier.settings}, not with {settings}: name another file")
        return earlier
    return Results(machine_facts(arguments.folder or Path(tempfile.gettempdir())), settings)


if __name__ == "__main__":
    main()
