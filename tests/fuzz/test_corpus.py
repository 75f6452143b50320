"""The kept inputs: whole ones of every format, and what fuzzers have found. Each is read again, and every failure that was
ever found stays one of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.campaign import SHARES
from fuzz.targets import CORPUS, TARGETS, inputs, repeat_command
from fuzz.watch import Watch

MOST_BYTES = 192 << 10
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


def test_a_failure_is_seen(tmp_path: Path) -> None:
    """The watch itself: what it has to tell apart."""

    def fails(data: bytes) -> None:
        raise KeyError(data)

    def eats(data: bytes) -> None:
        bytearray(400 << 20)[:: 1 << 10] = bytes(400 << 10)

    def asks_for_too_much(data: bytes) -> None:
        bytearray(1 << 40)

    with Watch() as watch:
        assert watch.attempt(lambda _: None, b"") is None
        assert "KeyError" in (watch.attempt(fails, b"x") or "")
        assert "MemoryError" in (watch.attempt(asks_for_too_much, b"") or "")
        assert "bytes of memory" in (watch.attempt(eats, b"") or "")
