"""`bcp diff`: compares two checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from bytecheckpoint.errors import CheckpointNotFoundError

from . import exit_codes
from .analysis.value_difference import Tolerance
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
from .name_options import DTYPES, FORMATS, NameOptions, with_name_options
from .render.data_text import print_data_differences
from .render.diff_text import print_diff, print_left_out
from .render.terminal import Screen, byte_progress, print_json

if TYPE_CHECKING:
    from .analysis.checkpoint_diff import CheckpointDiff, TensorDifference

_EXAMPLE = """\b
Example:
  bcp diff run/step_00001000 s3://bucket/run/step_00001000
  bcp diff before after --rtol 1e-3 --exclude 'optimizer.*'
  bcp diff run llama-hf --to hf
"""


@click.command(epilog=_EXAMPLE)
@click.argument("a", type=StoredPath())
@click.argument("b", type=StoredPath())
@with_step_option("both roots")
@click.option(
    "--to",
    type=click.Choice(FORMATS),
    metavar="FORMAT",
    help="Compare B with what `bcp convert A B --to FORMAT` writes, with these options: names, and what is left out.",
)
@with_name_options
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    metavar="DTYPE",
    help="Compare B with what `bcp convert A B --dtype DTYPE` writes: of quantized weights the products.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    callback=finite,
    metavar="X",
    help="Take numbers as the same where |a - b| <= atol + rtol * max(|a|, |b|). 0 where only --rtol is given.",
)
@click.option(
    "--rtol", type=click.FloatRange(min=0), callback=finite, metavar="X", help="Set the relative part of --atol."
)
@click.option(
    "--ignore-dtype", is_flag=True, help="Take another dtype for no difference, and compare values as numbers."
)
@click.option("--include", multiple=True, metavar="GLOB", help="Compare only names that match; may be repeated.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Compare no names that match; may be repeated.")
@with_threads_option("Compare so many regions at once; each takes up to 150 MiB of memory.")
@with_limit_option()
@with_link_option
@with_output_options
def diff(
    *,
    a: str,
    b: str,
    names: NameOptions,
    is_renamed: bool,
    dtype: str | None,
    atol: float | None,
    rtol: float | None,
    ignore_dtype: bool,
    include: Sequence[str],
    exclude: Sequence[str],
    threads: int,
    limit: int,
    access: AccessOptions,
    as_json: bool,
) -> int:
    """Compare the checkpoints A and B, whatever their layouts: names, shapes, dtypes, values and plain data.

    Without --atol and --rtol every bit counts: 0.0 and -0.0 differ, and a NaN is the same as one with the same bits.
    With either, or for tensors of two dtypes, numbers are compared: NaN is the same as NaN, an infinity as one of its
    sign. Steps and metadata are not compared, nor which ranks saved the streams of a data loader. Exit code 1 if
    something differs.

    For each data loader in both, print how many samples lie between A and B, from the counts of the loader's
    streams.

    With --to, --rename, --map or --dtype, A is taken as `bcp convert` would write it: so an export is compared with its
    source.
    """
    names.name_map()  # raises for options that would do nothing
    tolerance = None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)
    from .analysis.checkpoint_diff import compare_checkpoints  # noqa: PLC0415 - torch takes seconds to import
    from .analysis.data_streams import data_differences  # noqa: PLC0415
    from .analysis.export_view import export_of, in_dtype  # noqa: PLC0415

    opened_a, opened_b = (
        of_path.find_files(of_path.open_manifest(path))
        for path, of_path in zip((a, b), access.for_paths(a, b), strict=True)
    )
    data = data_differences(opened_a.manifest, opened_b.manifest)
    export = export_of(opened_a, names, exclude=exclude, beside=opened_b) if is_renamed else None
    opened_a, read_as = in_dtype(export.opened if export else opened_a, dtype)
    result = compare_checkpoints(
        opened_a,
        opened_b,
        read_as=read_as,
        tolerance=tolerance,
        ignore_dtype=ignore_dtype,
        is_wanted=lambda fqn: _is_wanted(fqn, include, exclude),
        threads=threads,
        progress=lambda num_bytes: byte_progress("comparing", num_bytes),
    )
    if (include or exclude) and not (result.num_tensors or result.num_objects or result.only_in_a or result.only_in_b):
        raise _nothing_compared(opened_a, opened_b, is_renamed=is_renamed)
    left_out = export.left_out if export else []
    if as_json:
        print_json({**_as_json(opened_a, opened_b, result, tolerance), "data": data, "left_out": left_out})
    else:
        screen = Screen()
        print_diff(screen, (opened_a.path, opened_b.path), result, limit=limit)
        print_data_differences(screen, data)
        print_left_out(screen, left_out, limit=limit)
    return exit_codes.FINE if result.is_same else exit_codes.CORRUPT


def _is_wanted(fqn: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    is_included = not include or any(fnmatchcase(fqn, glob) for glob in include)
    return is_included and not any(fnmatchcase(fqn, glob) for glob in exclude)


def _nothing_compared(a: Opened, b: Opened, *, is_renamed: bool) -> CheckpointNotFoundError:
    """Returns the error for globs that match no name: without it, checkpoints not compared would look the same."""
    names = "; they get the names of the export, not those of the source" if is_renamed else ""
    return CheckpointNotFoundError(
        f"--include and --exclude match no tensor and no plain value of {a.path} and {b.path}, so nothing was compared"
        f": check the globs{names}; `bcp show` lists names",
        kind="not_found",
        path=a.path,
    )


def _as_json(a: Opened, b: Opened, result: CheckpointDiff, tolerance: Tolerance | None) -> dict[str, Any]:
    return {
        "a": a.as_json(),
        "b": b.as_json(),
        "same": result.is_same,
        "atol": tolerance.atol if tolerance else None,
        "rtol": tolerance.rtol if tolerance else None,
        "num_tensors": result.num_tensors,
        "num_objects": result.num_objects,
        "only_in_a": result.only_in_a,
        "only_in_b": result.only_in_b,
        "tensors": list(map(_tensor_json, result.tensors)),
        "objects": [
            {"fqn": item.fqn, "rank": item.rank, "only_in": item.only_in, "a": item.values[0], "b": item.values[1]}
            for item in result.objects
        ],
        "read_num_bytes": result.num_bytes_read,
        "same_checksum_num_bytes": result.num_bytes_same,
        "seconds": round(result.seconds, 6),
    }


def _tensor_json(tensor: TensorDifference) -> dict[str, Any]:
    values = tensor.values
    first = values.first if values else None
    return {
        "fqn": tensor.fqn,
        "problems": tensor.problems,
        "dtype_a": tensor.dtypes[0],
        "dtype_b": tensor.dtypes[1],
        "shape_a": tensor.shapes[0],
        "shape_b": tensor.shapes[1],
        "num_elements": tensor.num_elements,
        "num_differing": values.num_differing if values else None,
        "num_not_finite": values.num_not_finite if values else None,
        "max_abs": values.max_abs if values else None,
        "max_rel": values.max_rel if values else None,
        "first_index": tensor.first_index,
        "first_a": first.a if first else None,
        "first_b": first.b if first else None,
    }
