"""How long a save takes, how long it holds training, what training loses to it and what memory it needs: bytecheckpoint
beside torch DCP, torchsnapshot, the open-source ByteCheckpoint, torch.save, safetensors and what the machine can do,
interleaved in one run so that a change of the machine's speed hits all alike.

    python benchmarks/save.py                                        # everything, at full size: W1 has 2 GB
    python benchmarks/save.py --size 0.1 --workloads W1 --rounds 3   # on a laptop
    python benchmarks/save.py --json r.json --markdown r.md --plot r.png
    python benchmarks/save.py --read r.json --plot r.png             # the same figures again, nothing measured

torchsnapshot and the open-source ByteCheckpoint run in an environment of their own (see requirements-peers.txt), whose
Python --peers names. Needs Linux and, at full size, 20 GiB of memory.

What the columns say:
  durable   from the call until the checkpoint is on disk. Contestants that do not sync are synced, inside the clock.
  stall     for which the call holds the training thread.
  lost      of training time by an asynchronous save: the stall, and what the steps until the checkpoint is durable
            took longer than as many undisturbed ones, measured just before and after.
  limit: ... in the second table: timed as an asynchronous save is, once a round, while ranks that have returned train.
  memory    what two saves need beyond the state and what training needs, all processes, without the page cache.
bytecheckpoint gets modules and optimizers and takes them apart within the clock; the others get the same tensors
ready by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from machine import machine_facts
from results import Results, read_results
from save_catalogue import CONTESTANTS, WORKLOADS
from save_plot import plot
from save_report import report
from save_rounds import Rounds, Settings


def main() -> None:
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that files and processes go in that case too
    results = read_results(arguments.read) if arguments.read else measured(arguments)
    text = report(results)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(dataclasses.asdict(results), indent=1))
    if arguments.plot is not None:
        plot(results, arguments.plot)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--size", type=float, default=1.0, help="1.0 is the full size of every workload")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument("--memory", nargs="*", default=["W1", "W2"], help="workloads whose memory is measured as well")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not given")
    parser.add_argument("--peers", metavar="PYTHON", help="the Python that has torchsnapshot and ByteCheckpoint")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a save has failed")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--markdown", type=Path, help="write the tables there as well")
    parser.add_argument("--plot", type=Path, help="draw stall and durable there, as PNG; needs matplotlib")
    parser.add_argument("--read", type=Path, help="take the figures from a file that --json has written")
    return parser.parse_args()


def measured(arguments: argparse.Namespace) -> Results:
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    results = Results(machine_facts(folder), {"size": arguments.size, "rounds": arguments.rounds})
    settings = Settings(
        size=arguments.size,
        rounds=arguments.rounds,
        folder=folder,
        own_python=sys.executable,
        peers_python=arguments.peers,
        timeout_s=arguments.timeout,
    )
    try:
        for name in arguments.workloads:
            print(f"{name}: {WORKLOADS[name].title}", file=sys.stderr, flush=True)
            rounds = Rounds(WORKLOADS[name], arguments.contestants, settings)
            rounds.time()
            if name in arguments.memory:
                rounds.measure_memory()
            results.rows[name], results.state_bytes[name] = rounds.rows, rounds.state_bytes
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


if __name__ == "__main__":
    main()
