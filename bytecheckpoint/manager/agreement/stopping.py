"""Stops of training: a signal, a deadline or a request of one rank becomes a stop at the same boundary on all ranks.

Each call of `save`, `due` and `should_stop` is a boundary, and all ranks pass the same ones. A watcher thread on each
rank looks for a request in the key-value store of the group and then reports how many boundaries its rank has passed;
a rank that has reported waits at its next boundary for the verdict, the highest number. All ranks stop at the boundary
after that one. Boundaries send no message, and the watchers never wait for a main thread.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from bytecheckpoint.distributed.failures import shown_ranks
from bytecheckpoint.distributed.ranks import check_group, group_peers, group_store
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manager.policy_arguments import plain_number

logger = logging.getLogger("bytecheckpoint")

_POLL_S = 0.25
_PENDING_POLL_S = 0.02
"""Pause of a watcher between looks while a request waits for its verdict."""
_MAX_LOOKS_PER_S = 4000
"""Looks into the store by the watchers of all ranks together, while no request waits for its verdict."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause of a watcher between looks while the store does not answer."""
_LOST = (
    "the store of the process group does not answer (%s). Until it does, no signal, deadline or request stops "
    "training, and only what the save policies ask for is saved"
)
_JOIN_S = 5.0
_REQUEST, _VERDICT = "request", "verdict"
_ENDED = "ended:"
"""Begins a verdict that names ranks whose processes have ended before they reported: nobody can agree on a stop."""
_REQUESTED, _DEADLINE = "requested", "deadline"
"""Reasons of stops for which nobody gave another one."""


class StopRequests:
    """Requests to stop that this process has received. A signal handler sets a flag. It calls the handler that was
    installed before only if that is one of another manager, or if it may not set the flag: in a forked process, or
    after `close`.
    """

    def __init__(self, signals: Sequence[str], *, deadlines: Sequence[float], needed_s: Callable[[], float]) -> None:
        """Each of the `deadlines` is the time, by `time.time`, at which the last save has to be durable; `needed_s`
        returns the seconds that one more step and its save take. Off the main thread, warns that it handles no signal.
        """
        self._pid = os.getpid()
        self._reason = ""
        self._deadlines = [(time.time, at, _DEADLINE) for at in deadlines]
        """The clock and the time by it, and the reason of the stop. A clock that is set moves no time from now."""
        self._needed_s = needed_s
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._is_closed = False
        if signals and threading.current_thread() is not threading.main_thread():
            logger.warning(
                "stops cannot be requested by %s, because only the main thread can handle signals: train there, or "
                "request them by a call, such as request_stop of the manager",
                ", ".join(signals),
            )
            return
        for number in dict.fromkeys(signal.Signals[name] for name in signals):  # one may have several names
            self._old_handlers[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        old = self._handler_before(signal.Signals(number))
        is_other_manager = isinstance(getattr(old, "__self__", None), StopRequests)
        # A forked worker of a data loader inherits the handler, and must not stop anything but itself.
        if os.getpid() == self._pid and not self._is_closed:
            self._reason = self._reason or signal.Signals(number).name
            if not is_other_manager:
                return
        if callable(old):
            old(number, frame)
        elif old != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def request(self, reason: str, *, deadline_s: float | None) -> None:
        """Requests a stop now, or so that the last save is durable before `deadline_s` seconds from now have passed."""
        if deadline_s is None:
            self._reason = self._reason or reason or _REQUESTED
        else:
            at = time.monotonic() + float(deadline_s)  # in single precision minutes are lost
            self._deadlines.append((time.monotonic, at, reason or _DEADLINE))

    @property
    def reason(self) -> str:
        """The reason why this rank is to stop; empty until it is to stop, and the same from then on."""
        if not self._reason and self._deadlines:
            left_s, reason = min((at - now(), reason) for now, at, reason in self._deadlines)
            if left_s <= self._needed_s():
                self._reason = reason
        return self._reason

    def close(self) -> None:
        """Puts the old signal handlers back, if called on the main thread. A handler that was installed since stays,
        and may still call the one of this object, which from now on does what the old one did.
        """
        self._is_closed = True
        for number in self._old_handlers:
            old = self._handler_before(number)
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and signal.getsignal(number) == self._handle:
                signal.signal(number, old if old is not None else signal.SIG_DFL)

    def _handler_before(self, number: signal.Signals) -> Any:
        """Returns the handler that was installed before, without those of managers that have closed since."""
        old = self._old_handlers.get(number)
        while isinstance(owner := getattr(old, "__self__", None), StopRequests) and owner._is_closed:
            old = owner._old_handlers.get(number)
        return old


class SoleStop:
    """The stop of a process on its own, which has no other ranks to agree with."""

    def __init__(self, requests: StopRequests) -> None:
        self._requests = requests
        self.reason = ""

    def pass_boundary(self) -> bool:
        """Returns True if training is to stop: from the first time on, for good."""
        self.reason = self.reason or self._requests.reason
        return bool(self.reason)

    def close(self) -> None:
        """Does nothing."""


class GroupStop:
    """The agreement of the ranks of a group."""

    def __init__(
        self,
        requests: StopRequests,
        store: Store,
        *,
        token: str,
        rank: int,
        global_ranks: Sequence[int],
        timeout_s: float,
        find_ended: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """`token` is the same on all ranks of this manager, and on no other's. Ranks are positions in `global_ranks`;
        errors name the numbers there. `find_ended` returns the ranks whose processes have ended, of those that this one
        watches.
        """
        self.reason = ""
        self._requests = requests
        self._store = PrefixStore(f"bytecheckpoint/stop/{token}", store)
        self._rank = rank
        self._global_ranks = global_ranks
        self._num_ranks = len(global_ranks)
        self._timeout_s = timeout_s
        self._find_ended = find_ended
        self._ended: list[int] = []
        """Ranks that will never report, by the verdict."""
        self._changed = threading.Condition()
        self._num_passed = 0
        self._has_reported = self._is_report_written = False
        self._verdict: int | None = None
        self._is_closed = threading.Event()
        # A thread of its own: it lives as long as the manager, and `close` joins it.
        self._watcher = threading.Thread(target=self._watch, name="bcp-stop", daemon=True)
        self._watcher.start()

    def pass_boundary(self) -> bool:
        """Returns True if training is to stop, from the same boundary on for all ranks.

        Raises CheckpointError (rank_missing), which names the ranks, if a stop was requested and some have ended before
        they reported, or do not report within `timeout_s`, for which this call may wait.
        """
        with self._changed:
            if self._has_reported and self._verdict is None:
                self._changed.wait_for(lambda: self._verdict is not None or self._ended, self._timeout_s)
                if self._verdict is None:
                    raise self._missing_error()
            self._num_passed += 1
            return self._verdict is not None and self._num_passed > self._verdict

    def _missing_error(self) -> CheckpointError:
        with suppress(RuntimeError):
            silent = self._ended or [rank for rank in range(self._num_ranks) if not self._has_report_of(rank)]
            absent = tuple(self._global_ranks[rank] for rank in silent or (0,))
            why = "its process has ended" if self._ended else f"dead or stopped for {self._timeout_s:g} s"
            return CheckpointError(
                f"a stop was requested ({self.reason}), and {shown_ranks(absent)} did not report at which step it is: "
                f"{why}. What was saved before still loads: look at its log, and start the job again",
                kind="rank_missing",
                ranks=absent,
            )
        coordinator = (self._global_ranks[0],)
        return CheckpointError("the store of the process group is gone", kind="rank_missing", ranks=coordinator)

    def _watch(self) -> None:
        """Advances the agreement until the verdict is known, or the manager is closed."""
        shortest_s = max(_POLL_S, self._num_ranks / _MAX_LOOKS_PER_S)
        pause_s, is_lost = shortest_s, False
        while not self._is_closed.wait(_PENDING_POLL_S if self._has_reported and not is_lost else pause_s):
            try:
                is_decided = self._advance()
            except RuntimeError as error:  # raised by torch's store
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                if not is_lost:
                    logger.warning(_LOST, error)
                is_lost = True
            else:
                if is_lost:
                    logger.warning("the store of the process group answers again: requests to stop are agreed on")
                if is_decided:
                    return
                pause_s, is_lost = shortest_s, False

    def _advance(self) -> bool:
        """Does what the agreement needs next; returns True when the verdict is known."""
        reason = self._requests.reason
        if reason and not self._store.check([_REQUEST]):
            self._store.compare_set(_REQUEST, "", reason)
        if not self._store.check([_REQUEST]):
            return False
        self._report()
        if self._rank == 0 and not self._store.check([_VERDICT]):
            keys = [_num_passed_key(rank) for rank in range(self._num_ranks)]
            if self._store.check(keys):
                self._store.compare_set(_VERDICT, "", str(max(int(self._store.get(key)) for key in keys)))
        if not self._store.check([_VERDICT]):
            # Rank 0 gives the verdict, so that its own report is not enough.
            ended = [rank for rank in self._find_ended() if rank == 0 or not self._has_report_of(rank)]
            if not ended:
                return False
            self._store.compare_set(_VERDICT, "", _ENDED + ",".join(map(str, ended)))
        verdict = bytes(self._store.get(_VERDICT)).decode()
        with self._changed:
            if verdict.startswith(_ENDED):
                self._ended = [*map(int, verdict.removeprefix(_ENDED).split(","))]
            else:
                self._verdict = int(verdict)
            self._changed.notify_all()
        return True

    def _has_report_of(self, rank: int) -> bool:
        return bool(self._store.check([_num_passed_key(rank)]))

    def _report(self) -> None:
        """Reports once how many boundaries this rank has passed. Its next one then waits for the verdict."""
        if self._is_report_written:
            return
        self.reason = bytes(self._store.get(_REQUEST)).decode()
        with self._changed:
            self._has_reported = True
            num_passed = self._num_passed
        self._store.set(_num_passed_key(self._rank), str(num_passed))
        self._is_report_written = True

    def close(self) -> None:
        """Ends the watcher, and reports how many boundaries this rank has passed: no other rank waits for it."""
        self._is_closed.set()
        self._watcher.join(_JOIN_S)
        if self._watcher.is_alive():
            return  # the store does not answer
        with suppress(RuntimeError):
            if not self._is_report_written:
                self._store.set(_num_passed_key(self._rank), str(self._num_passed))
            if self._rank == 0:  # no rank passes more boundaries than this one has, so none stops
                self._store.compare_set(_VERDICT, "", str(self._num_passed))


def rank_in(process_group: dist.ProcessGroup | None) -> int:
    """Returns the rank of this process in the group, by default of all; 0 for a process on its own. Raises like
    check_group.
    """
    check_group(process_group)
    return dist.get_rank(process_group) if _is_grouped(process_group) else 0


def size_of(process_group: dist.ProcessGroup | None) -> int:
    """Returns the number of ranks in the group, by default of all; 1 for a process on its own."""
    return dist.get_world_size(process_group) if _is_grouped(process_group) else 1


def _is_grouped(process_group: dist.ProcessGroup | None) -> bool:
    return process_group is not None or (dist.is_available() and dist.is_initialized())


def join_stop(
    requests: StopRequests, process_group: dist.ProcessGroup | None, *, token: str, timeout_s: float
) -> SoleStop | GroupStop:
    """Returns the agreement of the ranks of a group, by default of all ranks; a SoleStop for a process on its own, or
    for a group of one rank. `token` is the same on all ranks, and another for each agreement; `timeout_s` limits the
    wait of `pass_boundary`. Closes `requests` if it raises.
    """
    try:
        return SoleStop(requests) if size_of(process_group) == 1 else _join(requests, process_group, token, timeout_s)
    except BaseException:
        requests.close()  # else the process would go on without an end, and ignore the signals
        raise


def _join(requests: StopRequests, process_group: dist.ProcessGroup | None, token: str, timeout_s: float) -> GroupStop:
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is of type {type(group).__name__}: pass a ProcessGroup that has this rank, or None for the "
            "default one"
        )
    return GroupStop(
        requests,
        group_store(group),
        token=token,
        rank=dist.get_rank(group),
        global_ranks=dist.get_process_group_ranks(group),
        timeout_s=timeout_s,
        find_ended=group_peers()(group).watch.ended_of_watched,
    )


def _num_passed_key(rank: int) -> str:
    return f"passed/{rank}"


def check_deadline(deadline_s: float | None) -> None:
    """Raises ValueError unless it is None or a finite number of seconds, at least 0; numpy's are accepted."""
    seconds = plain_number(deadline_s)
    if deadline_s is not None and (seconds is None or not math.isfinite(seconds) or seconds < 0):
        raise ValueError(f"deadline_s takes a number of seconds from now, at least 0, or None, not {deadline_s!r}")
