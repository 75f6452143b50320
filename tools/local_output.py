"""Files that a command writes for people, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.storage.opening import at_home
from bytecheckpoint.storage.os_errors import describe


class LocalFile(click.Path):
    """A file to write: what can be refused at once is wrong usage, before anything is read for it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        value = at_home(value)
        folder = Path(value).parent
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "does not exist"
            self.fail(f"cannot write {value!r}: the folder {str(folder)!r} {what}; give another path", param, ctx)
        return super().convert(value, param, ctx)


def write_text(path: str, text: str) -> None:
    """Writes a file, in place of one that stands there. Raises CheckpointSaveError (storage) where it cannot."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointSaveError(
            f"cannot write the {len(text.encode())} bytes of {path}: {describe(error)}; the checkpoint was only read: "
            "free space there, check who may write, or give another path",
            kind="storage",
            path=path,
        ) from error
