"""Goals of the memory tier that one process can show: each is measured and printed beside its target."""

from __future__ import annotations

import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

import bytecheckpoint as bcp
from bytecheckpoint.memory_tier.parity import xor_into
from bytecheckpoint.storage.memory_root import slot_file
from bytecheckpoint.storage.memory_root.job_folder import find_jobs

from .peers import State, nvrx_manager

_MEMBERS = 4
_FLIPS = 20
_STEPS = 8
_EXTENT_BYTES = 256 << 10
_STEP_IN_COPIES = 20
"""Length of a training step, in times that a copy of the state takes."""


class Goal(NamedTuple):
    """One row."""

    name: str
    found: str
    target: str


def goals(folder: Path, state: State, *, has_peers: bool) -> Iterator[Goal]:
    yield parity_goal(sum(tensor.nbytes for tensor in state.values()))
    yield from stall_goals(folder / "every", state)
    yield Goal("bits flipped in the newest checkpoint that are noticed", noticed(folder / "flips", state), "all")
    if has_peers:
        found = noticed_by_nvrx(folder / "nvrx-flips", state)
        yield Goal("the same, nvidia-resiliency-ext", found, "(its format has no checksum)")


def parity_goal(num_bytes: int) -> Goal:
    """Returns the processor time of XOR for so many bytes of each of four hosts."""
    parts = [memoryview(bytearray(num_bytes // _MEMBERS)) for _ in range(_MEMBERS)]
    parity = bytearray(len(parts[0]))
    seconds = []
    for _ in range(3):
        started = time.process_time()
        for part in parts:
            xor_into(parity, 0, part)
        seconds.append((time.process_time() - started) / (len(parts[0]) * _MEMBERS / 1e9))
    return Goal("parity: core-seconds for a GB, beside the wire", f"{min(seconds):.3f}", "0.15")


def stall_goals(folder: Path, state: State) -> Iterator[Goal]:
    """Yields what saves of each step cost the training, for each kind of snapshot."""
    copy_s = _seconds_of_copy(state)
    matrix = torch.randn(256, 256)
    product_s = min(_timed(lambda: matrix @ matrix) for _ in range(20))
    num_products = max(round(_STEP_IN_COPIES * copy_s / product_s), 1)

    def train() -> None:
        for _ in range(num_products):
            matrix @ matrix

    savers: dict[str, tuple[_Saver | _Copier, str]] = {
        "a copy with digests by another thread": (_Copier(state), "limit")
    }
    for snapshot, target in (("lazy", "2 %"), ("copy", "a copy alone is 5 %")):
        options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=folder / snapshot), snapshot=snapshot)
        savers[f'a save, snapshot="{snapshot}"'] = _Saver(folder / f"run-{snapshot}", state, options), target
    for saver, _ in savers.values():
        for _ in range(3):
            saver.step(lambda: None)
    bare_s: list[tuple[float, float]] = []
    taken_s: dict[str, list[tuple[float, float]]] = {name: [] for name in savers}
    for _ in range(_STEPS):  # by turns, so that all meet the same machine
        bare_s.append(_of_both_clocks(train))
        for name, (saver, _) in savers.items():
            taken_s[name].append(_of_both_clocks(partial(saver.step, train)))
    for name, (_, target) in savers.items():
        thread, wall = (
            100 * (taken / bare - 1) for taken, bare in zip(_sums(taken_s[name]), _sums(bare_s), strict=True)
        )
        yield Goal(
            f"{name}, at each step of {_STEP_IN_COPIES} copies' time: training loses",
            f"{thread:.1f} % of its thread's processor time, {wall:.1f} % of its seconds",
            target,
        )


def _sums(of_both_clocks: list[tuple[float, float]]) -> list[float]:
    return [sum(of_one) for of_one in zip(*of_both_clocks, strict=True)]


def copy_with_digests(state: State, into: State) -> None:
    """Does the least that a verified copy can: each tensor copied, and a digest of each extent of the copy."""
    for name, tensor in state.items():
        into[name].copy_(tensor)
    for tensor in into.values():
        content = memoryview(tensor.numpy()).cast("B")
        for start in range(0, len(content), _EXTENT_BYTES):
            xxhash.xxh3_64_intdigest(content[start : start + _EXTENT_BYTES])


def _seconds_of_copy(state: State) -> float:
    into = {name: tensor.clone() for name, tensor in state.items()}
    return min(_timed(lambda: [into[name].copy_(tensor) for name, tensor in state.items()]) for _ in range(3))


class _Saver:
    """Saves each step to memory, and changes nothing before it is staged."""

    def __init__(self, path: Path, state: State, options: bcp.SaveOptions) -> None:
        self._path, self._state, self._options = path, state, options
        self._step = 0
        self.handle: Any = None

    def begin(self) -> None:
        self._step += 1
        given = {"step": self._step, "async_save": True, "options": self._options}
        self.handle = bcp.save(self._path, self._state, **given, to="memory")

    def step(self, train: Callable[[], None]) -> None:
        """Does one step of training, beside which the one before is saved."""
        self.begin()
        train()
        self.handle.staged()
        self.handle.held("process")  # for which the next save would wait


class _Copier:
    """Copies each step to memory on a thread of its own, with digests, and does nothing else: the limit of a save."""

    def __init__(self, state: State) -> None:
        self._state, self._into = state, {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self._thread = ThreadPoolExecutor(1)

    def step(self, train: Callable[[], None]) -> None:
        """Does one step of training, beside which the state is copied."""
        copied = self._thread.submit(copy_with_digests, self._state, self._into)
        train()
        copied.result()


def _of_both_clocks(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the processor time of this thread, and seconds."""
    thread_s, wall_s = time.thread_time(), time.perf_counter()
    work()
    return time.thread_time() - thread_s, time.perf_counter() - wall_s


def _timed(work: Any) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def noticed(folder: Path, state: State) -> str:
    """Flips bits in the slot of the newest step, one at a time; counts resumes that did not take it."""
    options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=folder / "memory"))
    for step in (1, 2):
        bcp.save(folder / "run", state, step=step, options=options, to="memory")
    ((job, _),) = find_jobs(str(folder / "memory"))
    slot = max(slot_file.scan(job.slots), key=lambda each: each.header.step if each.header else 0)
    (place,) = slot.places().values()
    draw, found, level = random.Random(1), 0, logging.getLogger("bytecheckpoint").level
    logging.getLogger("bytecheckpoint").setLevel(logging.CRITICAL)
    for _ in range(_FLIPS):
        at, bit = place.byte_offset + draw.randrange(place.byte_length), 1 << draw.randrange(8)
        _flip(Path(place.path), at, bit)
        report = bcp.resume(
            folder / "run", {name: torch.empty_like(each) for name, each in state.items()}, options=options
        )
        found += report is not None and report.step == 1
        _flip(Path(place.path), at, bit)
    logging.getLogger("bytecheckpoint").setLevel(level)
    return f"{found} of {_FLIPS}"


def noticed_by_nvrx(folder: Path, state: State) -> str:
    """The same with a local checkpoint of nvidia-resiliency-ext: errors, of as many flips."""
    folder.mkdir()
    manager, host_state = nvrx_manager(folder)
    manager.save(host_state(dict(state)), 1)
    (file,) = [path for path in (folder / "nvrx").rglob("*") if path.is_file()]
    draw, errors, wrong = random.Random(1), 0, 0
    for _ in range(_FLIPS):
        at, bit = draw.randrange(file.stat().st_size), 1 << draw.randrange(8)
        _flip(file, at, bit)
        try:
            manager.find_latest()
            loaded, _ = manager.load()
            wrong += any(not torch.equal(loaded.state_dict[name], each) for name, each in state.items())
        except Exception:  # noqa: BLE001 - any error is one that a user sees
            errors += 1
        _flip(file, at, bit)
    shutil.rmtree(folder)
    return f"{errors} of {_FLIPS}; {wrong} loaded wrong values without an error"


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
