"""Everything that can be tuned about a save or a load. Every default stands here, once."""

from __future__ import annotations

from dataclasses import dataclass

_MiB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How to save. Checked on creation: a ValueError names the field, what it got and what it takes."""

    overwrite: bool = False
    """Replace a committed checkpoint at the same place, in one atomic step, instead of refusing."""
    max_file_bytes: int = 8 << 30
    """Start another data file when one would grow beyond this; a larger chunk gets a file of its own. In bytes."""
    writer_threads: int = 2
    """Writes in flight per rank, to a local folder; to a URL a file is one stream."""
    timeout_s: float = 600.0
    """How long a rank that has done its part waits for the others before it raises `rank_missing`. In seconds."""

    def __post_init__(self) -> None:
        _check_bool("SaveOptions", "overwrite", self.overwrite)
        _check_at_least("SaveOptions", "max_file_bytes", self.max_file_bytes, _MiB)
        _check_at_least("SaveOptions", "writer_threads", self.writer_threads, 1)
        _check_positive("SaveOptions", "timeout_s", self.timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How to load. Checked on creation: a ValueError names the field, what it got and what it takes."""

    verify: bool = True
    """Compare the checksum of every byte that is used; a difference raises CheckpointCorruptError."""
    reader_threads: int = 4
    """Reads in flight per rank."""
    max_gap_bytes: int = 256 << 10
    """Two wanted ranges of a file this close are read as one, the bytes between them thrown away. In bytes."""
    scratch_bytes: int = 64 * _MiB
    """Host memory for what cannot be read straight into its target, per rank. In bytes."""
    timeout_s: float = 600.0
    """How long a rank that has done its part waits for the others before it raises `rank_missing`. In seconds."""

    def __post_init__(self) -> None:
        _check_bool("LoadOptions", "verify", self.verify)
        _check_at_least("LoadOptions", "reader_threads", self.reader_threads, 1)
        _check_at_least("LoadOptions", "max_gap_bytes", self.max_gap_bytes, 0)
        _check_at_least("LoadOptions", "scratch_bytes", self.scratch_bytes, 8 * _MiB)
        _check_positive("LoadOptions", "timeout_s", self.timeout_s)


def _check_bool(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{owner}.{name} takes True or False, not {value!r}")


def _check_at_least(owner: str, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}.{name} takes an integer of at least {least}, not {value!r}")


def _check_positive(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{owner}.{name} takes a number of seconds above 0, not {value!r}")
