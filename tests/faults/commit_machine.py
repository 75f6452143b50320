"""Two jobs at one store as a state machine: saves of every kind, loads, clean-ups, recoveries and retention, each held
at any operation, failed there in any way or killed, in any order. After every step commit_model.py says what must hold.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from functools import cache
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from faults.campaigns import Asked, Broken, Campaign, Outcome
from faults.commit_job import Call, Ended
from faults.commit_jobs import SORTS, Crew, Job, Planned
from faults.commit_model import Cause, Model, Place, must
from faults.launcher import shared_launcher
from faults.object_world import Fault, World, save_id_in

RUN = "world://bucket/run"
ALONE = "world://bucket/alone"
PLACES = [*(Place(RUN, step) for step in (1, 2, 3)), Place(ALONE, None)]
ROOTS = [RUN, ALONE]
ABOVE = "world://bucket"
NUM_JOBS = 2
RUNS, STEPS = 10, 50
HOUR_S = 3600.0
LIVES_FOR_S = 22 * HOUR_S
"""Less than a clean-up takes for dead."""
COUNTED = (
    "runs",
    "runs that saved",
    "steps",
    "saves",
    "acknowledged saves",
    "kills",
    "faults",
    "late writes",
    "gcs",
    "loads",
    "copies",
)
DEATHS = ("before", "after", "upload", "temporary")
"""What the operation at which a job is killed has done."""


class Ask(NamedTuple):
    """A job begins a call."""

    job: int
    call: Call
    faults: tuple[Planned, ...]
    budget: int | str | None
    """How many operations it goes on for, or to the next of which sort; None for all that there are."""


class GoOn(NamedTuple):
    """A job goes on with its call."""

    job: int
    budget: int | str | None


class Kill(NamedTuple):
    """A job is killed within a call."""

    job: int
    death: str


class LateArrives(NamedTuple):
    """A write arrives that nobody waits for any more."""

    number: int


class TimePasses(NamedTuple):
    """For everybody."""

    hours: int


class Copy(NamedTuple):
    """All of a root is copied to another prefix."""

    root: str


Step = Ask | GoOn | Kill | LateArrives | TimePasses | Copy

JOBS = st.integers(0, NUM_JOBS - 1)
BUDGETS = st.one_of(st.none(), st.integers(0, 12), st.sampled_from(SORTS[1:]))
FAULTED = st.one_of(
    st.tuples(st.just("any"), st.integers(1, 12), st.sampled_from(list(Fault))),
    st.tuples(st.sampled_from(SORTS[1:]), st.sampled_from([1, 1, 1, 2]), st.sampled_from(list(Fault))),
).map(lambda drawn: Planned(*drawn))
FAULTS = st.lists(FAULTED, max_size=2).map(tuple)
SAVED = st.builds(
    lambda place, overwrite, snapshot, stage: Call("save", *place, overwrite=overwrite, snapshot=snapshot, stage=stage),
    st.sampled_from(PLACES),
    st.booleans(),
    st.sampled_from(["", "", "copy", "lazy"]),
    st.sampled_from([None, None, "stage"]),
)
CALLED = st.one_of(
    st.sampled_from([Call("load", root, step) for root, step in [*PLACES, (RUN, None)]]),
    st.sampled_from([Call("gc", root) for root in [*ROOTS, ABOVE]]),
    st.sampled_from([Call("recover", root, stage="stage") for root in ROOTS]),
    st.sampled_from([Call("retain", RUN, keep=keep) for keep in (1, 2)]),
)
SAVES = st.builds(Ask, JOBS, SAVED, FAULTS, BUDGETS)
CALLS = st.builds(Ask, JOBS, CALLED, FAULTS, BUDGETS)
GOING_ON = st.builds(GoOn, JOBS, BUDGETS)
KILLS = st.builds(Kill, JOBS, st.sampled_from(DEATHS))
LATE_ARRIVALS = st.builds(LateArrives, st.integers(0, 3))
TIMES = st.builds(TimePasses, st.sampled_from([1, 7, 25]))
COPIES = st.builds(Copy, st.sampled_from(ROOTS))


@cache
def _steps(*, any_idle: bool, any_busy: bool, any_late: bool) -> st.SearchStrategy[Step]:
    """Those that are possible, some of them oftener than others."""
    steps = [TIMES, COPIES]
    if any_idle:
        steps += [SAVES, SAVES, SAVES, SAVES, CALLS, CALLS]
    if any_busy:
        steps += [GOING_ON, GOING_ON, GOING_ON, KILLS]
    if any_late:
        steps += [LATE_ARRIVALS]
    return st.sampled_from(steps).flatmap(lambda chosen: chosen)


class CommitMachine(RuleBasedStateMachine):
    """To be given a crew."""

    crew: Crew
    tally: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.crew.begin_anew()
        self.model = Model(self.world, PLACES)
        self.stage = tempfile.mkdtemp(prefix="stage-")
        self.jobs: list[Job | None] = [None] * NUM_JOBS
        self.began = [0] * NUM_JOBS
        """In which step the call that is under way did."""
        self.acted = [0] * NUM_JOBS
        """In which step each job did last."""
        self.num_saves = 0
        self.has_saved = False
        """Whether any save was acknowledged; hypothesis begins every batch with runs that do next to nothing."""

    @property
    def world(self) -> World:
        return self.crew.world

    @rule(step=st.runner().flatmap(lambda machine: machine.possible_steps()))
    def step(self, step: Step) -> None:
        self.count("steps")
        match step:
            case Ask():
                self.ask(step)
            case GoOn():
                self.advance(self.busy(step.job), step.budget)
            case Kill():
                self.kill(self.busy(step.job), step.death)
            case LateArrives():
                self.late_arrives(step.number)
            case TimePasses():
                self.time_passes(step.hours)
            case Copy():
                self.copy(step.root)

    def possible_steps(self) -> st.SearchStrategy[Step]:
        idle = [self.is_idle(number) for number in range(NUM_JOBS)]
        return _steps(any_idle=any(idle), any_busy=not all(idle), any_late=bool(self.world.late))

    def ask(self, ask: Ask) -> None:
        call = ask.call
        stage = self.stage if call.stage else None
        if call.kind == "save":
            self.num_saves += 1
            call = call._replace(value=float(self.num_saves))
            self.model.begin(call)
        self.call(self.idle(ask.job), call._replace(stage=stage), ask.faults, ask.budget)

    def kill(self, number: int, death: str) -> None:
        cause = self.cause_of(number)
        self.acted[number] = self.model.num_steps + 1
        self.die(number, death)
        self.count("kills")
        self.look(cause)

    def late_arrives(self, number: int) -> None:
        late = self.world.late[number % len(self.world.late)]
        self.world.arrive(late)
        self.count("late writes")
        self.look(Cause(set(self.model.saves)))

    def time_passes(self, hours: int) -> None:
        while self.world.late:
            self.late_arrives(0)
        if all(self.world.now_s + hours * HOUR_S - at < LIVES_FOR_S for at in self.last_signs_of_life()):
            self.world.now_s += hours * HOUR_S

    def copy(self, root: str) -> None:
        """As `aws s3 sync` to another prefix does it."""
        to = f"{root}-copy"
        for name, stored in self.world.below(root).items():
            self.world.objects[to + name.removeprefix(root)] = stored
        for place, value in self.model.visible.items():
            if place.root == root:
                must(self.model.load(to, place.step) == value, f"a copy of {place} has not {value}")
                self.count("copies")
        for name in self.world.below(to):
            del self.world.objects[name]

    def teardown(self) -> None:
        """When all is over, only what is committed is left after a clean-up."""
        try:
            if sys.exception() is None:  # else it was broken off, and is to be told as it was
                self.end()
        finally:
            shutil.rmtree(self.stage, ignore_errors=True)

    def end(self) -> None:
        for number, job in enumerate(self.jobs):
            if job is not None and job.running is not None:
                self.kill(number, "before")
        while self.world.late:
            self.late_arrives(0)
        for root in ROOTS:
            self.call(self.idle(0), Call("recover", root, stage=self.stage), (), None)
        self.world.now_s += 48 * HOUR_S
        self.call(self.idle(0), Call("gc", ABOVE), (), None)
        alive = {place.folder: self.model.save_id_at(place) for place in self.model.visible}
        for name in self.world.objects:
            folder = next((at for at in alive if name.startswith(f"{at}/")), "")
            is_needed = name == f"{folder}/manifest.bcp" or (save_id_in(name) and save_id_in(name) == alive.get(folder))
            must(bool(is_needed), f"{name} is left after a clean-up")
        must(not self.world.uploads, f"uploads are left after a clean-up: {self.world.uploads}")
        self.count("runs")
        if self.has_saved:
            self.count("runs that saved")

    # How all of that is done.

    def count(self, what: str) -> None:
        self.tally[what] = self.tally.get(what, 0) + 1

    def is_idle(self, number: int) -> bool:
        job = self.jobs[number]
        return job is None or job.running is None

    def idle(self, number: int) -> int:
        """This job, or the other one if it is busy."""
        return number if self.is_idle(number) else 1 - number

    def busy(self, number: int) -> int:
        return 1 - number if self.is_idle(number) else number

    def call(self, number: int, call: Call, faults: tuple[Planned, ...], budget: int | str | None) -> None:
        job = self.jobs[number] = self.jobs[number] or self.crew.idle_job()
        self.began[number] = self.model.num_steps
        self.crew.begin(job, call, faults)
        self.count(f"{call.kind}s")
        self.advance(number, budget)

    def advance(self, number: int, budget: int | str | None) -> None:
        job = self.jobs[number]
        assert job is not None
        running = job.running
        assert running is not None
        cause = self.cause_of(number)
        ended = self.crew.go_on(job, budget)
        if running.call.kind == "save":
            self.model.saves[running.call.value].is_durable = running.is_durable
        self.look(cause)
        self.acted[number] = self.model.num_steps
        if ended is not None:
            self.tally["faults"] = self.tally.get("faults", 0) + len(running.met)
            self.judge(number, running.call, ended, met_faults=bool(running.met))

    def judge(self, number: int, call: Call, ended: Ended, *, met_faults: bool) -> None:
        since = self.began[number]
        if call.kind == "save":
            self.model.save_ended(call.value, ended, met_faults=met_faults)
            self.has_saved = self.has_saved or ended.error is None
            self.count("acknowledged saves" if ended.error is None else "failed saves")
        elif call.kind == "load":
            self.model.load_ended(call, ended, since=since, met_faults=met_faults)
        elif not met_faults and max(self.acted[:number] + self.acted[number + 1 :]) <= since:
            is_nothing_there = ended.error is not None and ended.error.kind == "not_found"
            must(ended.error is None or is_nothing_there, f"{call} met no fault and failed: {ended.error}")

    def cause_of(self, number: int) -> Cause:
        """What a job that goes on may change."""
        job = self.jobs[number]
        running = job.running if job is not None else None
        if running is None:
            return Cause()
        call = running.call
        if call.kind == "save":
            return Cause({call.value})
        if call.kind == "recover":
            saves = self.model.saves.values()
            return Cause({save.call.value for save in saves if save.is_durable and save.call.root == call.root})
        if call.kind == "retain":
            return Cause(deletes={place for place in PLACES if place.root == call.root})
        return Cause()

    def look(self, cause: Cause) -> None:
        self.model.look(cause)
        for job in self.jobs:
            running = job.running if job is not None else None
            if running is not None and running.call.kind == "save":
                save = self.model.saves[running.call.value]
                gone = [name for name in running.written if name not in self.world.objects]
                is_replaced = save.was_visible and self.model.visible.get(save.place) != running.call.value
                must(not gone or is_replaced, f"what a living save has written was collected: {gone}")

    def die(self, number: int, death: str) -> None:
        job = self.jobs[number]
        assert job is not None
        self.jobs[number] = None
        if job.waiting:
            operation = job.waiting[0][1]
            is_write = operation.kind == "write"
            if death == "after":
                self.world.break_off(operation, Fault.LOSE)
            elif death == "upload" and is_write:
                self.world.leave_upload(operation.name)
            elif death == "temporary" and is_write:
                self.world.leave_temporary(operation)
        self.crew.kill(job)

    def last_signs_of_life(self) -> list[float]:
        """Of each job that is writing: when it last did."""
        running = [job.running for job in self.jobs if job is not None and job.running is not None]
        alive = [each.written & self.world.objects.keys() for each in running]
        return [max(self.world.objects[name].changed_s for name in names) for names in alive if names]


def run(asked: Asked) -> Outcome:
    """Each trial is a batch of runs, because the first run of any is the simplest that there is. One that is asked for
    alone is told by the fewest steps that break the promise.
    """
    tally: dict[str, int] = {}
    shrinks = len(asked.trials) == 1
    broken = []
    crew = Crew(shared_launcher("faults.commit_job"))
    try:
        for trial in asked.due():
            try:
                run_machine(
                    crew,
                    seed_text=f"{asked.seed}/{trial}",
                    num_runs=RUNS,
                    num_steps=STEPS,
                    tally=tally,
                    shrinks=shrinks,
                )
            except BaseExceptionGroup as group:
                broken += [Broken(trial, _story(error)) for error in group.exceptions]
            except AssertionError as error:
                broken.append(Broken(trial, _story(error)))
    finally:
        crew.close()
    tally = {what: tally.get(what, 0) for what in COUNTED}
    told = (
        f"{tally['steps']:,} steps: {tally['saves']:,} saves ({tally['acknowledged saves']:,} acknowledged), "
        f"{tally['kills']:,} kills, {tally['faults']:,} faults, {tally['late writes']:,} writes that arrived late, "
        f"{tally['gcs']:,} clean-ups, {tally['loads'] + tally['copies']:,} loads"
    )
    return Outcome(tally["runs that saved"], tuple(broken), told)


def _story(error: BaseException) -> str:
    """What did not hold, and the steps that led there."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


CAMPAIGNS = (
    Campaign(
        name="commit-machine",
        fault="two jobs at one store save, load, clean up, recover and delete; operations held, failed, late; kills",
        how="a state machine of hypothesis over processes, whose every store operation the test answers",
        unit="runs of 50 steps in which a save was acknowledged",
        run=run,
        trials=range(64),
        quick=range(0),  # test_commit_machine.py
    ),
)


def run_machine(
    crew: Crew, *, seed_text: str, num_runs: int, num_steps: int, tally: dict[str, int], shrinks: bool
) -> None:
    """So many runs. Raises what one of those that break a promise raises, with its steps as notes; where it `shrinks`,
    which takes minutes, of the shortest that can be found.
    """
    machine = seed(seed_text)(type("CommitMachine", (CommitMachine,), {"crew": crew, "tally": tally}))
    chosen = settings(
        max_examples=num_runs,
        stateful_step_count=num_steps,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.normal,
        print_blob=False,
    )
    run_state_machine_as_test(machine, settings=chosen)
