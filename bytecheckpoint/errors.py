"""The error tree. Every failure of this library is one of these classes with a stable `kind`, so that callers can
react to what happened without reading messages; it knows nothing of how the failures come about.

    CheckpointError
    ├── CheckpointNotFoundError   (FileNotFoundError)   not_found, not_committed, missing_file,
    │                                                   replaced
    ├── CheckpointExistsError     (FileExistsError)     exists
    ├── CheckpointCorruptError    (ValueError)          checksum, truncated, bad_manifest, unsupported_version,
    │                                                   missing_file
    ├── CheckpointMismatchError   (ValueError)          missing_key, unexpected_key, shape, dtype, coverage, conflict
    ├── CheckpointSaveError       (RuntimeError)        no_space, storage, rank_failed, rank_missing, unsupported_value,
    │                                                   superseded, not_finite
    ├── StorageError              (OSError)             permission, unavailable, unsupported
    └── UnsafeCheckpointError     (ValueError)          pickle_refused, path_escape, limits_exceeded
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_WHOLE_FROM = 100
"""Rates from this many MB/s on are shown without decimals: three digits are enough."""
_SHOWN_BYTES = 50_000
"""Fewer would be shown as 0.0 MB."""


class CheckpointError(Exception):
    """The root of the tree. A message says what happened, what is still safe and what to do.

    Raised itself only by loads, by calls of a CheckpointManager and by integrations, with the kinds `rank_failed` (a
    rank raised something that is no CheckpointError), `rank_missing` (a rank did not answer in time) and
    `unsupported_value` (in the capture of a CUDA graph).
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        path: str | None = None,
        step: int | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        self.message = _printable(message)
        super().__init__(self.message)
        self.kind = kind
        """One stable word, listed beside the class above."""
        self.path = path
        """The checkpoint that the call was about, as the user named it."""
        self.step = step
        """The step of that checkpoint, or None."""
        self.ranks = ranks
        """Global numbers of the ranks that failed or disagree; empty if unknown."""

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = functools.partial(type(self), kind=self.kind, path=self.path, step=self.step, ranks=self.ranks)
        return rebuild, (self.message,)


def _printable(message: str) -> str:
    """Escapes control characters except newlines: names in a message come from checkpoints and paths, and could drive a
    terminal.
    """
    if message.isprintable():
        return message
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in message)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint where one was asked for, a file of it is gone, or it was replaced meanwhile."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint exists where another was to be saved, or where a path would then mean two checkpoints."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """Bytes differ from those that were written, or cannot be understood. Only `bcp.resume` raises it with the kind
    `missing_file`: memory and storage hold parts of saves, and no save is whole.
    """


class CheckpointMismatchError(CheckpointError, ValueError):
    """State and checkpoint, or the states of two ranks, do not fit each other."""


class CheckpointSaveError(CheckpointError, RuntimeError):
    """A save failed; nothing was committed unless the message says so."""


class StorageError(CheckpointError, OSError):
    """A store refused or could not be reached."""


class UnsafeCheckpointError(CheckpointError, ValueError):
    """A checkpoint asks for something that loading must not do."""


ERROR_CLASSES: dict[str, type[CheckpointError]] = {
    error.__name__: error
    for error in (
        CheckpointError,
        CheckpointNotFoundError,
        CheckpointExistsError,
        CheckpointCorruptError,
        CheckpointMismatchError,
        CheckpointSaveError,
        StorageError,
        UnsafeCheckpointError,
    )
}
"""Error classes by name, for a failure that is sent from one rank to another."""


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, its causes and contexts, and theirs; each once, also where an error is its own cause."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += each.__context__, each.__cause__


def and_more(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Returns the first `limit` items and how many follow: `a, b and 3 more`. With another separator, such as one that
    begins a line, `and 3 more` is an item of its own.
    """
    before = " " if separator == ", " else separator
    return separator.join(items[:limit]) + rest_text(len(items), limit, before)


def rest_text(num_items: int, num_shown: int, before: str = "") -> str:
    """Returns `and 1,203 more` with `before` in front of it, or nothing where all items are shown."""
    return f"{before}and {num_items - num_shown:,} more" if num_items > num_shown else ""


class TransferProgress(NamedTuple):
    """Progress of a transfer when it was given up."""

    done_bytes: int
    num_bytes: int
    """Length of the whole transfer."""
    seconds: float


def describe_progress(progress: TransferProgress) -> str:
    """Returns `64.0 of 1,500.0 MB were there after 310.0 s, 0.206 MB/s, at which the rest takes 6,955.6 s`;
    `none of 1,500.0 MB was there after 310.0 s` if nothing was done; empty if the transfer was complete or is of less
    than 50,000 bytes in all.
    """
    done, total = f"{progress.done_bytes / 1e6:,.1f}", f"{progress.num_bytes / 1e6:,.1f} MB"
    if progress.done_bytes >= progress.num_bytes or progress.num_bytes < _SHOWN_BYTES:
        return ""
    if not progress.done_bytes or not progress.seconds:
        return f"none of {total} was there after {progress.seconds:,.1f} s"
    left_s = (progress.num_bytes - progress.done_bytes) * progress.seconds / progress.done_bytes
    rate = f"{describe_rate(progress.done_bytes, progress.seconds)}, at which the rest takes {left_s:,.1f} s"
    return f"{done} of {total} were there after {progress.seconds:,.1f} s, {rate}"


def describe_rate(num_bytes: int, seconds: float) -> str:
    """Returns a rate such as `0.206 MB/s`."""
    rate = num_bytes / 1e6 / seconds
    return f"{rate:,.0f} MB/s" if rate >= _WHOLE_FROM else f"{rate:.3g} MB/s"
