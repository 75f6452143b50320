"""How the ranks of one save or load agree. A phase in which one rank fails fails on all, and a rank that does not
come is named; nothing here knows what is being agreed on.

All messages travel through the key-value store of the process group, never through its collectives: a store needs no
device, can be used by the background thread of a save while the training thread runs collectives of its own, goes on
after `destroy_process_group`, and lets the coordinator see which rank is missing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from bytecheckpoint.errors import ERROR_CLASSES, CheckpointError, CheckpointSaveError

COORDINATOR = 0
"""The rank that plans and commits."""

_VERDICT_GRACE_S = 5.0
"""How much longer a rank waits for the coordinator than the coordinator for it, so that the verdict arrives."""
_FAREWELL_S = 10.0
_LONGEST_POLL_S = 0.02


class Ranks(Protocol):
    """The ranks that take part in one call, as seen by one of them."""

    rank: int
    """Within the group."""
    name: int
    """The global rank, as error messages give it."""
    num_ranks: int

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload by rank, on the coordinator; an empty list elsewhere."""

    def broadcast(self, payload: bytes) -> bytes:
        """The coordinator's payload, on every rank."""

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """The payload that the coordinator has for this rank; what others pass is ignored."""

    def fail(self, error: CheckpointError) -> CheckpointError:
        """Tells the others, and returns the error that every rank is to raise."""

    def farewell(self) -> None:
        """Ends the call: nobody leaves before all have read what they were told."""


class SoleRank:
    """A process on its own."""

    rank = COORDINATOR
    name = 0
    num_ranks = 1

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def broadcast(self, payload: bytes) -> bytes:
        return payload

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        return payloads[0]

    def fail(self, error: CheckpointError) -> CheckpointError:
        return error

    def farewell(self) -> None:
        """Nobody is waiting."""


class _Failure(msgspec.Struct, frozen=True):
    """An error on its way to other ranks."""

    cls: str
    message: str
    kind: str
    path: str | None
    step: int | None
    ranks: tuple[int, ...]


class _RankFailedError(Exception):
    """The coordinator read, in place of a rank's payload, that the rank failed; carries the error to raise."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


_PAYLOAD, _FAILURE = b"+", b"-"


class GroupRanks:
    """The ranks of a process group. Messages go up (rank to coordinator) and down, each under a numbered key."""

    def __init__(self, store: Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        self.rank = rank
        self.name = names[rank]
        self.num_ranks = len(names)
        self._store = store
        self._names = names
        """The global rank of each rank of the group."""
        self._timeout_s = timeout_s
        self._num_up = 0
        self._num_down = 0
        self._sent_down: list[str] = []

    def gather(self, payload: bytes) -> list[bytes]:
        if self.rank != COORDINATOR:
            self._send_up(_PAYLOAD + payload)
            return []
        number, self._num_up = self._num_up, self._num_up + 1
        others = range(1, self.num_ranks)
        self._wait([self._up_key(number, rank) for rank in others], others, self._timeout_s)
        messages: list[bytes] = [self._store.get(self._up_key(number, rank)) for rank in others]
        failures = [message for message in messages if message[:1] == _FAILURE]
        if failures:
            raise _RankFailedError(_merge(list(map(_decode_failure, failures))))
        for rank in others:
            self._store.delete_key(self._up_key(number, rank))
        return [payload, *(message[1:] for message in messages)]

    def broadcast(self, payload: bytes) -> bytes:
        if self.rank == COORDINATOR:
            self._send_down(_PAYLOAD + payload)
            return payload
        return self._receive_down("all")

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        if self.rank != COORDINATOR:
            return self._receive_down(str(self.rank))
        for rank in range(1, self.num_ranks):
            key = self._down_key(self._num_down, str(rank))
            self._put(key, payloads[rank])
            self._sent_down.append(key)
        self._send_down(_PAYLOAD)
        return payloads[COORDINATOR]

    def fail(self, error: CheckpointError) -> CheckpointError:
        if self.rank == COORDINATOR:
            self._send_down(_FAILURE + _encode_failure(error))
            return error
        self._send_up(_FAILURE + _encode_failure(error))
        try:
            while True:  # messages that were under way come first
                self._receive_down("all")
        except _RankFailedError as verdict:
            return verdict.error if verdict.error.kind != "rank_missing" else error
        except CheckpointError:
            return error  # the coordinator is gone as well; what is known here says more

    def farewell(self) -> None:
        """Lets the coordinator, whose process may hold the store, stay until all have read its last message."""
        if self.rank != COORDINATOR:
            self._send_up(_PAYLOAD)
            return
        keys = [self._up_key(self._num_up, rank) for rank in range(1, self.num_ranks)]
        deadline = time.monotonic() + _FAREWELL_S
        _poll(lambda: self._store.check(keys), deadline)
        for key in (*keys, *self._sent_down):
            self._store.delete_key(key)

    def _send_up(self, message: bytes) -> None:
        self._put(self._up_key(self._num_up, self.rank), message)
        self._num_up += 1

    def _send_down(self, message: bytes) -> None:
        key = self._down_key(self._num_down, "all")
        self._put(key, message)
        self._sent_down.append(key)
        self._num_down += 1

    def _put(self, key: str, message: bytes) -> None:
        self._store.set(key, message)  # type: ignore[arg-type]  # declared for str; takes and gives back bytes

    def _receive_down(self, reader: str) -> bytes:
        number = self._num_down
        key = self._down_key(number, "all")
        self._wait([key], [COORDINATOR], self._timeout_s + _VERDICT_GRACE_S)
        self._num_down += 1
        message: bytes = self._store.get(key)
        if message[:1] == _FAILURE:
            raise _RankFailedError(_decode_failure(message))
        return message[1:] if reader == "all" else bytes(self._store.get(self._down_key(number, reader)))

    def _wait(self, keys: Sequence[str], ranks: Sequence[int], timeout_s: float) -> None:
        if not keys or _poll(lambda: self._store.check(list(keys)), time.monotonic() + timeout_s):
            return
        missing = [self._names[rank] for key, rank in zip(keys, ranks, strict=True) if not self._store.check([key])]
        raise CheckpointError(
            f"{_name(missing)} did not answer within {timeout_s:g} s: dead, stuck, or did not make this call. Look at "
            "its log; raise options.timeout_s if it is only slow",
            kind="rank_missing",
            ranks=tuple(missing),
        )

    @staticmethod
    def _up_key(number: int, rank: int) -> str:
        return f"up/{number}/{rank}"

    @staticmethod
    def _down_key(number: int, reader: str) -> str:
        return f"down/{number}/{reader}"


def join_ranks(process_group: dist.ProcessGroup | None, timeout_s: float) -> Ranks:
    """The ranks of the given group, or of the default one, or this process alone where there is none.

    Must be called by every rank of the group, in the same order as other calls; whatever can fail comes later.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return SoleRank()
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # what new_group gives to those who are not in the group
        raise CheckpointError(
            "this process is not in the process_group that it passes: call save and load on its members only",
            kind="rank_missing",
        )
    rank, names = dist.get_rank(group), dist.get_process_group_ranks(group)
    if len(names) == 1:
        return SoleRank()
    store = _group_store(group)
    # Counted in the store, so that no state is kept here: the number of calls that this rank has made on the group.
    call = store.add(f"bytecheckpoint/calls/{rank}", 1)
    return GroupRanks(PrefixStore(f"bytecheckpoint/{call}", store), rank, names, timeout_s)


def _group_store(group: dist.ProcessGroup) -> Store:
    """The store under a process group. torch has no public way to it, and its collectives are not ours to use."""
    store: Store = dist.distributed_c10d._get_process_group_store(group)
    return store


@contextmanager
def together(ranks: Ranks, what: str, *, about: Subject) -> Iterator[None]:
    """A phase that every rank goes through: where it fails on one, every rank raises that error, with the rank named.

    An error that is no CheckpointError becomes one of kind `rank_failed`, chained to its cause.
    """
    try:
        yield
    except _RankFailedError as failure:
        raise (ranks.fail(failure.error) if ranks.rank == COORDINATOR else failure.error) from None
    except CheckpointError as error:
        raise ranks.fail(_located(error, ranks, about)) from error
    except Exception as error:
        raise ranks.fail(_wrapped(error, ranks, what, about)) from error


class Subject(NamedTuple):
    """What a call is about, for its errors."""

    path: str
    step: int | None
    is_save: bool
    aftermath: str = ""
    """What a failure in this phase leaves behind, as a sentence; empty where nothing has changed yet."""


_SHARED_KINDS = {"conflict", "exists", "not_found", "not_committed", "missing_key", "unexpected_key", "rank_missing"}
"""Found by looking at what all ranks said, or the same on all of them: no rank is to blame."""


def _located(error: CheckpointError, ranks: Ranks, about: Subject) -> CheckpointError:
    """The same error with what the phase knows: on which rank, and in which checkpoint."""
    cls = CheckpointSaveError if about.is_save and type(error) is CheckpointError else type(error)
    message, at = error.message, error.ranks
    if ranks.num_ranks > 1 and not at and error.kind not in _SHARED_KINDS:
        at = (ranks.name,)
        message = f"rank {ranks.name} on {socket.gethostname()}: {message}"
    step = about.step if error.step is None else error.step
    return cls(_sentences(message, about), kind=error.kind, path=error.path or about.path, step=step, ranks=at)


def _wrapped(error: Exception, ranks: Ranks, what: str, about: Subject) -> CheckpointError:
    cls = CheckpointSaveError if about.is_save else CheckpointError
    where = f" on rank {ranks.name} ({socket.gethostname()})" if ranks.num_ranks > 1 else ""
    message = f"{what} failed{where}: {type(error).__name__}: {error}"
    return cls(_sentences(message, about), kind="rank_failed", path=about.path, step=about.step, ranks=(ranks.name,))


def _sentences(message: str, about: Subject) -> str:
    return f"{message}. {about.aftermath}" if about.aftermath else message


def _merge(errors: Sequence[CheckpointError]) -> CheckpointError:
    """One error for several ranks that failed: the first one's, with all ranks named."""
    ranks = tuple(sorted({rank for error in errors for rank in error.ranks}))
    first = errors[0]
    others = f" ({len(errors)} ranks failed: {list(ranks)}; this is the first)" if len(errors) > 1 else ""
    return type(first)(first.message + others, kind=first.kind, path=first.path, step=first.step, ranks=ranks)


def _encode_failure(error: CheckpointError) -> bytes:
    failure = _Failure(type(error).__name__, str(error), error.kind, error.path, error.step, error.ranks)
    return msgspec.msgpack.encode(failure)


def _decode_failure(message: bytes) -> CheckpointError:
    failure = msgspec.msgpack.decode(message[1:], type=_Failure)
    cls = ERROR_CLASSES[failure.cls]
    return cls(failure.message, kind=failure.kind, path=failure.path, step=failure.step, ranks=failure.ranks)


def _poll(is_there: Callable[[], bool], deadline: float) -> bool:
    """Asks again and again. A blocking wait would hold the lock of the store's client against the training thread."""
    pause_s = 0.0002
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_POLL_S)
    return True


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
