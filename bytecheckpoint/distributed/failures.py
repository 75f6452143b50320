"""Errors as messages from one rank to another, and one error for several ranks that failed. It sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bytecheckpoint.errors import ERROR_CLASSES, CheckpointError


class _Failure(msgspec.Struct, frozen=True):
    """An error on its way to other ranks."""

    cls: str
    message: str
    kind: str
    path: str | None
    step: int | None
    ranks: tuple[int, ...]


def merge_errors(errors: Sequence[CheckpointError]) -> CheckpointError:
    """One error for several ranks that failed: the first one's, with all ranks named.

    Where some say that another one is missing, and one says what failed, that one may be why it was missed.
    """
    errors = [error for error in errors if error.kind != "rank_missing"] or errors[:1]
    ranks = tuple(sorted({rank for error in errors for rank in error.ranks}))
    first = errors[0]
    others = f" ({len(errors)} ranks failed: {list(ranks)}; this is the first)" if len(errors) > 1 else ""
    return type(first)(first.message + others, kind=first.kind, path=first.path, step=first.step, ranks=ranks)


def encode_failure(error: CheckpointError) -> bytes:
    """The error as a message."""
    failure = _Failure(type(error).__name__, str(error), error.kind, error.path, error.step, error.ranks)
    return msgspec.msgpack.encode(failure)


def decode_failure(message: bytes) -> CheckpointError:
    """The error of a message, behind its first byte."""
    failure = msgspec.msgpack.decode(message[1:], type=_Failure)
    cls = ERROR_CLASSES[failure.cls]
    return cls(failure.message, kind=failure.kind, path=failure.path, step=failure.step, ranks=failure.ranks)
