"""Saves and loads through a proxy that lets go wrong what a seed says, against moto's server: nothing partial is ever
visible, nothing acknowledged is lost, nobody takes its own write for another's, nothing hangs, and no upload is left.

    python tests/faults/object_store_faults.py --count 500
    python tests/faults/object_store_faults.py --first 17 --count 1     # one schedule again, with all of its requests
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from faults.campaigns import Asked, Broken, Campaign, side_by_side
from faults.campaigns import Outcome as Campaigned
from faults.fault_proxy import Fault, FaultProxy, running_proxy
from faults.fault_schedules import Schedule, draw_schedule, stalls
from faults.moto_bucket import Bucket, running_moto, what_is_partial
from faults.s3_calls import UNTOUCHED, Ended, Place, load_there, save_there
from faults.seams import Seen

OLD, NEW, LATER = 1.0, 2.0, 3.0
HUNG_S = 90.0
"""A call that takes that long hangs: its process is killed and says where it was."""
STARTING_S = 300.0
"""What the first save of each lane may take, while all import what they need."""
MOST_RANKS = 2
FAR_APART = 1_000_000
"""Between the schedules of one seed of the campaign and those of the next."""
NUM_LANES = 6
"""Schedules at a time: they wait, for what stalls and before they try again, five times as long as they compute."""
GAVE_UP = re.compile(r"after \d+ attempts? in (?P<seconds>\d+(\.\d+)?) s")
MAY_BE_COMMITTED = "whether the checkpoint was committed"


class Outcome(NamedTuple):
    """What came of a schedule in which everything held that must."""

    save: str
    load: str
    num_met: int
    """Faults."""
    longest_s: float
    """That a save or a load took."""


class BrokenPromiseError(AssertionError):
    """Something did not hold."""


class Trial:
    """One schedule, carried out."""

    def __init__(self, schedule: Schedule, bucket: Bucket, proxy: FaultProxy, workers: WorkerPool) -> None:
        self._schedule = schedule
        self._bucket = bucket
        self._proxy = proxy
        self._workers = workers
        self._prefix = f"seed{schedule.seed}/"
        self._longest_s = 0.0
        self.story = [str(schedule)]
        """What was done, and what the proxy saw of it."""

    def run(self) -> Outcome:
        old_step, new_step = (None, None) if self._schedule.overwrites else (1, 2)
        self._save(OLD, self._place(old_step))
        saved = self._save_with_faults(new_step)
        is_new = self._check_saved(saved, old_step, new_step)
        num_met = len(self._proxy.met)
        loaded = self._load_with_faults(NEW if is_new else OLD, new_step if is_new else old_step)
        if saved.error is not None and not is_new:
            self._save(LATER, self._place(new_step), overwrite=self._schedule.overwrites)
            self._must(self._load(self._place(new_step)).value == LATER, "what was saved again is not there")
        return Outcome(
            "acknowledged" if saved.error is None else "failed, but committed" if is_new else "failed",
            "loaded" if loaded.error is None else "failed",
            num_met + len(self._proxy.met),
            self._longest_s,
        )

    def _save_with_faults(self, step: int | None) -> Ended:
        """Also sees to it that nothing partial is visible, and that the manifest is sent last."""
        schedule = self._schedule
        place = self._place(step, faults=schedule.save_faults)
        at_commit: list[dict[str, bytes]] = []

        def look(line: str) -> None:
            if line.startswith("PUT") and "/manifest.bcp" in line:
                at_commit.append(self._bucket.objects(self._prefix))

        self._proxy.begin(schedule.save_faults, schedule.pace)
        self._proxy.before_passing = look
        ended = self._ask(save_there, place, NEW, schedule.is_async, schedule.overwrites)
        self._heal()
        self._proxy.before_passing = None
        afterwards = self._bucket.objects(self._prefix)
        for objects in (afterwards, *at_commit):
            self._must(not what_is_partial(objects), f"visible in part: {what_is_partial(objects)}")
        for objects in at_commit:
            new = [key for key, data in afterwards.items() if "/data/" in key and objects.get(key) != data]
            self._must(not new, f"written after the manifest was sent: {new}")
        return ended

    def _check_saved(self, ended: Ended, old_step: int | None, new_step: int | None) -> bool:
        """Whether the new checkpoint stands. Looks at the server itself."""
        place = self._place(new_step)
        is_there = new_step is None or new_step in bcp.steps(place.url, storage_options=place.storage_options)
        value = self._load(place).value if is_there else None
        is_new = value == NEW
        if ended.error is None:
            self._must(is_new, f"what was acknowledged is not there: {value}")
        else:
            self._check_error(ended.error)
            self._must(not is_new or MAY_BE_COMMITTED in ended.error.message, "committed, against what the error says")
        self._must(is_new or not is_there or value == OLD, f"what is visible is not whole: {value}")
        if old_step != new_step:
            self._must(self._load(self._place(old_step)).value == OLD, "the previous checkpoint is lost")
        if not (self._schedule.is_for_good or self._has_late_upload()):
            uploads = self._bucket.uploads(self._prefix)
            self._must(not uploads, f"uploads are left that could have been aborted: {uploads}")
        return is_new

    def _load_with_faults(self, value: float, step: int | None) -> Ended:
        before = self._bucket.objects(self._prefix)
        self._proxy.begin(self._schedule.load_faults, self._schedule.pace)
        ended = self._ask(load_there, self._place(step, faults=self._schedule.load_faults))
        self._heal()
        self._must(self._bucket.objects(self._prefix) == before, "a load has changed what is stored")
        if ended.error is None:
            self._must(ended.value == value, f"loaded {ended.value} instead of {value}")
        else:
            self._check_error(ended.error)
            is_as_it_was = "Nothing of the state" in ended.error.message + ended.error.own
            self._must(not is_as_it_was or ended.value == UNTOUCHED, "overwritten, against what the error says")
        return ended

    def _check_error(self, error: Seen) -> None:
        self._must(error.cls in {"StorageError", "CheckpointSaveError"}, "an outage is reported as something else")
        self._must(GAVE_UP.search(error.message) is not None, "the error does not name attempts and seconds")

    def _has_late_upload(self) -> bool:
        """Whether an upload may have begun when its client had given up."""
        return any(met.fault.kind == "late" and "uploads" in met.line for met in self._proxy.met)

    def _place(self, step: int | None, *, faults: Sequence[Fault] | None = None) -> Place:
        """Behind the proxy where there are to be faults. Only a client that is to give up a stalled request is in a
        hurry: if it gave up one that is merely slow, an upload might begin of which it knows nothing.
        """
        return Place(
            url=f"s3://{self._bucket.name}/{self._prefix}run",
            step=step,
            endpoint=self._bucket.url if faults is None else self._proxy.url,
            timeout_s=HUNG_S if faults is None else self._schedule.timeout_s,
            stalled_s=1 if stalls(faults or ()) else HUNG_S / 3,
            in_parts=self._schedule.in_parts,
        )

    def _save(self, value: float, place: Place, *, overwrite: bool = False) -> None:
        ended = self._ask(save_there, place, value, False, overwrite)
        self._must(ended.error is None, f"a save that meets no fault fails: {ended.error}")

    def _load(self, place: Place) -> Ended:
        ended = self._ask(load_there, place)
        self._must(ended.error is None, f"a load that meets no fault fails: {ended.error}")
        return ended

    def _ask(self, function: Any, *args: Any) -> Ended:
        """What all ranks say alike, and the longest that it took one."""
        num_ranks = self._schedule.num_ranks
        try:
            by_rank = self._workers.run(
                function, *args, world_size=num_ranks, timeout_s=HUNG_S, process_group=num_ranks > 1
            )
        except Exception as error:
            raise self._broken(f"neither done nor failed as it should: {error}") from error
        self._longest_s = max(self._longest_s, *(ended.seconds for ended in by_rank))
        self.story += [f"{function.__name__}: {by_rank[0]}"]
        self._must(len({ended.error for ended in by_rank}) == 1, f"ranks tell different things: {by_rank}")
        if by_rank[0].error is None:
            self._must(len({ended.value for ended in by_rank}) == 1, f"ranks hold different things: {by_rank}")
        return by_rank[0]

    def _heal(self) -> None:
        try:
            self._proxy.heal()
        except Exception as error:
            raise self._broken(f"the proxy, or what looks through it, failed: {error!r}") from error
        self.story += [f"    {line}" for line in self._proxy.lines]

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            raise self._broken(what)

    def _broken(self, what: str) -> BrokenPromiseError:
        command = f"python tests/faults/object_store_faults.py --first {self._schedule.seed} --count 1"
        return BrokenPromiseError("\n".join([what, *self.story, f"once more: {command}"]))


class Lane(NamedTuple):
    """What one schedule at a time needs for itself."""

    bucket: Bucket
    proxy: FaultProxy
    workers: WorkerPool

    def warm_up(self) -> None:
        """Saves and loads once, on as many ranks as any schedule has: a first call takes long, and is not measured."""
        place = Place(f"s3://{self.bucket.name}/warm/run", None, self.bucket.url, STARTING_S, STARTING_S, in_parts=True)
        for function, arguments in ((save_there, (place, OLD)), (load_there, (place,))):
            for ended in self.workers.run(function, *arguments, world_size=MOST_RANKS, timeout_s=STARTING_S):
                if ended.error is not None:
                    raise RuntimeError(f"{self.bucket.name} cannot be used: {ended.error}")
        self.bucket.clear("warm/")

    def run(self, schedule: Schedule) -> tuple[Trial, Outcome | BrokenPromiseError]:
        trial = Trial(schedule, self.bucket, self.proxy, self.workers)
        try:
            return trial, trial.run()
        except BrokenPromiseError as error:
            return trial, error
        finally:
            self.proxy.raised.clear()  # or a trial that broke off would break the next
            self.bucket.clear(f"seed{schedule.seed}/")


@contextmanager
def running_lanes(num_lanes: int) -> Iterator[list[Lane]]:
    """Each has a bucket of its own, so that no lane looks through what another one has there."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # of client libraries, and of saves that go on
        bucket = stack.enter_context(running_moto())
        lanes = [
            Lane(
                bucket.beside(f"bucket{number}"),
                stack.enter_context(running_proxy(bucket.port)),
                stack.enter_context(closing(WorkerPool())),
            )
            for number in range(num_lanes)
        ]
        with ThreadPoolExecutor(max(1, num_lanes)) as starting:
            list(starting.map(Lane.warm_up, lanes))
        yield lanes


def run(asked: Asked) -> Campaigned:
    """Schedules as a campaign: each trial is one."""

    def try_one(lane: Lane, number: int) -> tuple[int, Outcome | BrokenPromiseError]:
        return number, lane.run(draw_schedule((asked.seed - 1) * FAR_APART + number))[1]

    with running_lanes(min(NUM_LANES, len(asked.trials))) as lanes:
        tried = side_by_side(asked, lanes, try_one)
    outcomes = [outcome for _, outcome in tried if isinstance(outcome, Outcome)]
    broken = [Broken(number, str(error)) for number, error in tried if isinstance(error, BrokenPromiseError)]
    saves, loads = (Counter(outcome[index] for outcome in outcomes) for index in (0, 1))
    told = (
        f"{sum(outcome.num_met for outcome in outcomes):,} faults met; of the saves {saves['acknowledged']:,} were "
        f"acknowledged, {saves['failed']:,} failed and {saves['failed, but committed']:,} may have been committed and "
        f"were; {loads['loaded']:,} loads worked and {loads['failed']:,} failed"
    )
    return Campaigned(len(tried), tuple(broken), told)


CAMPAIGNS = (
    Campaign(
        name="object-store",
        fault="an object store that resets, refuses, cuts, stalls, answers too late or not at all",
        how="moto's S3 server behind a proxy of our own, which follows a schedule; 1 and 2 ranks",
        unit="schedules",
        run=run,
        trials=range(1000),
        quick=range(0),  # test_object_store_faults.py
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first schedule")
    parser.add_argument("--count", type=int, default=500, help="how many schedules")
    arguments = parser.parse_args()
    asked = Asked(1, range(arguments.first, arguments.first + arguments.count), Path())

    def try_one(lane: Lane, seed: int) -> Outcome | BrokenPromiseError:
        trial, outcome = lane.run(draw_schedule(seed))
        story = trial.story if arguments.count == 1 and isinstance(outcome, Outcome) else ()
        sys.stdout.write("\n".join([f"{seed}:", *story, f"{outcome}", ""]))
        sys.stdout.flush()
        return outcome

    with running_lanes(min(NUM_LANES, arguments.count)) as lanes:
        tried = side_by_side(asked, lanes, try_one)
    outcomes = [outcome for outcome in tried if isinstance(outcome, Outcome)]
    num_broken = len(tried) - len(outcomes)
    sys.stdout.write(summary(outcomes, num_broken))
    return 1 if num_broken else 0


def summary(outcomes: Sequence[Outcome], num_broken: int) -> str:
    saves = Counter(outcome.save for outcome in outcomes)
    loads = Counter(outcome.load for outcome in outcomes)
    num_met, longest_s = (
        sum(outcome.num_met for outcome in outcomes),
        max((each.longest_s for each in outcomes), default=0),
    )
    return (
        f"{len(outcomes) + num_broken} schedules, {num_met} faults: promises were broken in {num_broken}\n"
        f"saves: {dict(saves)}\nloads: {dict(loads)}\nat most {longest_s:.1f} s\n"
    )


if __name__ == "__main__":
    sys.exit(main())
