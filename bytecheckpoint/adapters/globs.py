"""The globs of include and exclude, and which of them have matched nothing. It knows no checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from bytecheckpoint.errors import CheckpointMismatchError


class Globs:
    """Some globs, and those of them that no name has matched so far."""

    def __init__(self, globs: Sequence[str]) -> None:
        self._globs = list(globs)
        self.unused = dict.fromkeys(self._globs)

    def __bool__(self) -> bool:
        return bool(self._globs)

    def match(self, fqn: str) -> bool:
        """Whether any of them matches."""
        for glob in [glob for glob in self.unused if fnmatchcase(fqn, glob)]:
            del self.unused[glob]
        return any(fnmatchcase(fqn, glob) for glob in self._globs)


def listed_globs(option: str, globs: object) -> Sequence[str] | None:
    """One glob or several, as a list. Raises CheckpointMismatchError (conflict) for what is neither."""
    if globs is None:
        return None
    given = [globs] if isinstance(globs, str) or not isinstance(globs, Iterable) else list(globs)
    listed = [glob for glob in given if isinstance(glob, str)]
    if len(listed) < len(given):
        odd = next(glob for glob in given if not isinstance(glob, str))
        raise CheckpointMismatchError(
            f"{option} takes a glob of FQNs, or a list of them, not {odd!r}; nothing was changed", kind="conflict"
        )
    return listed
