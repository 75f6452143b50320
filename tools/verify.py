"""`bcp verify`: checks that every byte is still what was written."""

from __future__ import annotations

import random
import time
from typing import Any

import click

from bytecheckpoint.diagnostics.verify import Damage, Verification, bytes_to_read, verify_checkpoint
from bytecheckpoint.errors import and_more
from bytecheckpoint.info import OWN_FORMAT

from . import exit_codes
from .arguments import (
    AccessOptions,
    Opened,
    finite,
    with_limit_option,
    with_link_option,
    with_output_options,
    with_step_option,
    with_threads_option,
)
from .completion.param_types import StoredPath
from .render.number_format import count_text, rate_text, size_text
from .render.terminal import Column, Screen, byte_progress, print_json

_DEFAULT_ROWS = 20

_EXAMPLE = """\b
Example:
  bcp verify s3://bucket/run --step 1000 --threads 16
  bcp verify /data/run --sample 5
"""


@click.command(epilog=_EXAMPLE)
@click.argument("ckpt", type=StoredPath())
@with_step_option()
@click.option(
    "--sample",
    "sample_percent",
    type=click.FloatRange(0, 100, min_open=True),
    callback=finite,
    default=100,
    metavar="PCT",
    help="Read only this percentage of each file, in pieces chosen at random, at least one a file.",
)
@with_threads_option("Keep so many reads in flight; each takes 8 MiB of memory.")
@with_limit_option(_DEFAULT_ROWS, "Print at most this many faults, and names of tensors in each; 0 for all.")
@with_link_option
@with_output_options
def verify(
    *,
    ckpt: str,
    sample_percent: float,
    threads: int,
    limit: int,
    access: AccessOptions,
    as_json: bool,
) -> int:
    """Check the checkpoint CKPT and list all damage.

    The manifest must be valid, every data file must have its size, every byte match its checksum, every file's header
    match the manifest, and the chunks of every tensor cover it exactly once. Exit code 1 if something is damaged, 4 if
    the storage could not be read, 5 if nothing is damaged as far as one can tell, but files have no checksums: those
    of other formats are only looked for, with their sizes.
    """
    opened = access.find_files(access.open_manifest(ckpt))
    started = time.monotonic()
    with byte_progress("checking", bytes_to_read(opened.manifest, sample_percent)) as on_progress:
        result = verify_checkpoint(
            opened.store,
            opened.folder,
            opened.manifest,
            threads=threads,
            sample_percent=sample_percent,
            rng=random.Random(),  # noqa: S311 - a sample is not a secret
            on_progress=on_progress,
        )
    seconds = time.monotonic() - started
    if as_json:
        print_json(_as_json(opened, result, sample_percent=sample_percent, seconds=seconds))
    else:
        _print(opened, result, sample_percent=sample_percent, seconds=seconds, limit=limit)
    if result.unchecked_files and not result.damage:
        return exit_codes.UNVERIFIED
    return exit_codes.code_of_findings(item.kind for item in result.damage)


def _as_json(opened: Opened, result: Verification, *, sample_percent: float, seconds: float) -> dict[str, Any]:
    manifest = opened.manifest
    return {
        **opened.as_json(),
        "ok": not result.damage,
        "num_files": len(manifest.files),
        "num_tensors": len(manifest.tensors),
        "num_bytes": sum(file.byte_length for file in manifest.files),
        "num_bytes_checked": result.num_bytes_checked,
        "sample_percent": sample_percent,
        "seconds": round(seconds, 6),
        "unchecked_files": result.unchecked_files,
        "num_tensors_hit": result.num_hit,
        "num_tensors_sound": result.num_sound,
        "damage": result.damage,
    }


def _print(opened: Opened, result: Verification, *, sample_percent: float, seconds: float, limit: int) -> None:
    screen = Screen()
    manifest = opened.manifest
    looked_at = (
        f"{count_text(len(manifest.tensors), 'tensor')} in {count_text(len(manifest.files), 'file')}, "
        f"{size_text(result.num_bytes_checked)} compared with their checksums"
    )
    if result.num_bytes_checked:
        looked_at += f" in {seconds:.1f} s ({rate_text(result.num_bytes_checked, seconds)})"
    if result.damage:
        files = {item.file for item in result.damage if item.file}
        screen.line(
            f"{opened.path}: DAMAGED, {count_text(len(result.damage), 'fault')} in {count_text(len(files), 'file')}, "
            f"{result.num_hit:,} of {count_text(len(manifest.tensors), 'tensor')} hit",
            style="bold red",
        )
    elif manifest.foreign_format not in {"", OWN_FORMAT}:
        screen.line(
            f"{opened.path}: every file is there with its size, and every tensor lies in them, but there are no "
            f"checksums ({manifest.foreign_format}) to tell whether their bytes are as they were written",
            style="bold yellow",
        )
    else:
        sampled = "" if sample_percent >= 100 else f", as far as the {sample_percent:g} % that were read can tell"
        unsure = "" if not result.unchecked_files else ", but for files without checksums"
        style = "bold yellow" if result.unchecked_files else "bold green"
        screen.line(f"{opened.path}: all is as it was written{sampled}{unsure}", style=style)
    screen.line(f"  {looked_at}")
    for item in result.damage[: limit or None]:
        _print_damage(screen, item, limit)
    if limit and len(result.damage) > limit:
        screen.line()
    screen.rest(len(result.damage), limit, " faults: --limit 0 shows all")
    if result.unchecked_files:
        screen.line(f"  without checksums, so not read: {and_more(result.unchecked_files, 10)}", style="yellow")
    if result.damage:
        screen.paragraph(
            f"{_others(result, len(manifest.tensors))}Restore the files from a good copy, or take another step."
        )


def _others(result: Verification, num_tensors: int) -> str:
    """Returns a sentence about the tensors that no damage names; empty if nothing is known of them."""
    num_others = num_tensors - result.num_hit
    if result.num_sound is None:
        return ""
    if not num_others:
        return "Every tensor is hit. " if num_tensors else ""
    sound = f"{result.num_sound:,} {'is' if result.num_sound == 1 else 'are'} sound"
    if result.num_sound == num_others:
        return f"The other {sound}. "
    return (
        f"Of the other {count_text(num_others, 'tensor')}, {sound}; the rest lie in files that have no checksums, have "
        "the wrong length, so that a load refuses them, or could not be read to their end. "
    )


def _print_damage(screen: Screen, item: Damage, limit: int) -> None:
    end = item.byte_offset + item.byte_length
    where = f"{item.file}, bytes {item.byte_offset:,} to {end:,}" if item.file else "manifest"
    screen.paragraph(f"  {where}", style="red")
    rows = [("what", f"{item.kind}: {item.what}"), ("hits", _hit_text(item, limit))]
    screen.table([Column("", style="dim"), Column("")], rows, indent=4)


def _hit_text(item: Damage, limit: int) -> str:
    if item.tensors:
        how = " (--limit 0 names all)" if limit and len(item.tensors) > limit else ""
        return and_more(item.tensors, limit or len(item.tensors)) + how
    return "no tensor" if item.kind in {"truncated", "missing_file"} else "no tensor, only the file's header"
