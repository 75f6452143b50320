"""How each command is called about one checkpoint."""

from __future__ import annotations


def paths_of(command: str, path: object) -> list[object]:
    """The arguments of a command about this path: `diff` takes two, so it gets it twice."""
    return [path, path] if command == "diff" else [path]
