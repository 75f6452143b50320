"""Chooses, of what a guided fuzzer has kept, the few small inputs that reach lines which no other in the corpus
reaches, and adds them to it.

    python tests/fuzz/minimise.py manifest FOLDER
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from bytecheckpoint.errors import CheckpointError
from fuzz.targets import CORPUS, TARGETS

MAX_BYTES = 3000
"""Of one input: a larger one tells a reader less, and changes of it hit less often what matters."""
_PACKAGE = "/bytecheckpoint/"


def lines_of(read: Callable[[bytes], None], data: bytes) -> frozenset[tuple[str, int]]:
    """The lines of the library that reading an input goes through."""
    found: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if _PACKAGE not in frame.f_code.co_filename:
            return None
        found.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        with suppress(CheckpointError):
            read(data)
    finally:
        sys.settrace(None)
    return frozenset(found)


def main(name: str, folder: Path) -> None:
    target = TARGETS[name]
    reached: set[tuple[str, int]] = set()
    for path in target.corpus():
        reached |= lines_of(target.read, path.read_bytes())
    candidates = sorted((path.read_bytes() for path in folder.iterdir()), key=lambda data: (len(data), data))
    for data in candidates:
        lines = lines_of(target.read, data) if len(data) <= MAX_BYTES else frozenset()
        if not lines <= reached:
            reached |= lines
            (CORPUS / name / f"line-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
            sys.stdout.write(f"{name}: {len(data)} bytes reach {len(reached)} lines\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
