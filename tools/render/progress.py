"""A progress bar of bytes on standard error, where that is a terminal, and nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes the number of bytes done since its last call. The bar vanishes at the end."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress  # noqa: PLC0415 - a pipe does not wait for rich
    from rich.console import Console  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
