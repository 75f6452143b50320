"""Encodes errors as messages from one rank to another, and merges those of several ranks. It sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bytecheckpoint.errors import ERROR_CLASSES, CheckpointError


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


def no_thread(error: RuntimeError, use: str) -> CheckpointError:
    """Returns the error (rank_failed) for lack of a thread; `use` says what takes threads, and what to do."""
    return CheckpointError(f"the process can have no more threads ({error}), of which {use}", kind="rank_failed")


def shown_ranks(global_ranks: Sequence[int]) -> str:
    """Returns the ranks as errors name them, such as `ranks [0, 3]`."""
    return f"rank {global_ranks[0]}" if len(global_ranks) == 1 else f"ranks {list(global_ranks)}"
