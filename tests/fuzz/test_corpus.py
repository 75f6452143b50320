"""The kept inputs: whole ones of every format, and what fuzzers have found. Each is read again, and every failure that
was ever found stays one of them.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from bytecheckpoint.errors import CheckpointError
from fuzz import watch as watching
from fuzz.campaign import SHARES
from fuzz.targets import CORPUS, TARGETS, inputs, repeat_command
from fuzz.watch import Watch, _peak_bytes

MOST_BYTES = 240 << 10
"""All of them together."""


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_kept_input_is_read_or_refused(name: str) -> None:
    target = TARGETS[name]
    with Watch() as watch:
        wrong = {path: watch.attempt(target.read, path.read_bytes()) for path in target.corpus()}
    assert [f"{what}\n{repeat_command(name, path)}" for path, what in wrong.items() if what] == []


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_first_inputs_are_read(name: str) -> None:
    """A reader that refused everything would never crash."""
    seeds = sorted((CORPUS / name).glob("seed-*"))
    assert seeds
    for path in seeds:
        TARGETS[name].read(path.read_bytes())


def test_the_corpus_is_small_and_all_of_it_is_used() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    assert {path.parent.name for path in files} == TARGETS.keys()
    assert sum(len(inputs(name)) for name in TARGETS) == len(files)
    assert {name for shares in SHARES.values() for name in shares} == TARGETS.keys()


def test_a_failure_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch itself: what it has to tell apart."""
    monkeypatch.setattr(watching, "MOST_BYTES", 8 << 20)
    monkeypatch.setattr(watching, "LONGEST_S", 0.05)
    monkeypatch.setattr(watching, "_GIVE_UP_S", 0.3)

    def fails(data: bytes) -> None:
        raise KeyError(data)

    def asks_for_too_much(_: bytes) -> None:
        bytearray(1 << 40)

    def takes_long(_: bytes) -> None:
        started = time.process_time()
        while time.process_time() < started + 0.06:
            pass

    def never_ends(_: bytes) -> None:
        while True:
            pass

    def is_of_no_kind(_: bytes) -> None:
        raise CheckpointError("broken", kind="exists")

    def eats(_: bytes) -> None:
        """More than the process has ever had at once."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        num_pages = ((256 << 20) + _peak_bytes() - resident) >> 12
        taken = bytearray(num_pages << 12)
        taken[:: 1 << 12] = bytes(num_pages)

    with Watch() as watch:
        assert watch.attempt(lambda _: None, b"") is None
        assert "KeyError" in (watch.attempt(fails, b"x") or "")
        assert "MemoryError" in (watch.attempt(asks_for_too_much, b"") or "")
        assert "of processor time" in (watch.attempt(takes_long, b"") or "")
        assert "given up" in (watch.attempt(never_ends, b"") or "")
        assert "'exists', which is not documented" in (watch.attempt(is_of_no_kind, b"") or "")
        assert watch.most_bytes < 8 << 20
    monkeypatch.setattr(watching, "_GIVE_UP_S", 30.0)  # a process that once had gigabytes needs as many again
    monkeypatch.setattr(watching, "LONGEST_S", 30.0)
    with Watch() as watch:
        assert "bytes of memory" in (watch.attempt(eats, b"") or "")
