"""The errors of other ranks: as messages in the store of a call, and merged where several ranks have failed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch._C._distributed_c10d import Store

from bytecheckpoint.distributed.departures import HAS_FAILURE, NUM_FAILURES, failure_key
from bytecheckpoint.distributed.store_values import get_message, put_message
from bytecheckpoint.distributed.waiting import CallStore
from bytecheckpoint.errors import ERROR_CLASSES, CheckpointError

FAILURE = b"-"
"""First byte of a message that holds an error."""


class RankFailedError(Exception):
    """Another rank failed. Carries the error for all ranks to raise; the coordinator must first pass it to `fail`."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


class _Failure(msgspec.Struct, frozen=True):
    """The wire format of an error."""

    cls: str
    message: str
    kind: str
    path: str | None
    step: int | None
    ranks: tuple[int, ...]


def merge_errors(errors: Sequence[CheckpointError]) -> CheckpointError:
    """Returns one error for several ranks that failed: the first error, with the ranks of all errors named.

    Errors about missing ranks are left out, because a rank that failed may be the missing one. If all errors are about
    missing ranks, only the first counts.
    """
    errors = [error for error in errors if error.kind != "rank_missing"] or errors[:1]
    ranks = tuple(sorted({rank for error in errors for rank in error.ranks}))
    first = errors[0]
    others = f" ({len(errors)} ranks failed: {list(ranks)}; this is the first)" if len(errors) > 1 else ""
    return type(first)(first.message + others, kind=first.kind, path=first.path, step=first.step, ranks=ranks)


def encode_failure(error: CheckpointError) -> bytes:
    """Returns the error as bytes, without the first byte of a message, which `decode_failure` skips."""
    failure = _Failure(type(error).__name__, str(error), error.kind, error.path, error.step, error.ranks)
    return msgspec.msgpack.encode(failure)


def decode_failure(message: bytes) -> CheckpointError:
    """Returns the error that a message holds after its first byte."""
    failure = msgspec.msgpack.decode(message[1:], type=_Failure)
    cls = ERROR_CLASSES[failure.cls]
    return cls(failure.message, kind=failure.kind, path=failure.path, step=failure.step, ranks=failure.ranks)


def put_failure(store: Store, error: CheckpointError) -> None:
    """Puts the error of a rank other than the coordinator into the store of a call."""
    put_message(store, failure_key(store.add(NUM_FAILURES, 1)), FAILURE + encode_failure(error))
    put_message(store, HAS_FAILURE, b"")


def put_failures(call: CallStore) -> list[CheckpointError]:
    """Returns the errors that ranks have put into the store of a call."""
    keys = map(failure_key, range(1, call.store.add(NUM_FAILURES, 0) + 1))
    return [decode_failure(get_message(call.store, key)) for key in keys if call.is_set(key)]


def no_thread(error: RuntimeError, use: str) -> CheckpointError:
    """Returns the error (rank_failed) for lack of a thread; `use` says what takes threads, and what to do."""
    return CheckpointError(f"the process can have no more threads ({error}), of which {use}", kind="rank_failed")


def shown_ranks(global_ranks: Sequence[int]) -> str:
    """Returns the ranks as errors name them, such as `ranks [0, 3]`."""
    return f"rank {global_ranks[0]}" if len(global_ranks) == 1 else f"ranks {list(global_ranks)}"
