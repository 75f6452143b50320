"""A progress bar for saves and loads, drawn by rich."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from bytecheckpoint.runtime.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_DOING = {"plan": "planning", "stage": "staging", "write": "writing", "upload": "uploading", "read": "reading"}


def progress_bar() -> Callable[[Progress], None]:
    """Returns a function for `SaveOptions.on_progress` and `LoadOptions.on_progress` that draws a bar: what is done, at
    which rate, and how long the rest takes.

        options = bcp.SaveOptions(on_progress=bcp.progress_bar())

    It draws on standard error, on rank 0 only, and only if standard error is a terminal. The bar of a save or load
    disappears when that ends. One function serves any number of saves and loads, also at the same time if they have
    different paths.
    """
    return _Bars().show


class _Bars:
    """The bars of one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may save while this thread draws
        self._display: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, progress: Progress) -> None:
        """Draws, moves or removes the bar of a save or load; on rank 0 and in a terminal only."""
        if progress.rank != 0 or sys.stderr is None or not sys.stderr.isatty():
            return
        with self._lock:
            if progress.is_finished:
                self._remove(progress.path)
            else:
                self._draw(progress)

    def _draw(self, progress: Progress) -> None:
        if self._display is None:
            self._display = _new_display()
            self._display.start()
        if progress.path not in self._tasks:
            self._tasks[progress.path] = self._display.add_task("", total=None)
        name = progress.path.rstrip("/").rpartition("/")[2]  # a whole path leaves no room for the bar
        self._display.update(
            self._tasks[progress.path],
            description=f"{_DOING.get(progress.phase, 'committing')} {name}",
            completed=progress.bytes_done,
            total=progress.bytes_total or None,
        )
        self._display.refresh()

    def _remove(self, path: str) -> None:
        if self._display is None or path not in self._tasks:
            return
        self._display.remove_task(self._tasks.pop(path))
        if not self._tasks:
            self._display.stop()
            self._display = None


def _new_display() -> RichProgress:
    from rich import progress  # noqa: PLC0415 - only a terminal waits for rich
    from rich.console import Console  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        # What a program prints into a file or a pipe meanwhile must not go to the terminal instead.
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )
