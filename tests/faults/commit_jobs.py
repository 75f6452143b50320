"""Jobs beside one another, in the hands of one test: it lets one of them go on for so many operations of its stores,
and all others wait meanwhile. So every interleaving is drawn, and the same again for the same draw.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from bytecheckpoint.errors import CheckpointError
from faults.commit_job import Call, Ended
from faults.launcher import Launcher
from faults.object_world import Fault, Operation, World

PROGRAM = """
import sys
from faults.commit_job import serve
serve(sys.argv[1])
"""
HUNG_S = 100.0


class Hung(AssertionError):  # noqa: N818  # the name says what happened
    """A job neither asks for anything nor ends its call, or ended by itself."""


SORTS = ("any", "write", "manifest", "delete")
"""Of operations; `manifest` is that which commits."""


class Planned(NamedTuple):
    """A fault of a call."""

    sort: str
    number: int
    """Of the operation that meets it, among those of its sort; the first is 1."""
    fault: Fault


def is_of(operation: Operation, sort: str) -> bool:
    is_commit = operation.kind == "write" and operation.name.endswith("/manifest.bcp")
    return sort in {"any", operation.kind} or (sort == "manifest" and is_commit)


class Running:
    """A call that is under way."""

    def __init__(self, call: Call, faults: tuple[Planned, ...]) -> None:
        self.call = call
        self.num_operations = dict.fromkeys(SORTS, 0)
        self.met: list[Planned] = []
        self.is_durable = False
        """In the local stage of every rank."""
        self.written: set[str] = set()
        """The objects that it has written and not deleted, but for manifests: another's may stand under their names."""
        self._faults = faults

    def fault_of(self, operation: Operation) -> Fault | None:
        """What the next operation meets, which is this."""
        for sort in SORTS:
            self.num_operations[sort] += is_of(operation, sort)
        hits = [each for each in self._faults if self._hits(each, operation)]
        self.met += hits[:1]
        return hits[0].fault if hits else None

    def _hits(self, planned: Planned, operation: Operation) -> bool:
        return is_of(operation, planned.sort) and self.num_operations[planned.sort] == planned.number

    def note(self, operation: Operation, world: World) -> None:
        """After the operation."""
        if operation.kind == "write" and operation.name in world.objects and not is_of(operation, "manifest"):
            self.written.add(operation.name)
        if operation.kind == "delete":
            self.written.discard(operation.name)


class Job:
    """One process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.calls: Connection | None = None
        self.asking: list[Connection] = []
        self.waiting: list[tuple[Connection, Operation]] = []
        """For an answer, in the order in which they asked."""
        self.running: Running | None = None

    @property
    def connections(self) -> list[Connection]:
        return [*([self.calls] if self.calls else []), *self.asking]


class Crew:
    """All jobs. To be closed."""

    def __init__(self, launcher: Launcher) -> None:
        self.world = World()
        self._launcher = launcher
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._address = str(Path(self._folder.name, "s"))
        self._listener.bind(self._address)
        self._listener.listen(64)
        self._jobs: dict[int, Job] = {}
        self._spare: list[Job] = []

    def begin_anew(self) -> None:
        """With an empty world. Jobs that are idle are kept, because a new one takes its time to start."""
        self.world = World()
        for job in list(self._jobs.values()):
            if job.running is not None:
                self.kill(job)
        self._spare = list(self._jobs.values())

    def idle_job(self) -> Job:
        """One that has nothing to do, and is nobody's."""
        if self._spare:
            return self._spare.pop()
        pid = self._launcher.start(PROGRAM, self._address)
        job = self._jobs[pid] = Job(pid)
        while job.calls is None:
            self._accept()
        return job

    def begin(self, job: Job, call: Call, faults: tuple[Planned, ...]) -> None:
        """Returns when the call asks for its first operation; it may end before."""
        if job.calls is None or job.running is not None:
            raise ValueError("the job is busy")
        job.running = Running(call, faults)
        job.calls.send(call)

    def go_on(self, job: Job, budget: int | str | None) -> Ended | None:
        """Lets it go on for so many operations, until it asks for the next one of a sort, or to the end of its call:
        how that ended, or None.
        """
        num_done = 0
        while True:
            ended = self._until_it_asks(job)
            if ended is not None or num_done == budget:
                return ended
            if isinstance(budget, str) and num_done and is_of(job.waiting[0][1], budget):
                return None
            connection, operation = job.waiting.pop(0)
            connection.send(self._answer(job, operation))
            num_done += 1

    def kill(self, job: Job) -> Running | None:
        """As the kernel does it. What it was doing."""
        os.kill(job.pid, signal.SIGKILL)
        self._launcher.wait(job.pid)
        for connection in job.connections:
            connection.close()
        del self._jobs[job.pid]
        return job.running

    def close(self) -> None:
        for job in list(self._jobs.values()):
            self.kill(job)
        self._listener.close()
        self._folder.cleanup()

    def _answer(self, job: Job, operation: Operation) -> Any:
        running = job.running
        if running is None:
            raise Hung("a job that has nothing to do asks for something")
        fault = running.fault_of(operation)
        try:
            if fault is not None:
                return self.world.break_off(operation, fault)
            return self.world.carry_out(operation)
        except CheckpointError as error:
            return error
        finally:
            running.note(operation, self.world)

    def _until_it_asks(self, job: Job) -> Ended | None:
        """Returns when the job waits for an answer, or with the end of its call."""
        deadline = time.monotonic() + HUNG_S
        while not job.waiting:
            for ready in wait([self._listener, *job.connections], timeout=max(0.0, deadline - time.monotonic())):
                if ready is self._listener:
                    self._accept()
                    continue
                message = self._receive(job, ready)
                if message is None:
                    continue
                if isinstance(message, Ended):
                    job.running = None
                    return message
                if message.kind == "durable":
                    if job.running is not None:
                        job.running.is_durable = True
                    ready.send(None)
                else:
                    job.waiting.append((ready, message))
            if time.monotonic() >= deadline:
                self._launcher.wait(job.pid, timeout_s=0.0)
                raise Hung(f"{job.running.call if job.running else job} does nothing for {HUNG_S} s")
        return None

    def _receive(self, job: Job, ready: Any) -> Any:
        """What it says; None where a thread of it has ended."""
        try:
            return ready.recv()
        except (EOFError, OSError) as error:
            if ready in job.asking:
                job.asking.remove(ready)
                ready.close()
                return None
            ended = self._launcher.wait(job.pid)
            raise Hung(f"{job.running.call if job.running else job} ended by itself: {ended}") from error

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        connection = Connection(accepted.detach())
        pid, what = connection.recv()
        job = self._jobs.get(pid)
        if job is None:  # of one that was killed when it had just connected
            connection.close()
        elif what == "calls":
            job.calls = connection
        else:
            job.asking.append(connection)
