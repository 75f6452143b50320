"""The fuzzing of the table of faults: inputs drawn from the kept ones, each by its seed and number, read in a process
that this one watches, because an input may end a process or keep it forever.

    python tests/faults/fault_table.py fuzz-manifests               all of it
    python tests/fuzz/campaign.py fuzz-manifests 1 17 18            input 17 of seed 1, in this process
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from faults.campaigns import Asked, Broken, Campaign, Outcome

SHARES: Mapping[str, Mapping[str, int]] = {
    "fuzz-manifests": {"manifest": 11, "manifest-file": 2, "header": 5, "plain-data": 4, "frame": 2},
    "fuzz-foreign": {
        "pickle": 8,
        "distcp-metadata": 4,
        "torch-file": 4,
        "safetensors": 4,
        "trainer": 3,
        "distcp": 3,
        "deepspeed": 3,
        "megatron": 3,
        "rank-files": 2,
        "folder-groups": 2,
        "sharded-values": 4,
    },
    "fuzz-commands": {"command": 1},
}
"""How often each target is drawn."""
MAX_BROKEN = 20
"""After so many the rest is not tried."""
_NO_PROGRESS_S = 120.0
_PROGRESS = struct.Struct("<Q")


class _Told(NamedTuple):
    """What a process that reads inputs says at its end."""

    num_trials: int
    num_refused: int
    broken: Sequence[Sequence[Any]]
    """Number, target and what is wrong."""
    longest_s: float
    most_bytes: int


def draw_input(name: str, seed: int, trial: int) -> tuple[Any, bytes]:
    """The target and the input of a trial."""
    from fuzz.targets import TARGETS, draw

    rng = Random(f"{seed}/{trial}")
    shares = SHARES[name]
    target = TARGETS[rng.choices(list(shares), list(shares.values()))[0]]
    return target, draw(target, rng)


def read_inputs(name: str, seed: int, trials: range, on_trial: Callable[[int], None], until_s: float) -> _Told:
    """Reads them in this process, as far as there is time."""
    from bytecheckpoint.errors import CheckpointError
    from fuzz.targets import TARGETS, inputs
    from fuzz.watch import Watch

    for target in SHARES[name]:  # what the first input imports is not on its account
        with suppress(CheckpointError):
            TARGETS[target].read(inputs(target)[0])
    broken: list[tuple[int, str, str]] = []
    num_trials = 0
    with Watch() as watch:
        for trial in trials:
            on_trial(trial)
            target, data = draw_input(name, seed, trial)
            wrong = watch.attempt(target.read, data)
            num_trials += 1
            if wrong:
                broken.append((trial, target.name, wrong))
            if len(broken) >= MAX_BROKEN or time.monotonic() > until_s:
                break
        return _Told(num_trials, watch.num_refused, broken, watch.longest_s, watch.most_bytes)


def run(name: str, asked: Asked) -> Outcome:
    """In one process after the other: a new one for what is left after an input that ended the last."""
    told: list[_Told] = []
    lost: list[tuple[int, str, str]] = []
    rest, num_trials = asked.trials, 0
    while rest:
        found, reached, why = _in_a_process(name, asked._replace(trials=rest))
        if found is not None:
            told.append(found)
            num_trials += found.num_trials
            break
        lost.append((reached, draw_input(name, asked.seed, reached)[0].name, why))
        num_trials += reached + 1 - rest.start
        rest = range(reached + 1, rest.stop) if len(lost) < MAX_BROKEN else range(0)
    broken = [*lost, *(item for each in told for item in each.broken)]
    if asked.tally is not None:
        asked.tally.num_tried = num_trials
        asked.tally.is_cut_short = num_trials < len(asked.trials)
    return Outcome(num_trials, tuple(_kept(name, asked, *item) for item in broken), _result(told))


def _result(told: Sequence[_Told]) -> str:
    if not told:
        return "no process came to its end"
    last = told[-1]
    return (
        f"{last.num_refused:,} refused by a typed error, {last.num_trials - last.num_refused:,} read; the slowest took "
        f"{last.longest_s * 1000:.0f} ms of processor time, memory grew by at most {last.most_bytes >> 20} MiB"
    )


def _kept(name: str, asked: Asked, trial: int, target: str, wrong: str) -> Broken:
    """The input goes into the corpus, where it is a test from then on."""
    from fuzz.targets import CORPUS, repeat_command

    path = CORPUS / target / f"{name}-{asked.seed}-{trial}"
    path.write_bytes(draw_input(name, asked.seed, trial)[1])
    return Broken(trial, f"{target}: {wrong.splitlines()[-1]}; {repeat_command(target, path)}")


def _in_a_process(name: str, asked: Asked) -> tuple[_Told | None, int, str]:
    """What it told, or None, the number of the input that it had come to, and how it ended."""
    trials, progress, result = asked.trials, asked.folder / "progress", asked.folder / "result"
    progress.write_bytes(_PROGRESS.pack(trials.start))
    arguments = map(str, (name, asked.seed, trials.start, trials.stop, asked.until_s, progress, result))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, __file__, *arguments], env=environment) as process:
        reached, since = trials.start, time.monotonic()
        while process.poll() is None:
            time.sleep(0.05)
            now = _PROGRESS.unpack(progress.read_bytes())[0]
            reached, since = (now, time.monotonic()) if now != reached else (reached, since)
            if time.monotonic() - since > _NO_PROGRESS_S:
                process.kill()
                process.wait()
                return None, reached, f"not done after {_NO_PROGRESS_S:g} s"
    reached = _PROGRESS.unpack(progress.read_bytes())[0]
    if process.returncode != 0:
        return None, reached, f"the process ended with exit code {process.returncode}"
    return _Told(**json.loads(result.read_text())), reached, ""


def main(arguments: Sequence[str]) -> int:
    name, seed, first, stop = arguments[0], *map(int, arguments[1:4])
    trials = range(first, stop)
    if len(arguments) == 4:
        told = read_inputs(name, seed, trials, lambda _: None, math.inf)
        sys.stdout.write(f"{json.dumps(told._asdict(), indent=2)}\n")
        return bool(told.broken)
    until_s, progress_file, result_file = float(arguments[4]), *map(Path, arguments[5:])
    with progress_file.open("r+b") as file, mmap.mmap(file.fileno(), _PROGRESS.size) as progress:
        told = read_inputs(name, seed, trials, lambda trial: _PROGRESS.pack_into(progress, 0, trial), until_s)
    result_file.write_text(json.dumps(told._asdict()))
    return 0


CAMPAIGNS = (
    Campaign(
        name="fuzz-manifests",
        fault="a manifest, data-file header, plain value or compressed frame that nobody wrote like that",
        how="kept inputs changed by what they mean, checksums right again; processor time and memory of each measured",
        unit="inputs",
        run=partial(run, "fuzz-manifests"),
        trials=range(1_000_000),
        quick=range(2_000),
    ),
    Campaign(
        name="fuzz-foreign",
        fault="a pickle, archive, safetensors file or folder of torch, DeepSpeed, Megatron or the open-source "
        "ByteCheckpoint that nobody wrote like that",
        how="as above",
        unit="inputs",
        run=partial(run, "fuzz-foreign"),
        trials=range(400_000),
        quick=range(500),
    ),
    Campaign(
        name="fuzz-commands",
        fault="a command line, over a checkpoint that nobody wrote like that",
        how="as above, through the program's own entry point, on files",
        unit="inputs",
        run=partial(run, "fuzz-commands"),
        trials=range(60_000),
        quick=range(0),  # fuzz/test_readers.py
    ),
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
