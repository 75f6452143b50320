"""Runs one benchmark, named as its module in this folder.

    python benchmarks/run.py save --workloads W1 W3 --size 0.1 --rounds 3
    python benchmarks/run.py load --help

With --against PATH, `save`, `load`, `exchange` and `plan_cache` measure a second checkout of the library in the same
run, with the same scripts, interleaved with this one: before and after of a change meet the same machine.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys

BENCHMARKS = {
    "save": "saves, beside other libraries and the machine's limits",
    "load": "loads, from the page cache, the disk and a slow store",
    "exchange": "loads whose ranks pass on what they read: bytes over sockets, connections, time",
    "cold": "cold loads of one file, beside preadv of it",
    "object_store": "saves and loads of an object store, beside DCP and bare client libraries",
    "ranks": "saves and loads by the number of ranks",
    "plan_cache": "planning a save, the first time and later",
    "planning": "planning for thousands of simulated ranks, beside DCP's planner",
    "manifest": "building, encoding and decoding large manifests",
    "codec": "compression on one core",
    "convert": "conversion to other formats, beside torch's tools; loads through links",
    "gpu": "saves and loads of a job on a GPU, beside DCP and bare pinned copies",
    "manager": "the checkpoint manager: steps that are not due, many steps, deletions beside saves",
    "memory": "saves to memory and resumes, beside torch.save and DCP to tmpfs",
    "memory_hosts": "bytes that ranks send so that memory checkpoints survive a host",
    "memory_recovery": "resumes from memory after the loss of a host, beside a bare socket",
    "reuse": "bytes and seconds of saves that take files of the newest checkpoint",
    "data_state": "the state of data loaders: many streams, and token buffers beside weights",
    "data_prefetch": "the stall of a save with data loaders whose state takes seconds to gather",
    "foreign": "opening checkpoints of other programs",
    "in_trainers": "saves of a framework's own job, by itself and through the integration for it",
    "startup": "processor time of commands, imports and the first save, beside DCP and safetensors",
    "dcp_drop_in": "saves of a training job through DCP and through the drop-in for it",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        lines = [f"  {each:<16}{measures}" for each, measures in BENCHMARKS.items()]
        print("\n".join([__doc__.strip(), "", "benchmarks:", *lines]))
        sys.exit(name not in {"-h", "--help"})
    module = importlib.import_module(name)
    parser = argparse.ArgumentParser(
        prog=f"run.py {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that files and processes go in that case too
    module.run(parser.parse_args(sys.argv[2:]))


if __name__ == "__main__":
    main()
