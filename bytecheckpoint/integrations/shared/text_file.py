"""Text files that a framework expects beside checkpoints on a disk."""

from __future__ import annotations

from pathlib import Path

from bytecheckpoint.storage.paths import temporary_name


def write_text(target: Path, content: str) -> None:
    """Writes a file atomically, in place of any file there; its folder must exist. A process that is killed meanwhile
    leaves at most a file with a temporary name, which `bcp gc` finds.
    """
    unfinished = target.with_name(temporary_name(target.name))
    unfinished.write_text(content)
    unfinished.replace(target)
