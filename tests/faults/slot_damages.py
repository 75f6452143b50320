"""Damage to what one host holds in memory, many times a second: slots, copies and manifests with flipped bits, cut off,
exchanged, with the bytes of others, or as they were some saves ago. One process resumes then. It gets the newest
version of which every byte is left, or an error; and never anything else.

Two jobs are tried in turn: of one rank, and of two on two hosts that hold copies of one another.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from faults.campaigns import Asked, Broken, Campaign, Outcome
from faults.lost_hosts import STEPS, Truth, World, end_process, files_in, options

WORLDS = (World((0,), {"copies": 1}, stored=2), World((0, 1), {"copies": 2}))
BATCH = 500
"""Trials that a process does before it is asked for the next."""
PAGE = 4096


class Old(NamedTuple):
    """Memory as it is, and as it was after each of the steps before."""

    now: dict[Path, bytes]
    earlier: list[dict[Path, bytes]]


def state_of(step: int) -> dict[str, Any]:
    """Tensors of one value each that tell steps and names apart. Ranks share them out."""
    sizes = {"w": 5000, "b": 17, "v": 1300, "c": 600}
    tensors = {name: torch.full((size,), 1000.0 * step + size) for name, size in sizes.items()}
    return {**tensors, "step": step}


def save_step(rank: int, world_size: int, folder: Path, world: World, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = options(folder, world.hosts[rank], world)
        to = "storage" if step == world.stored else "memory"
        bcp.save(folder / "ckpt", state_of(step), step=step, options=given, to=to)
    if step == STEPS[-1]:
        end_process()


def begin(workers: WorkerPool, folder: Path, world: World) -> Old:
    """Saves all steps, and keeps what memory was after each."""
    after = []
    for step in STEPS:
        workers.run(save_step, folder, world, step, world_size=len(world.hosts))
        after.append({path: path.read_bytes() for path in files_in(folder, (0,))})
    return Old(after[-1], after[:-1])


def flip(draw: random.Random, path: Path, old: Old) -> bytes:
    """Flips a bit, half of the time within what is in use at the beginning."""
    content = bytearray(path.read_bytes() or b"0")
    bit = draw.randrange(8 * (len(content) if draw.random() < 0.5 else min(len(content), 5000)))
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


def cut(draw: random.Random, path: Path, old: Old) -> bytes:
    content = path.read_bytes()
    return content[: draw.randrange(max(len(content), 1))]


def other_of(draw: random.Random, path: Path, old: Old) -> Path:
    """Returns a file of the same kind."""
    return draw.choice([each for each in old.now if each.parent == path.parent])


def exchange(draw: random.Random, path: Path, old: Old) -> bytes:
    """Exchanges it with another file of the same kind. What a save wrote is never there twice."""
    other = other_of(draw, path, old)
    mine, theirs = path.read_bytes(), other.read_bytes()
    rewrite(other, mine)
    return theirs


def make_stale(draw: random.Random, path: Path, old: Old) -> bytes:
    """Puts the bytes of another file behind the header of this one, from a page on."""
    content, other = path.read_bytes(), other_of(draw, path, old).read_bytes()
    start = PAGE * draw.randint(1, max(len(content) // PAGE, 1))
    return (content[:start] + other[start:] + content[len(other) :])[: len(content)]


def take_back(draw: random.Random, path: Path, old: Old) -> bytes:
    """Makes the file what it was after an earlier step, or nothing of it."""
    return draw.choice(old.earlier).get(path, b"")


def lose_page(draw: random.Random, path: Path, old: Old) -> bytes:
    content = bytearray(path.read_bytes())
    start = PAGE * draw.randrange(max(len(content) // PAGE, 1))
    content[start : start + PAGE] = bytes(len(content[start : start + PAGE]))
    return bytes(content)


RESULTS = {
    "the newest": "resumed at the newest step",
    "an older one": "at an older one because no more was left",
    "nothing left": "found nothing left and said so",
    "wrong": "wrong",
}
DAMAGES = (flip, cut, exchange, make_stale, take_back, lose_page)


class Shot(NamedTuple):
    """One trial."""

    trial: int
    num_damages: int
    seen: str
    is_wrong: str | None


def shoot_many(
    rank: int, world_size: int, folder: Path, world: World, old: Old, seed: int, trials: Sequence[int]
) -> list[Shot]:
    logger = logging.getLogger("bytecheckpoint")
    level, logger.level = logger.level, logging.CRITICAL
    try:
        truth = Truth(folder, world._replace(hosts=(0,)))
        return [shoot(folder, world, old, truth, random.Random(f"{seed}/{trial}"), trial) for trial in trials]
    finally:
        logger.level = level


def shoot(folder: Path, world: World, old: Old, truth: Truth, draw: random.Random, trial: int) -> Shot:
    damaged = draw.sample([*old.now], draw.choice((1, 1, 1, 2, 3)))
    damages = [draw.choice(DAMAGES) for _ in damaged]
    try:
        for path, damage in zip(damaged, damages, strict=True):
            rewrite(path, damage(draw, path, old))
        found = judged(folder, world, truth.best((0,)))
    finally:
        for path in old.now:
            rewrite(path, old.now[path])
    seen, wrong = found
    what = [(damage.__name__, path.parent.name) for damage, path in zip(damages, damaged, strict=True)]
    return Shot(trial, len(damaged), seen, f"{wrong} ({what})" if wrong else None)


def rewrite(path: Path, content: bytes) -> None:
    """Keeps the file, as damage in memory does."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(file, content)
    os.close(file)


def judged(folder: Path, world: World, best: int) -> tuple[str, str | None]:
    """Resumes; returns what was seen, and what is wrong with it."""
    state = state_of(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a root that is no memory
            report = bcp.resume(folder / "ckpt", state, options=options(folder, 0, WORLDS[0]))
    except bcp.CheckpointError as error:
        is_told = error.kind in {"missing_file", "checksum", "truncated", "bad_manifest"} and not best
        return "nothing left", None if is_told else f"step {best} is left, and resume says {error.kind}: {error}"
    except Exception as error:  # noqa: BLE001 - one that is no CheckpointError is what is looked for
        return "wrong", f"no CheckpointError: {error!r}"
    finally:
        end_process()
    if report is None:
        return "nothing left", f"step {best} is left, and nothing was found" if best else None
    expected = state_of(report.step)
    odd = [name for name in expected if name != "step" and not torch.equal(state[name], expected[name])]
    if odd or state["step"] != report.step:
        return "wrong", f"step {report.step} has wrong values: {odd}"
    if report.step < best:
        return "wrong", f"step {best} is left, and step {report.step} was resumed"
    return "the newest" if report.step == STEPS[-1] else "an older one", None


def run(asked: Asked) -> Outcome:
    seen: Counter[str] = Counter()
    num_damages, broken = 0, []
    with closing(WorkerPool()) as workers:
        folders = [asked.folder / f"{which}" for which in range(len(WORLDS))]
        olds = [begin(workers, folder, world) for folder, world in zip(folders, WORLDS, strict=True)]
        due = asked.due()
        while batch := list(islice(due, BATCH)):
            which = batch[0] // BATCH % len(WORLDS)
            given = folders[which], WORLDS[which], olds[which], asked.seed, batch
            (shots,) = workers.run(shoot_many, *given, world_size=1, timeout_s=300, process_group=False)
            for shot in shots:
                seen[shot.seen] += 1
                num_damages += shot.num_damages
                if shot.is_wrong is not None:
                    broken.append(Broken(shot.trial, shot.is_wrong))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    told = ", ".join(f"{number:,} {RESULTS[what]}" for what, number in sorted(seen.items()))
    return Outcome(num_damages, tuple(broken), told)


CAMPAIGNS = (
    Campaign(
        name="damaged-slots",
        fault="slots, copies and manifests in the memory of one host: bits flipped, cut off, exchanged, with the bytes "
        "of others, as they were some saves ago, a page lost",
        how="up to three of them at once, anywhere; one process resumes what one rank saved, or two on two hosts",
        unit="damages",
        run=run,
        trials=range(63_000),
        quick=range(40),
    ),
)
