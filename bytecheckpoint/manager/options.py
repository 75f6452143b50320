"""Options of a CheckpointManager, with their defaults."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

from bytecheckpoint.manager.keep_policies import KeepPolicy
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.runtime.integers import integer_of

_UNCATCHABLE = {"SIGKILL", "SIGSTOP"}
_SAVE_EXAMPLE = "such as bcp.save_policies.EverySteps(500)"
_KEEP_EXAMPLE = "such as bcp.keep_policies.Latest(3)"


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
    """`raise` raises the error of a failed save in the call itself, or in the next one that waits for the save: a due
    `save`, `restore`, `restore_data`, `should_stop` at a stop, `wait` or `close`. `warn` logs it and goes on, until
    `max_failed_saves` to storage have failed in a row. Saves to storage raise all the same for wrong arguments, a
    checkpoint that is there already, and a root that another manager owns."""
    max_failed_saves: int = 3
    """With `on_failed_save="warn"`, failed saves to storage in a row of which the last one raises."""
    walk_back: bool = False
    """Let `restore` take the newest earlier checkpoint that loads if the newest one is damaged or misses files. It
    always does where it looks at memory."""
    signals: Sequence[str] = ("SIGTERM",)
    """Names of the signals that request a stop. Stored as a tuple."""
    read_only: bool = False
    """Claim nothing and write nothing: `save` returns None, and calls that would write raise StorageError."""
    on_save: Callable[[Any], object] | None = None
    """Called on rank 0 with the ManagerStats after each commit, in the background. Until it returns, records,
    copies and deletions that follow wait, as do `wait` and `close`. Its errors are logged."""

    def __post_init__(self) -> None:
        for name in ("async_save", "walk_back", "read_only"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        _check("save", self.save, isinstance(self.save, SaveOptions), "SaveOptions")
        _check("load", self.load, isinstance(self.load, LoadOptions), "LoadOptions")
        is_path = isinstance(self.cool_down, str | os.PathLike) and os.fspath(self.cool_down) not in {"", b""}
        _check("cool_down", self.cool_down, self.cool_down is None or is_path, "a path, a URL or None")
        if self.cool_down_keep is not None:
            takes = f"a keep policy, {_KEEP_EXAMPLE}, or None"
            _check("cool_down_keep", self.cool_down_keep, is_policy(self.cool_down_keep, "keeps"), takes)
        is_mapping = self.cool_down_options is None or isinstance(self.cool_down_options, Mapping)
        _check("cool_down_options", self.cool_down_options, is_mapping, "a mapping or None")
        _check("on_failed_save", self.on_failed_save, self.on_failed_save in ("raise", "warn"), "'raise' or 'warn'")
        is_count = (integer_of(self.max_failed_saves) or 0) >= 1
        _check("max_failed_saves", self.max_failed_saves, is_count, "an integer of at least 1")
        object.__setattr__(self, "max_failed_saves", index(self.max_failed_saves))
        _check(
            "signals",
            self.signals,
            _are_catchable_signals(self.signals),
            "a tuple of names of signals that can be caught, such as 'SIGTERM' and 'SIGUSR1'",
        )
        object.__setattr__(self, "signals", tuple(self.signals))
        _check("on_save", self.on_save, self.on_save is None or callable(self.on_save), "a function or None")


def checked_options(options: object) -> ManagerOptions:
    """Returns the options, or the defaults for None. Raises TypeError for anything else."""
    if options is not None and not isinstance(options, ManagerOptions):
        raise TypeError(
            f"options takes ManagerOptions, not {options!r:.100}: those of saves and loads go into "
            "ManagerOptions(save=..., load=...)"
        )
    return options or ManagerOptions()


def check_policies(*, save: object, keep: object) -> None:
    """Raises TypeError, which says what to pass, unless these are a save policy and a keep policy."""
    if not is_policy(save, "due"):
        raise TypeError(_wrong_policy("save", save, f"a save policy, {_SAVE_EXAMPLE}", other="keep", method="keeps"))
    if not is_policy(keep, "keeps"):
        raise TypeError(_wrong_policy("keep", keep, f"a keep policy, {_KEEP_EXAMPLE}", other="save", method="due"))


def _wrong_policy(name: str, value: object, takes: str, *, other: str, method: str) -> str:
    advice = ""
    if is_policy(value, method):
        advice = f": this one decides what to {other}, so pass it as {other}="
    elif isinstance(value, type):
        advice = ": this is the class; call it"
    return f"{name} takes {takes}, not {value!r:.100}{advice}"


def is_policy(value: object, method: str) -> bool:
    """Returns True for an object with this method, False for its class."""
    return not isinstance(value, type) and callable(getattr(value, method, None))


def _check(name: str, value: object, is_valid: bool, takes: str) -> None:  # noqa: FBT001 - the outcome of a check
    if not is_valid:
        raise ValueError(f"ManagerOptions.{name} takes {takes}, not {value!r:.100}")


def _are_catchable_signals(names: object) -> bool:
    if not isinstance(names, list | tuple | set | frozenset):
        return False
    return all(isinstance(name, str) and name in signal.Signals.__members__ for name in names) and not (
        _UNCATCHABLE & set(names)
    )
