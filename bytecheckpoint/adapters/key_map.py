"""Renaming of a checkpoint's names to those of the state, and the globs of include and exclude; which rules and globs
have matched nothing; and the names below others. It knows no checkpoint.
"""

from __future__ import annotations

import glob
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import translate
from functools import cached_property, partial
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointMismatchError

KeyMap = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str]
"""From checkpoint FQN to state FQN: names, rules for re.sub, or a function."""


class UnusedRule(NamedTuple):
    """A glob or a rule that matches nothing."""

    option: str
    rule: str

    def __str__(self) -> str:
        return f"{self.option} {self.rule if self.option == 'key_map' else repr(self.rule)}"


class Renamer:
    """Renames checkpoint FQNs to state FQNs, and knows which rules of the key_map have matched nothing so far."""

    def __init__(
        self,
        key_map: KeyMap | None,
        below: str,
        beside: Collection[str] = (),
        plain: Mapping[str, str] | None = None,
    ) -> None:
        """`below` and a dot are put before every name that key_map gives, except for names at or below those in
        `beside`. Then `plain` maps some of the resulting names to other ones.

        Raises CheckpointMismatchError (conflict) for a value that is not a key_map; a call of the Renamer raises it for
        a rule that `re.sub` does not take, and for a function that returns no str.
        """
        self.unused: dict[str | tuple[str, str], None] = {}
        """Rules that have matched nothing so far: keys of a dict, or pairs of a list. All values are None."""
        self._prefix = f"{below}." if below else ""
        self._beside = frozenset(beside)
        self._beside_prefixes = tuple(f"{name}." for name in beside)
        self._plain = plain or {}
        self._rename = self._renaming(key_map)

    def __call__(self, fqn: str) -> str:
        name = self._rename(fqn)
        if self._prefix and name not in self._beside and not name.startswith(self._beside_prefixes):
            name = f"{self._prefix}{name}" if name else self._prefix[:-1]
        return self._plain.get(name, name)

    def _renaming(self, key_map: KeyMap | None) -> Callable[[str], str]:
        if key_map is None:
            return lambda fqn: fqn
        if callable(key_map):
            return partial(_by_function, key_map)
        if isinstance(key_map, Mapping):
            names = dict(map(_pair, key_map.items()))
            self.unused = dict.fromkeys(names)
            return partial(self._by_name, names)
        pairs = [_pair(rule) for rule in _rules(key_map)]
        self.unused = dict.fromkeys(pairs)
        return partial(self._by_patterns, pairs)

    def _by_name(self, names: Mapping[str, str], fqn: str) -> str:
        if fqn in names:
            self.unused.pop(fqn, None)
        return names.get(fqn, fqn)

    def _by_patterns(self, pairs: Sequence[tuple[str, str]], fqn: str) -> str:
        for pair in pairs:
            fqn, num_found = _substitute(*pair, fqn)
            if num_found:
                self.unused.pop(pair, None)
        return fqn


def _by_function(key_map: Callable[[str], object], fqn: str) -> str:
    name = key_map(fqn)
    if not isinstance(name, str):
        raise _no_key_map(f"and this function gives {name!r:.200} for {fqn!r}: leave names out with exclude")
    return name


def _rules(key_map: object) -> Iterable[object]:
    if isinstance(key_map, str) or not isinstance(key_map, Iterable):
        raise _no_key_map(f"not {key_map!r:.200}")
    return key_map


def _pair(rule: object) -> tuple[str, str]:
    """Returns both strings of a rule, FQNs or pattern and replacement. Raises CheckpointMismatchError (conflict)."""
    if isinstance(rule, tuple | list) and len(rule) == 2:
        first, second = rule
        if isinstance(first, str) and isinstance(second, str):
            return first, second
    raise _no_key_map(f"not {rule!r:.200}")


def _no_key_map(what: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        "key_map takes a dict from checkpoint FQN to state FQN, a list of pairs (pattern, replacement) for re.sub, or "
        f"a function from FQN to FQN, {what}; nothing was loaded",
        kind="conflict",
    )


def _substitute(pattern: str, replacement: str, fqn: str) -> tuple[str, int]:
    try:
        return re.subn(pattern, replacement, fqn)
    except (re.error, IndexError) as error:
        raise CheckpointMismatchError(
            f"the key_map rule {(pattern, replacement)!r} is not a pattern and replacement for re.sub: {error}; "
            "nothing was loaded",
            kind="conflict",
        ) from error


def renamed_alike(name: str, fqn: str, other: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"key_map gives {name} to both {fqn} and {other}; nothing was loaded. Make the new names differ, or leave one "
        "out with exclude",
        kind="conflict",
    )


class SortedNames:
    """Names among which those below an FQN are found without a look at all of them; sorted when first needed."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self._names)}

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._positions)

    def below(self, fqn: str) -> list[str]:
        """Returns the names that begin with this FQN and a dot, as ordered when given."""
        # "/" follows "." in the order of characters.
        first, end = bisect_left(self._sorted, f"{fqn}."), bisect_left(self._sorted, f"{fqn}/")
        return sorted(self._sorted[first:end], key=self._positions.__getitem__)


class Globs:
    """Globs, with a note of those that have matched no name so far. Each name is judged once: there may be thousands of
    globs, which are names of tensors mostly.
    """

    def __init__(self, globs: Sequence[str]) -> None:
        self.unused = dict.fromkeys(globs)
        self._names = {each for each in self.unused if glob.escape(each) == each}
        self._patterns = {each: re.compile(translate(each)).match for each in globs if each not in self._names}
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._names or self._patterns)

    def match(self, fqn: str) -> bool:
        """Returns True if any glob matches, and notes every glob that does."""
        if fqn not in self._known:
            found = [fqn] if fqn in self._names else []
            found += [each for each, matches in self._patterns.items() if matches(fqn)]
            for each in found:
                self.unused.pop(each, None)
            self._known[fqn] = bool(found)
        return self._known[fqn]


def listed_globs(option: str, globs: object) -> Sequence[str] | None:
    """Returns one glob or several as a list, None for None. Raises CheckpointMismatchError (conflict) for others."""
    if globs is None:
        return None
    given = [globs] if isinstance(globs, str) or not isinstance(globs, Iterable) else list(globs)
    listed = [glob for glob in given if isinstance(glob, str)]
    if len(listed) < len(given):
        odd = next(glob for glob in given if not isinstance(glob, str))
        raise CheckpointMismatchError(
            f"{option} takes a glob of FQNs, or a list of them, not {odd!r:.200}; nothing was changed", kind="conflict"
        )
    return listed
