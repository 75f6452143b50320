"""`bcp report`: one page about all checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from bytecheckpoint.runtime.threads import map_jobs

from .. import exit_codes
from ..analysis.checkpoint_list import ListedCheckpoint, list_checkpoints
from ..arguments import AccessOptions, LocalFile, with_output_options, write_text
from ..completion.param_types import StoredPath
from ..render.html.run_page import RunRow, run_page
from ..render.number_format import count_text
from ..render.terminal import Screen, print_json
from .timings import with_timings

_LOOKS_IN_FLIGHT = 8

_EXAMPLE = """\b
Example:
  bcp report /data/run
  bcp report s3://bucket/runs --out runs.html
"""


@click.command(epilog=_EXAMPLE)
@click.argument("root", type=StoredPath())
@click.option(
    "--out",
    type=LocalFile(),
    metavar="FILE",
    default="report.html",
    show_default=True,
    help="Write the page to this local file, in place of one there.",
)
@with_output_options
def report(*, root: str, out: str, access: AccessOptions, as_json: bool) -> int:
    """Write one page about all checkpoints under ROOT: sizes, times, stalls, rates and metrics over the steps.

    ROOT may be a root of steps or a folder of runs; each run has a line of its own in the charts. Only manifests and
    the small objects beside them are read. Exit code 1 if a checkpoint is damaged.
    """
    store = access.open_root(root)
    listed = [item for item in list_checkpoints(store).checkpoints if item.committed]
    if not listed:
        access.find(root)  # raises with what is there instead, unless a checkpoint has come since

    def row(item: ListedCheckpoint) -> RunRow:
        return RunRow(item, with_timings(store, item, is_replacement=False))

    rows: Sequence[RunRow] = map_jobs(row, listed, num_threads=_LOOKS_IN_FLIGHT)
    write_text(out, run_page(str(store), rows))
    num_damaged = sum(item.is_damaged for item in listed)
    if as_json:
        print_json({"root": str(store), "html": out, "num_checkpoints": len(rows), "num_damaged": num_damaged})
    else:
        Screen().line(f"report of {count_text(len(rows), 'checkpoint')} written to {out}")
    return exit_codes.CORRUPT if num_damaged else exit_codes.FINE
