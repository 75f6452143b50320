"""Arguments of each command for one checkpoint."""

from __future__ import annotations

import uuid


def paths_of(command: str, path: object) -> list[object]:
    """Returns the arguments of a command for this path: `diff` gets it twice, `convert` gets a new target."""
    match command:
        case "diff":
            return [path, path]
        case "convert":
            return [path, f"memory://converted/{uuid.uuid4().hex}", "--to", "hf"]
        case "keep":
            return [path, "--latest", "1"]
        case "cat":
            return [path, "large[:2]"]
        case "watch":
            return [path, "--once"]
        case "rm":
            return [path, "--force"]
    return [path]
