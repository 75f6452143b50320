"""How each command is called about one checkpoint."""

from __future__ import annotations

import uuid


def paths_of(command: str, path: object) -> list[object]:
    """The arguments of a command about this path: `diff` takes two, so it gets it twice; `convert` gets a new place."""
    match command:
        case "diff":
            return [path, path]
        case "convert":
            return [path, f"memory://converted/{uuid.uuid4().hex}", "--to", "hf"]
    return [path]
