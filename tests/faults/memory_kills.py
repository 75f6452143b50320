"""SIGKILL of a run that holds its steps in memory: before each system call of one of its ranks, before lines of what
holds and resumes, at random times. The other ranks die with it, a moment later, or live on; hosts may be lost with
their memory. Then another number of ranks resumes: what was held or something newer, every value of one step, and goes
on; a second job on the host has lost nothing, and nothing is left over.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from bytecheckpoint.memory_tier.flush import remove_job
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import JobFolder, find_jobs
from faults.campaigns import Asked, Broken, Campaign, Outcome, nothing_missing
from faults.launcher import shared_launcher
from faults.memory_run import NEVER, Death, Job, Lived, Said, be, end_of, fork, live, root_of
from faults.system_calls import missing_for_calls
from faults.traced import meeting_place

PROGRAM = """
import sys
from faults.memory_kills import try_many
try_many(*sys.argv[1:])
"""
BATCH = 25
"""Trials for which one process is forked: what it has measured of a scene is kept for the next."""
WITHIN_S = 900.0
NUM_LANES = 2
LOOK_S = 0.02
FIRST_SAVES = 5
LAST_LIFE = 9
MOST_RANKS = 4
UNDISTURBED = Death(0, "none")
COUNTED = ("call", "line")
"""Kinds of death that come before a point with a number."""
A_WHILE_S = 60.0
_NOTHING_LEFT = "CheckpointCorruptError"
"""The end of ranks that find only parts of saves, none of which was to survive the loss of a host."""
_STRIDE = 7919
"""Prime: the numbers of calls come in an order in which any part of the trials is spread over all of them."""


class Scene(NamedTuple):
    """A job, and what may happen to it."""

    name: str
    hosts: tuple[int, ...]
    memory: dict[str, Any]

    @property
    def survives_hosts(self) -> int:
        return self.memory["copies"] - 1 + self.memory.get("parity", 0)


ALONE = (Scene("alone", (0,), {"copies": 1}),)
RANKS = (
    Scene("copies", (0, 1), {"copies": 2}),
    Scene("parity", (0, 1, 2), {"copies": 1, "parity": 1}),
    Scene("two-on-a-host", (0, 0, 1), {"copies": 2}),
    Scene("no-copies", (0, 0, 1, 1), {"copies": 1}),
)


@dataclass(slots=True)
class Calm:
    """A scene before anything is killed: what was acknowledged, and how much there is to be killed at."""

    said: list[list[int]]
    num_points: list[int]
    """Calls or lines of each rank; none where they are not counted."""
    seconds: float


@dataclass(slots=True)
class Tried:
    """What came of one trial."""

    trial: int
    num_kills: int = 0
    """Lives that were ended by a kill."""
    num_ranks: int = 0
    """Processes that were killed."""
    seen: list[str] = field(default_factory=list)
    is_wrong: str | None = None


class Trials:
    """The trials of one scene, in a process that forks for each life."""

    def __init__(self, folder: Path, scene: Scene, kind: str, port: int, lane: int) -> None:
        self.scene, self.kind, self.port, self.lane = scene, kind, port, lane
        self.folder, self.kept = folder / scene.name, folder / f"kept-{scene.name}"
        notes = folder / f"{scene.name}.json"
        if not notes.exists():
            notes.write_text(json.dumps(asdict(self._begin())))
        self.calm = Calm(**json.loads(notes.read_text()))

    def _begin(self) -> Calm:
        self.folder.mkdir()
        first = self._undisturbed(self._job(0)._replace(num_saves=FIRST_SAVES))
        self._undisturbed(self._other(0, 2))
        shutil.copytree(self.folder, self.kept)
        num_points = []
        for rank in range(len(self.scene.hosts)) if self.kind in COUNTED else ():
            self.restore()
            num_points.append(live(self._job(1), self.port, Death(rank, self.kind)).num_points)
        self.restore()
        started = time.monotonic()
        self._undisturbed(self._job(1))
        return Calm([sorted(values) for values in first.said], num_points, time.monotonic() - started)

    def _undisturbed(self, job: Job) -> Lived:
        lived = live(job, self.port, UNDISTURBED)
        if lived.failed or len(lived.said.held) != job.num_saves:
            raise RuntimeError(f"a life that nothing disturbs has failed: {lived}")
        return lived

    def _job(self, life: int, hosts: tuple[int, ...] = ()) -> Job:
        num_saves = 2 if life == LAST_LIFE else 4
        return Job(self.folder, hosts or self.scene.hosts, self.scene.memory, life, num_saves, lane=self.lane)

    def _other(self, life: int, num_saves: int) -> Job:
        """Returns a second job on the first host."""
        return Job(self.folder, (0,), {"copies": 1}, life, num_saves, name="other")

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)

    def try_one(self, trial: int, number: int, rng: random.Random) -> Tried:
        self.restore()
        tried = Tried(trial)
        lives = [Said(*map(set, self.calm.said))]
        num_lives, has_other = rng.choice((1, 1, 2, 3, 4)), rng.random() < 0.2
        if rng.random() < 0.15 and not has_other:
            lives = [Said(*(set[int]() for _ in Said._fields))]
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            tried.seen.append("before which nothing was held")
        hosts = self.scene.hosts
        for life in range(1, num_lives + 1):
            death = self._drawn(rng, hosts, number if life == 1 else None)
            other = self._start_other() if has_other and life == 1 else None
            lived = live(self._job(life, hosts), self.port, death)
            if other is not None:
                end_of(other, 0.0)
            tried.num_kills += lived.is_struck
            tried.num_ranks += lived.num_killed
            tried.is_wrong = wrong_with(lived, must_be(lives, 0, self.scene), lives)
            if tried.is_wrong is not None:
                return tried
            lives.append(lived.said)
            hosts = drawn_hosts(rng, hosts, ()) if rng.random() < 0.3 else hosts
        lost = self._lose_hosts(rng) if num_lives == 1 else ()
        tried.seen += ["lives that began with a kill in the one before"] * (num_lives - 1)
        tried.seen += ["beside a second job that lives"] * has_other
        tried.seen += [f"with {('a host', 'two hosts', 'three hosts')[len(lost) - 1]} lost"] if lost else []
        tried.is_wrong = self._wrong_after(rng, lives, lost, tried, has_other=has_other)
        return tried

    def _drawn(self, rng: random.Random, hosts: Sequence[int], number: int | None) -> Death:
        rank = rng.randrange(len(hosts)) if number is None else number % len(hosts)
        others_after_s = rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.05)])
        lives_on = len(hosts) > 1 and rng.random() < 0.01
        after_s = rng.uniform(0, 1.1 * self.calm.seconds)
        point = 0
        if self.kind in COUNTED:
            most = self.calm.num_points[min(rank, len(self.scene.hosts) - 1)]
            point = rng.randrange(most) if number is None else number // len(hosts) * _STRIDE % most
        return Death(rank, self.kind, point, after_s, None if lives_on else others_after_s)

    def _start_other(self) -> int:
        job = self._other(1, NEVER)
        return fork(lambda: be(job, 0, None, UNDISTURBED), job.said(0))

    def _lose_hosts(self, rng: random.Random) -> tuple[int, ...]:
        hosts = sorted({*self.scene.hosts})
        num_lost = 0 if len(hosts) == 1 else rng.choice([0, 0, 1, 1, 2])
        lost = tuple(rng.sample(hosts, min(num_lost, len(hosts))))
        for host in lost:
            shutil.rmtree(root_of(self.folder, host), ignore_errors=True)  # a first life may not have made it
        return lost

    def _wrong_after(
        self, rng: random.Random, lives: list[Said], lost: tuple[int, ...], tried: Tried, *, has_other: bool
    ) -> str | None:
        """Lets the job, and the second one, go on undisturbed; returns what is wrong then."""
        must = must_be(lives, len(lost), self.scene)
        is_alike = not lost and rng.random() < (0.8 if len(self.scene.hosts) == 1 else 0.4)
        job = self._job(LAST_LIFE, self.scene.hosts if is_alike else drawn_hosts(rng, self.scene.hosts, lost))
        ended = ended_processes(self.folder)
        lived = live(job, self.port, UNDISTURBED)
        if must == -1 and lost and lived.failed and all(_NOTHING_LEFT in text for text in lived.failed):
            tried.seen.append("found nothing left and said so")
            return None
        tried.seen += ["resumed by another number of ranks"] * (len(job.hosts) != len(self.scene.hosts))
        tried.seen += ["resumed at a step newer than held"] * (max(lived.said.resumed, default=-1) > must)
        wrong = wrong_with(lived, must, lives)
        if wrong is None and (lived.failed or len(lived.said.held) != job.num_saves):
            wrong = f"the last life did not go on: {lived}"
        if wrong is not None:
            return f"{wrong} (lost {lost}, back on {job.hosts})"
        return (self._wrong_with_other(lost) if has_other else None) or leftovers(self.folder, job, ended)

    def _wrong_with_other(self, lost: tuple[int, ...]) -> str | None:
        texts = [self._other(life, 0).said(0) for life in (0, 1)]
        words = [line.split() for text in texts if text.exists() for line in text.read_text().splitlines()]
        held = max(int(word[1]) for word in words if word[0] == "held")
        stored = max((int(word[1]) for word in words if word[0] == "stored"), default=-1)
        begun = {int(word[1]) for word in words if word[0] == "begun"}
        (resumed,) = live(self._other(LAST_LIFE, 0), self.port, UNDISTURBED).said.resumed or {-3}
        least = stored if 0 in lost else held
        if resumed < least or resumed not in {*begun, -1}:
            return f"the second job resumed {resumed}, at least {least} was expected, of {sorted(begun)}"
        return None


def drawn_hosts(rng: random.Random, hosts: Sequence[int], lost: Sequence[int]) -> tuple[int, ...]:
    """Returns the host of each rank that comes back: all that are left, and perhaps new ones with the names of lost."""
    left = sorted({*hosts} - {*lost}) or [0]
    world_size = rng.randint(len(left), MOST_RANKS)
    found = left + [rng.choice([*left, *lost]) for _ in range(world_size - len(left))]
    rng.shuffle(found)
    return tuple(found)


def must_be(lives: Sequence[Said], num_lost: int, scene: Scene) -> int:
    """Returns the oldest value that may be resumed after these lives."""
    newest = -1
    for said in lives:
        if not num_lost:
            newest = max(said.held or ({*said.resumed} - {-1}) or {newest})
        else:
            of_level = said.safe | said.stored if num_lost <= scene.survives_hosts else said.stored
            newest = max(of_level or {newest})
    return newest


def wrong_with(lived: Lived, must: int, before: Sequence[Said]) -> str | None:
    """Returns the first thing that is wrong with a life."""
    resumed, known = lived.said.resumed, {value for said in before for value in said.begun}
    known |= {-1} if must == -1 else set()
    if len(resumed) > 1:
        return f"ranks resumed different values: {sorted(resumed)}"
    for value in resumed:
        if value == -2:
            return "values of more than one step were resumed"
        is_older = must >= 0 and (value // 100 < must // 100 or value % 100 < must % 100)
        if is_older or value not in known:
            return f"{value} was resumed, and {must} was held; {sorted(known)} were begun"
    odd = [text for text in lived.failed if "bytecheckpoint.errors." not in text]
    if odd:
        return f"a rank ended otherwise than by the kill: {odd[0]}"
    if not lived.num_killed and lived.failed:
        return f"a life without a kill failed: {lived.failed[0]}"
    return None


def ended_processes(folder: Path) -> set[Path]:
    """Returns the files of all processes that have worked on the jobs, and lets the time pass after which none of them
    can be making anything.
    """
    for path in folder.glob("host*/**/.tmp-*"):
        os.utime(path, (time.time() - A_WHILE_S,) * 2)
    return {*folder.glob("host*/*/alive/*")}


def leftovers(folder: Path, job: Job, ended: set[Path]) -> str | None:
    """Returns what a run that has ended should not leave in the memory roots, traces of processes that had ended before
    it among them; then removes what it should.
    """
    for host in sorted({*job.hosts}):
        root = str(root_of(folder, host))
        temporaries = sorted(str(path) for path in Path(root).glob(".*"))
        if temporaries:
            return f"host {host}: temporaries are left: {temporaries}"
        for found, about in find_jobs(root):
            wrong = _too_much(found, job, host, ended) if about.location.endswith("/ckpt") else None
            if wrong is not None:
                return f"host {host}: {wrong}"
            if remove_job(root, found.path) != "removed" or Path(found.path).exists():
                return f"host {host}: the memory of {about.location} cannot be given back"
    return None


def _too_much(found: JobFolder, job: Job, host: int, ended: set[Path]) -> str | None:
    num_ranks, num_slots = job.hosts.count(host), len(list(slot_file.scan(found.slots)))
    if num_slots > 2 * num_ranks:
        return f"{num_slots} slots for {num_ranks} ranks"
    num_others = len(job.hosts) - num_ranks
    for kind in ("copies", "parity"):
        if len(scan_copies(found, kind)) > 2 * num_others:
            return f"{len(scan_copies(found, kind))} of {kind} for {num_others} ranks of other hosts"
    if len(version_files.read_versions(found)) > 2:
        return f"{len(version_files.read_versions(found))} manifests"
    dead = ended & {*Path(found.path, "alive").iterdir()}
    if dead:
        return f"{len(dead)} files of processes that ended long ago"
    temporaries = [str(path.relative_to(found.path)) for path in Path(found.path).rglob(".*")]
    return f"temporaries are left: {temporaries}" if temporaries else None


def try_many(seed: str, numbers: str, folder: str, scenes: str, kind: str, port: str, lane: str) -> None:
    """Does some trials, and writes what came of each as a line of JSON."""
    of_names = {scene.name: scene for scene in (*ALONE, *RANKS)}
    chosen = [of_names[name] for name in scenes.split(",")]
    at: dict[str, Trials] = {}
    for trial in map(int, numbers.split(",")):
        scene = chosen[trial % len(chosen)]
        if scene.name not in at:
            at[scene.name] = Trials(Path(folder), scene, kind, int(port), int(lane))
        rng = random.Random(f"{seed}/{trial}")
        tried = at[scene.name].try_one(trial, trial // len(chosen), rng)
        sys.stdout.write(f"{json.dumps(asdict(tried))}\n")
        sys.stdout.flush()


class Batch(NamedTuple):
    """Trials that a program does, one after the other."""

    lane: int
    pid: int
    numbers: list[int]
    until_s: float


class Lanes:
    """Programs that run side by side, each with a batch of trials."""

    def __init__(self, asked: Asked, scenes: Sequence[Scene], kind: str, port: int) -> None:
        self._asked, self._port = asked, port
        self._what = (",".join(scene.name for scene in scenes), kind)
        self._launcher = shared_launcher("faults.memory_run")

    def run(self) -> list[Tried]:
        due = self._asked.due()
        num_trials = NUM_LANES * BATCH
        idle, running = list(range(NUM_LANES if len(self._asked.trials) > num_trials else 1)), list[Batch]()
        found: list[Tried] = []
        while True:
            while idle and (numbers := list(islice(due, BATCH))):
                running.append(self._begin(idle.pop(), numbers))
            if not running:
                return found
            ended = [batch for batch in running if self._has_ended(batch)]
            for batch in ended:
                running.remove(batch)
                idle.append(batch.lane)
                found += self._end(batch)
            time.sleep(0 if ended else LOOK_S)

    def _begin(self, lane: int, numbers: list[int]) -> Batch:
        folder = self._asked.folder / f"{lane}"
        folder.mkdir(exist_ok=True)
        of_all = ",".join(map(str, numbers))
        pid = self._launcher.start(PROGRAM, self._asked.seed, of_all, folder, *self._what, self._port, lane)
        return Batch(lane, pid, numbers, time.monotonic() + WITHIN_S)

    def _has_ended(self, batch: Batch) -> bool:
        return self._launcher.has_ended(batch.pid) or time.monotonic() > batch.until_s

    def _end(self, batch: Batch) -> list[Tried]:
        ended = self._launcher.wait(batch.pid, timeout_s=LOOK_S)
        lines = [line for line in ended.output.splitlines() if line.startswith('{"trial"')]
        if len(lines) != len(batch.numbers):
            raise RuntimeError(f"the trials {batch.numbers} came to no end: {ended.output[-3000:]}")
        return [Tried(**json.loads(line)) for line in lines]


def run(asked: Asked, *, scenes: Sequence[Scene], kind: str) -> Outcome:
    with meeting_place() as port:
        found = Lanes(asked, scenes, kind, port).run()
    seen = Counter(what for tried in found for what in tried.seen)
    seen["processes killed"] = sum(tried.num_ranks for tried in found)
    told = ", ".join(f"{number:,} {what}" for what, number in sorted(seen.items()))
    broken = tuple(Broken(tried.trial, tried.is_wrong) for tried in found if tried.is_wrong is not None)
    return Outcome(sum(tried.num_kills for tried in found), broken, told)


_HOW = {
    "call": "ptrace by the process that has forked it",
    "line": "a trace function, os.kill of itself",
    "time": "os.kill by the process that has forked it",
}
_THEN = "then hosts are lost in some trials, and another number of ranks resumes"


def campaign(name: str, scenes: Sequence[Scene], kind: str, trials: int, quick: int, fault: str) -> Campaign:
    return Campaign(
        name=name,
        fault=f"{fault}; {_THEN}",
        how=_HOW[kind],
        unit="kills",
        run=partial(run, scenes=scenes, kind=kind),
        trials=range(trials),
        quick=range(quick),
        missing=missing_for_calls if kind == "call" else nothing_missing,
    )


CAMPAIGNS = (
    campaign(
        "kill-memory-calls",
        ALONE,
        "call",
        6000,
        3,
        "SIGKILL before each system call of a rank that resumes from memory and saves there and to storage",
    ),
    campaign(
        "kill-memory-lines",
        ALONE,
        "line",
        3000,
        2,
        "the same before lines of what holds and resumes, between which are stores into slots",
    ),
    campaign(
        "kill-memory-ranks",
        RANKS,
        "call",
        3000,
        4,
        "the same of one of 2 to 4 ranks on 2 and 3 hosts, with copies, parity or neither; the others die with it, up "
        "to 50 ms later, or live on",
    ),
    campaign(
        "kill-memory-rank-lines",
        RANKS,
        "line",
        2000,
        0,
        "the same before lines of what holds, copies and resumes",
    ),
    campaign("kill-memory-times", RANKS, "time", 2000, 4, "the same at a random time"),
)
