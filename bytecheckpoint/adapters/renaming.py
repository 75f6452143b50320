"""How the names of a checkpoint become those of the state. It knows no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from bytecheckpoint.errors import CheckpointMismatchError

KeyMap = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str]
"""From checkpoint FQN to state FQN: names, rules for re.sub, or a function."""


def renamer(key_map: KeyMap | None, below: str, beside: Collection[str] = ()) -> Callable[[str], str]:
    """From checkpoint FQN to state FQN: a key_map in any of its forms, and the name below which all others stand, but
    for those at and below the names beside it.
    """
    return _lowered(_mapped(key_map), below, beside)


def _mapped(key_map: KeyMap | None) -> Callable[[str], str]:
    if key_map is None:
        return lambda fqn: fqn
    if callable(key_map):
        return key_map
    if isinstance(key_map, Mapping):
        names = dict(key_map)
        return lambda fqn: names.get(fqn, fqn)
    rules = list(key_map)

    def rename(fqn: str) -> str:
        for pattern, replacement in rules:
            fqn = _substitute(pattern, replacement, fqn)
        return fqn

    return rename


def _lowered(rename: Callable[[str], str], below: str, beside: Collection[str]) -> Callable[[str], str]:
    """The same with a name before all others; what has no name gets that one."""
    if not below:
        return rename
    prefixes = tuple(f"{name}." for name in beside)

    def lower(fqn: str) -> str:
        name = rename(fqn)
        if name in beside or name.startswith(prefixes):
            return name
        return f"{below}.{name}" if name else below

    return lower


def _substitute(pattern: str, replacement: str, fqn: str) -> str:
    try:
        return re.sub(pattern, replacement, fqn)
    except re.error as error:
        raise CheckpointMismatchError(
            f"the key_map rule {(pattern, replacement)!r} is no pattern and replacement for re.sub: {error}; nothing "
            "was loaded",
            kind="conflict",
        ) from error


def renamed_alike(name: str, fqn: str, other: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"key_map gives {name} to both {fqn} and {other}; nothing was loaded. Make the new names differ, or leave one "
        "out with exclude",
        kind="conflict",
    )
