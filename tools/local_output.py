"""Files that a command writes for people, on this machine."""

from __future__ import annotations

from pathlib import Path

from bytecheckpoint.storage.os_errors import describe, write_error


def write_text(path: str, text: str) -> None:
    """Writes a file, in place of one that stands there. Raises what a store raises where it cannot be written."""
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        num_bytes = len(text.encode())
        raise write_error(error, path, reason=describe(error), needed_bytes=num_bytes, free_bytes=None) from error
