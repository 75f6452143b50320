"""`bcp doctor`: checks a storage for the promises that checkpoints rely on, measures it, and recommends options."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from bytecheckpoint.diagnostics.filesystem_features import FilesystemFeatures, probe_filesystem
from bytecheckpoint.diagnostics.store_guarantees import GuaranteeCheck, ProbeStore, check_guarantees
from bytecheckpoint.diagnostics.store_speed import Latency, Speed, measure_latency, measure_reads, measure_writes
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX
from bytecheckpoint.storage.store import Store

from . import exit_codes
from .analysis.diagnosis.checkpoint_diagnosis import CheckpointDiagnosis, diagnose
from .analysis.recommend import CompressionSpeed, Recommendation, measure_compression, recommend
from .arguments import AccessOptions, at_home_folder, finite, with_output_options
from .completion.param_types import StoredPath
from .render.diagnosis_text import print_diagnosis
from .render.number_format import rate_text, size_text
from .render.terminal import LAST_DROP, NAME_STYLE, Column, Screen, print_json, without

_MiB = 1 << 20
_COMPRESSING_THREADS = 3

_EXAMPLE = """\b
Example:
  bcp doctor s3://bucket/run
  bcp doctor s3://bucket/run --local-stage /nvme/stage --seconds 3
  bcp doctor --checkpoint runs/epoch=3.ckpt
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Findings about one storage; `local` is None without a local stage."""

    url: str
    checks: Sequence[GuaranteeCheck]
    folder: FilesystemFeatures | None
    """Features of the file system of a local folder, which a file:// URL also names; None for any other store."""
    latency: Latency
    writes: Sequence[Speed]
    reads: Sequence[Speed]
    compression: CompressionSpeed
    local: Sequence[Speed] | None
    advice: Sequence[Recommendation]

    @property
    def is_fine(self) -> bool:
        return all(check.is_kept for check in self.checks if check.is_needed)


@click.command(epilog=_EXAMPLE)
@click.argument("url", required=False, type=StoredPath())
@click.option(
    "--checkpoint",
    type=StoredPath(),
    metavar="PATH",
    help="Instead of a storage, examine this folder or file, of whatever origin: what it is, what of it loads into "
    "what, and the lines of Python that do it. It is only read, and no pickle in it is run.",
)
@click.option(
    "--local-stage",
    "stage",
    callback=at_home_folder,
    metavar="FOLDER",
    help="Also measure this folder on a disk of this host, which saves could go through.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 600),
    callback=finite,
    default=1.0,
    show_default=True,
    metavar="S",
    help="Measure for about so long, some twenty times.",
)
@click.option(
    "--max-mib",
    type=click.IntRange(1, 1 << 20),
    default=256,
    show_default=True,
    metavar="MIB",
    help="Write no larger object to measure.",
)
@with_output_options
@click.pass_context
def doctor(
    context: click.Context,
    /,
    *,
    url: str | None,
    checkpoint: str | None,
    stage: str | None,
    seconds: float,
    max_mib: int,
    access: AccessOptions,
    as_json: bool,
) -> int:
    """Write, read and delete objects of its own below URL, and report which promises the storage keeps, how fast
    it is by the length of a part and by the number in flight, and which options suit it.

    All that it writes is under one name, .tmp-doctor-..., and removed in the end. Exit code 1 if a promise that
    checkpoints need is broken, 4 if the storage cannot be written to.

    With --checkpoint PATH in place of URL, nothing is written. Exit code 0 if something of it loads.
    """
    _check_usage(context, url, checkpoint)
    if url is None:
        return _examine_checkpoint(checkpoint or "", access, as_json=as_json)
    diagnosis = _examine(url, stage, access.storage_options, seconds=seconds, max_bytes=max_mib * _MiB)
    if as_json:
        print_json(_as_json(diagnosis))
    else:
        _print(diagnosis)
    return exit_codes.FINE if diagnosis.is_fine else exit_codes.CORRUPT


def _check_usage(context: click.Context, url: str | None, checkpoint: str | None) -> None:
    if (url is None) == (checkpoint is None):
        raise click.UsageError("give the URL of a storage, or --checkpoint PATH, one of the two", ctx=context)
    of_storage = ("stage", "seconds", "max_mib")
    given = [name for name in of_storage if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if checkpoint is not None and given:
        raise click.UsageError("a checkpoint is not measured: leave out the options for a storage", ctx=context)


def _examine_checkpoint(path: str, access: AccessOptions, *, as_json: bool) -> int:
    diagnosis = diagnose(path, access.storage_options)
    if as_json:
        print_json(_checkpoint_json(diagnosis))
    else:
        print_diagnosis(diagnosis)
    return exit_codes.FINE if diagnosis.error is None else exit_codes.code_of(diagnosis.error)


def _checkpoint_json(diagnosis: CheckpointDiagnosis) -> dict[str, Any]:
    shown = ("name", "kind", "holds", "into", "hint", "num_tensors", "num_elements", "num_bytes")
    error, origin = diagnosis.error, diagnosis.origin
    return {
        **without(diagnosis, "origin", "parts", "code", "error"),
        "writer": origin and origin.writer,
        "told_by": origin and origin.known_by,
        "parts": [{name: getattr(part, name) for name in shown} for part in diagnosis.parts],
        "code": diagnosis.code,
        "error": error and {"kind": error.kind, "message": error.message, "path": error.path},
    }


def _examine(url: str, stage: str | None, options: Mapping[str, Any], *, seconds: float, max_bytes: int) -> Diagnosis:
    folder = f"{TEMPORARY_PREFIX}doctor-{secrets.token_hex(8)}"
    with _probing(url, folder, options) as store:
        store.store.list("")  # raises where the root is a file, or cannot be looked at
        checks = list(check_guarantees(store))
        features = probe_filesystem(str(store)) if isinstance(store.store, LocalStore) else None
        latency = measure_latency(store)
        writes = _measure_writes(store, url, options, seconds=seconds, max_bytes=max_bytes)
        reads = list(measure_reads(store, seconds=seconds, max_bytes=max_bytes))
    local = None
    if stage is not None:
        with _probing(stage, folder, {}) as local_store:
            local = _measure_writes(local_store, stage, {}, seconds=seconds, max_bytes=max_bytes)
    compression = measure_compression(_COMPRESSING_THREADS)
    return Diagnosis(
        url=str(store.store),
        checks=checks,
        folder=features,
        latency=latency,
        writes=writes,
        reads=reads,
        compression=compression,
        local=local,
        advice=recommend(latency, writes, reads, compression, local),
    )


@contextmanager
def _probing(url: str, folder: str, options: Mapping[str, Any]) -> Iterator[ProbeStore]:
    """Yields a store for objects in a folder; on exit, removes the objects and the folders that were made for them.
    Raises the error of the block, else that of the removal.
    """
    store = ProbeStore(open_store(url, storage_options=options, writer_threads=1), folder)
    with _no_new_folders(store.store):
        try:
            yield store
        except BaseException:
            with suppress(CheckpointError):
                store.clear()
            raise
        store.clear()


@contextmanager
def _no_new_folders(store: Store) -> Iterator[None]:
    """On exit, removes the local folders that did not exist on entry and are empty: the root of the store, and folders
    above it.
    """
    root = Path(str(store))
    missing = [path for path in (root, *root.parents) if _is_missing(path)] if isinstance(store, LocalStore) else []
    try:
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # it is in use by now
                path.rmdir()


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:  # it cannot be looked at: the storage tells why, with what is done there
        return False


def _measure_writes(
    store: ProbeStore, url: str, options: Mapping[str, Any], *, seconds: float, max_bytes: int
) -> list[Speed]:
    """Measures writes to the folder of `store`, whose root is at this URL. `store.clear()`
    also removes what an error leaves of them.
    """

    def open_with(threads: int) -> ProbeStore:
        opened = open_store(url, storage_options=options, writer_threads=threads)
        return ProbeStore(opened, store.folder, store.names)

    return list(measure_writes(open_with, seconds=seconds, max_bytes=max_bytes))


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "url": diagnosis.url,
        "ok": diagnosis.is_fine,
        "checks": diagnosis.checks,
        "folder": diagnosis.folder,
        "latency": {f"{name[:-2]}_seconds": value for name, value in diagnosis.latency._asdict().items()},
        "writes": [_speed_json(speed) for speed in diagnosis.writes],
        "reads": [_speed_json(speed) for speed in diagnosis.reads],
        "local_writes": diagnosis.local and [_speed_json(speed) for speed in diagnosis.local],
        "compression": diagnosis.compression,
        "advice": diagnosis.advice,
    }


def _speed_json(speed: Speed) -> dict[str, Any]:
    return {
        "part_num_bytes": speed.part_bytes,
        "threads": speed.threads,
        "num_bytes": speed.num_bytes,
        "seconds": round(speed.seconds, 6),
        "bytes_per_s": round(speed.bytes_per_s),
    }


def _print(diagnosis: Diagnosis) -> None:
    screen = Screen()
    broken = [check for check in diagnosis.checks if not check.is_kept]
    if not diagnosis.is_fine:
        screen.line(f"{diagnosis.url}: NOT SAFE for checkpoints", style="bold red")
    elif broken:
        screen.line(f"{diagnosis.url}: good for checkpoints, with a limit", style="bold yellow")
    else:
        screen.line(f"{diagnosis.url}: good for checkpoints", style="bold green")
    screen.line()
    columns = [Column("promise", style=NAME_STYLE), Column("kept", is_whole=True), Column("seen")]
    screen.table(columns, [(check.name, _kept_text(check), check.what) for check in diagnosis.checks])
    if diagnosis.folder is not None:
        screen.line()
        screen.fields(_folder_rows(diagnosis.folder))
    latency = diagnosis.latency
    screen.paragraph(
        f"latency of 4 KiB: read {latency.read_s * 1e3:.2f} ms, write {latency.write_s * 1e3:.2f} ms; "
        f"of a listing {latency.list_s * 1e3:.2f} ms"
    )
    for title, speeds in (("write", diagnosis.writes), ("read", diagnosis.reads), ("local stage", diagnosis.local)):
        if speeds:
            screen.line()
            _print_speeds(screen, title, speeds)
    screen.line()
    rows = [(item.option, "-" if item.value is None else str(item.value), item.why) for item in diagnosis.advice]
    screen.table([Column("option", style=NAME_STYLE), Column("take", is_right=True), Column("because")], rows)


def _kept_text(check: GuaranteeCheck) -> str:
    return "yes" if check.is_kept else "NO" if check.is_needed else "no"


def _folder_rows(features: FilesystemFeatures) -> list[tuple[str, str]]:
    yes = {True: "yes", False: "no"}
    free = "no limit"
    if features.free_bytes is not None:
        free = f"{size_text(features.free_bytes)} of {size_text(features.total_bytes)}"
    return [
        ("file system", features.file_system or "not known"),
        ("free", free),
        ("direct writes", yes[features.direct_writes]),
        ("preallocation", yes[features.preallocation]),
        ("hard links", yes[features.hard_links]),
        ("locks", yes[features.locks]),
        ("sync of a file", f"{features.file_sync_s * 1e3:.2f} ms"),
        ("sync of a folder", f"{features.folder_sync_s * 1e3:.2f} ms"),
    ]


def _print_speeds(screen: Screen, title: str, speeds: Sequence[Speed]) -> None:
    threads = sorted({speed.threads for speed in speeds})
    columns = [Column(f"{title}, parts of", is_right=True)]
    # The ends of the range say most: in a narrow window, the values between them are left out first.
    drops = [LAST_DROP, *range(1, len(threads) - 1), 0][-len(threads) :]
    columns += [
        Column(f"{count} in flight", is_right=True, drop=drop) for count, drop in zip(threads, drops, strict=True)
    ]
    rows = []
    for part_bytes in sorted({speed.part_bytes for speed in speeds}):
        by_threads = {speed.threads: speed for speed in speeds if speed.part_bytes == part_bytes}
        cells = [rate_text(by_threads[count].bytes_per_s) if count in by_threads else "-" for count in threads]
        rows.append([size_text(part_bytes), *cells])
    screen.table(columns, rows)
