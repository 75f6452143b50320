"""The same targets under atheris, Google's coverage-guided fuzzer: an input that reaches lines which no other has
reached is kept, and changed further. What it finds is added to the corpus by minimise.py, so that the other campaigns
begin there.

    python tests/fuzz/guided.py manifest --runs 100000 --kept FOLDER

needs `pip install -e '.[fuzz]'`. Inputs that fail go into the corpus at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import atheris

with atheris.instrument_imports(include=["bytecheckpoint"]):
    from fuzz.targets import CORPUS, TARGETS, repeat_command

from fuzz.mutations import MAX_BYTES
from fuzz.watch import Watch


class Guided:
    """A target that counts, and ends the process after its last input: the fuzzer's own loop never returns."""

    def __init__(self, name: str, runs: int, result: Path | None) -> None:
        self._target = TARGETS[name]
        self._left = self._runs = runs
        self._result = result
        self._watch = Watch()
        self._watch.__enter__()
        self._broken: list[str] = []

    def test(self, data: bytes) -> None:
        if not self._left:
            self._end()
        self._left -= 1
        wrong = self._watch.attempt(self._target.read, data)
        if wrong:
            path = CORPUS / self._target.name / f"guided-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            self._broken.append(
                f"{self._target.name}: {wrong.splitlines()[-1]}; {repeat_command(path.parent.name, path)}"
            )
            sys.stdout.write(f"{wrong}\n{self._broken[-1]}\n")

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.2:
            return bytes(atheris.Mutate(data, max_size))
        for _ in range(rng.choice((1, 1, 2))):
            data = self._target.mutate(data, rng)
        return data[:max_size]

    def _end(self) -> None:
        told = {
            "num_trials": self._runs,
            "num_refused": self._watch.num_refused,
            "broken": self._broken,
            "longest_s": self._watch.longest_s,
            "most_bytes": self._watch.most_bytes,
        }
        if self._result is None:
            sys.stdout.write(f"{json.dumps(told, indent=1)}\n")
            sys.stdout.flush()
        else:
            self._result.write_text(json.dumps(told))
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kept", type=Path, required=True, help="for inputs that reach something new")
    parser.add_argument("--result", type=Path, help="for what came of it, as JSON")
    arguments = parser.parse_args()
    guided = Guided(arguments.target, arguments.runs, arguments.result)
    arguments.kept.mkdir(parents=True, exist_ok=True)
    options = [f"-seed={arguments.seed}", f"-max_len={MAX_BYTES}", "-rss_limit_mb=0", "-timeout=600", "-verbosity=0"]
    folders = [str(arguments.kept), str(CORPUS / arguments.target)]
    atheris.Setup([sys.argv[0], *options, *folders], guided.test, custom_mutator=guided.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
