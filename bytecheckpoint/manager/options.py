"""Options of a CheckpointManager, with their defaults."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bytecheckpoint.manager.keep_policies import KeepPolicy
from bytecheckpoint.options import LoadOptions, SaveOptions

_UNCATCHABLE = {"SIGKILL", "SIGSTOP"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerOptions:
    """Options of a CheckpointManager. Checked on creation: a ValueError names the field, its value and the values that
    it takes.
    """

    async_save: bool = True
    """Save in the background. A save before a stop is synchronous all the same."""
    save: SaveOptions = field(default_factory=SaveOptions)
    """Options of each save."""
    load: LoadOptions = field(default_factory=LoadOptions)
    """Options of `restore`."""
    cool_down: str | os.PathLike[str] | None = None
    """A second root, such as `s3://bucket/run`, to which each committed checkpoint is copied, or None."""
    cool_down_keep: KeepPolicy | None = None
    """Policy that decides which checkpoints are copied to the second root and stay there; None takes all. The newest
    copy always stays, and a checkpoint that waits for its copy is not deleted."""
    cool_down_options: Mapping[str, Any] | None = None
    """Storage options of the second root, as `storage_options` of the manager are those of its root."""
    on_failed_save: Literal["raise", "warn"] = "raise"
    """`raise` raises the error of a failed save at the next due `save`, `wait` or `close`. `warn` logs it and goes on,
    until `max_failed_saves` have failed in a row."""
    max_failed_saves: int = 3
    """With `on_failed_save="warn"`, failed saves in a row of which the last one raises."""
    walk_back: bool = False
    """Let `restore` go on to the checkpoint before if the newest is damaged or misses files."""
    signals: Sequence[str] = ("SIGTERM",)
    """Names of the signals that request a stop. Stored as a tuple."""
    read_only: bool = False
    """Claim nothing and write nothing: `save` returns None, and calls that would write raise StorageError."""
    on_save: Callable[[Any], object] | None = None
    """Called on rank 0 with the ManagerStats after each commit, on a thread of its own. Its errors are logged."""

    def __post_init__(self) -> None:
        for name in ("async_save", "walk_back", "read_only"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        _check("save", self.save, isinstance(self.save, SaveOptions), "SaveOptions")
        _check("load", self.load, isinstance(self.load, LoadOptions), "LoadOptions")
        is_place = self.cool_down is None or os.fspath(self.cool_down) != ""
        _check("cool_down", self.cool_down, is_place, "a path, a URL or None")
        is_policy = self.cool_down_keep is None or hasattr(self.cool_down_keep, "keeps")
        _check("cool_down_keep", self.cool_down_keep, is_policy, "a keep policy or None")
        is_mapping = self.cool_down_options is None or isinstance(self.cool_down_options, Mapping)
        _check("cool_down_options", self.cool_down_options, is_mapping, "a mapping or None")
        _check("on_failed_save", self.on_failed_save, self.on_failed_save in {"raise", "warn"}, "'raise' or 'warn'")
        is_count = type(self.max_failed_saves) is int and self.max_failed_saves >= 1
        _check("max_failed_saves", self.max_failed_saves, is_count, "an integer of at least 1")
        _check(
            "signals",
            self.signals,
            _are_signals(self.signals),
            "a tuple of names such as 'SIGTERM' and 'SIGUSR1'",
        )
        object.__setattr__(self, "signals", tuple(self.signals))
        _check("on_save", self.on_save, self.on_save is None or callable(self.on_save), "a function or None")


def _check(name: str, value: object, is_valid: bool, takes: str) -> None:  # noqa: FBT001 - the outcome of a check
    if not is_valid:
        raise ValueError(f"ManagerOptions.{name} takes {takes}, not {value!r}")


def _are_signals(names: object) -> bool:
    if not isinstance(names, list | tuple | set | frozenset):
        return False
    return all(name in signal.Signals.__members__ and name not in _UNCATCHABLE for name in names)
