"""`bcp show`: shows the contents of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.runtime.gc_pause import gc_paused

from . import exit_codes
from .analysis.data_streams import data_records
from .analysis.module_tree import ModuleNode, build_tree
from .analysis.save_layout import compression_of, writers_of
from .analysis.summary import MAX_TEXT, ManifestSummary, PlainSummary, TensorEntry, file_rows, plain_objects
from .arguments import (
    AccessOptions,
    LocalFile,
    Opened,
    with_limit_option,
    with_link_option,
    with_output_options,
    with_step_option,
    write_text,
)
from .completion.param_types import StoredPath, TensorName
from .render.data_text import print_data
from .render.show_text import (
    FILE_TABLE,
    OBJECT_TABLE,
    TREE_TABLE,
    print_in_depth,
    print_summary,
    tensor_table,
    tree_rows,
)
from .render.terminal import Screen, byte_progress, print_json, without

if TYPE_CHECKING:
    from .analysis.tensor_stats import Histogram, TensorStats

_NUM_HISTOGRAMS = 12

_EXAMPLE = """\b
Example:
  bcp show s3://bucket/run --step 1000 --tree
  bcp show /data/run --tensor 'model.layers.0.*' --stats
  bcp show /data/run --data
  bcp show /data/run --html report.html
"""


@click.command(epilog=_EXAMPLE)
@click.argument("ckpt", type=StoredPath())
@with_step_option()
@click.option(
    "--tree",
    "with_tree",
    is_flag=True,
    help="Print the tensors as a tree of modules. Numbered siblings with the same names, shapes and dtypes are one, "
    "`layers.0-31`; counts and sizes are those of all that a row stands for.",
)
@click.option(
    "--tensor",
    "patterns",
    type=TensorName(),
    multiple=True,
    metavar="FQN",
    help="Print these tensors in depth: chunks, where they lie, and a map of the files. A name or a glob; may be "
    "repeated.",
)
@click.option("--files", "with_files", is_flag=True, help="Print the data files.")
@click.option(
    "--objects", "with_objects", is_flag=True, help="Print the plain values; those of single ranks with the rank."
)
@click.option(
    "--data",
    "with_data",
    is_flag=True,
    help="Print the state of data loaders: epoch, position and samples by source and by stream, as the last save has "
    "them.",
)
@click.option(
    "--stats",
    "with_stats",
    is_flag=True,
    help="Read the tensors: minimum, maximum, mean and standard deviation of the finite values (of the tensor as a "
    "population), and how many are NaN, infinite and zero. Memory stays bounded; every byte is verified. Complex "
    "values have only the counts, packed dtypes nothing.",
)
@click.option(
    "--html",
    "html_path",
    type=LocalFile(),
    metavar="FILE",
    help="Also write a report with pictures to this local file, in place of one there: sizes of modules, dtypes, where "
    "tensors lie (those of --tensor, or the largest), how the save went. One page that needs nothing but itself.",
)
@click.option(
    "--histograms",
    "with_histograms",
    is_flag=True,
    help="With --html: read the tensors of --tensor, or the largest 12, twice, and draw how their values spread.",
)
@with_limit_option()
@with_link_option
@with_output_options
@gc_paused()  # the names of 20,000 tensors are many objects, and none of them is freed before the end
def show(
    *,
    ckpt: str,
    with_tree: bool,
    patterns: Sequence[str],
    with_files: bool,
    with_objects: bool,
    with_data: bool,
    with_stats: bool,
    html_path: str | None,
    with_histograms: bool,
    limit: int,
    access: AccessOptions,
    as_json: bool,
) -> int:
    """Show the contents of the checkpoint CKPT: a summary, then its tensors.

    Only the manifest is read, unless --stats or --histograms asks for values, --objects for tensors of single ranks, or
    --html for the telemetry of the save.
    """
    if with_histograms and html_path is None:
        raise click.UsageError("--histograms are drawn in the report of --html FILE")
    opened = access.open_manifest(ckpt)
    if with_stats or with_objects or with_histograms:
        opened = access.find_files(opened)
    summary = ManifestSummary(opened.manifest)
    has_first_only = bool(limit) and not (patterns or with_tree or with_stats or html_path is not None or as_json)
    tensors = summary.first_tensors(limit) if has_first_only else summary.select(patterns, path=opened.path)
    stats = _read_stats(opened, tensors) if with_stats else None
    tree = build_tree(tensors) if with_tree else None
    files = file_rows(opened.manifest) if with_files else None
    objects = plain_objects(opened, max_text=MAX_TEXT) if with_objects else None
    data = data_records(opened.manifest) if with_data else None
    if html_path is not None:
        histograms = _read_histograms(opened, tensors, is_selected=bool(patterns)) if with_histograms else {}
        _write_report(
            html_path,
            opened,
            summary,
            tensors=tensors,
            stats=stats,
            objects=objects,
            histograms=histograms,
            is_selected=bool(patterns),
        )
    if as_json:
        sections = {
            "tensors": [_tensor_json(summary, tensor, stats, in_depth=bool(patterns)) for tensor in tensors],
            "tree": None if tree is None else list(map(_node_json, tree)),
            "files": files,
            "objects": None if objects is None else [without(plain, "text") for plain in objects],
            "data": data,
            "html": html_path,
        }
        print_json({**_summary_json(opened, summary), **sections})
        return exit_codes.FINE
    screen = Screen()
    if patterns:
        screen.line(opened.path, style="bold")
    else:
        print_summary(screen, opened, summary)
    if tree is not None:
        rows = [row for node in tree for row in tree_rows(node)]
        screen.section(TREE_TABLE, rows, limit=limit, rest=" rows: --tensor GLOB shows a part, --limit 0 all")
    if patterns and tree is None:
        print_in_depth(screen, opened.manifest, summary, tensors, stats, limit=limit)
    elif with_stats or not (with_tree or with_files or with_objects or with_data):
        rest = ": --tree shows them by module, --tensor GLOB some, --limit 0 all"
        num_tensors = summary.num_names if has_first_only else len(tensors)
        screen.section(tensor_table(stats), tensors, limit=limit, rest=rest, num_items=num_tensors)
    if files is not None:
        screen.section(FILE_TABLE, files, limit=limit, rest=" files: --limit 0 shows all")
    if objects is not None:
        screen.section(OBJECT_TABLE, objects, limit=limit, rest=" objects: --limit 0 shows all")
    if data is not None:
        print_data(screen, data, limit=limit)
    if html_path is not None:
        screen.paragraph(f"report written to {html_path}")
    return exit_codes.FINE


def _write_report(
    path: str,
    opened: Opened,
    summary: ManifestSummary,
    *,
    tensors: Sequence[TensorEntry],
    stats: Mapping[str, TensorStats] | None,
    objects: Sequence[PlainSummary] | None,
    histograms: Mapping[str, Histogram],
    is_selected: bool,
) -> None:
    # What a summary does not need takes as long to import as all that it does.
    from bytecheckpoint.diagnostics.telemetry import read_save_records  # noqa: PLC0415

    from .render.html.checkpoint_page import ReportContents, checkpoint_page  # noqa: PLC0415

    records = read_save_records(opened.store, opened.folder, opened.manifest.save_id)
    report = ReportContents(tensors, is_selected, stats, objects, records, histograms)
    write_text(path, checkpoint_page(opened, summary, report))


def _read_histograms(opened: Opened, tensors: Sequence[TensorEntry], *, is_selected: bool) -> dict[str, Histogram]:
    from .analysis.tensor_stats import histograms_of  # noqa: PLC0415 - as above

    largest = tensors if is_selected else sorted(tensors, key=lambda tensor: -tensor.num_bytes)[:_NUM_HISTOGRAMS]
    stats = _read_stats(opened, largest)
    with byte_progress("reading again", _bytes_of(largest)) as on_progress:
        return histograms_of(opened, stats, on_progress=on_progress)


def _read_stats(opened: Opened, tensors: Sequence[TensorEntry]) -> dict[str, TensorStats]:
    """Reads the tensors, and returns their statistics by `stored_fqn`; dtypes without numbers are left out."""
    from .analysis.tensor_stats import tensor_stats  # noqa: PLC0415 - as above

    stored = list(dict.fromkeys(tensor.stored_fqn for tensor in tensors))
    with byte_progress("reading", _bytes_of(tensors)) as on_progress:
        return tensor_stats(opened, stored, on_progress=on_progress)


def _bytes_of(tensors: Sequence[TensorEntry]) -> int:
    """Returns the bytes of the elements; those of tied tensors, which are read once, count once."""
    return sum({tensor.stored_fqn: tensor.num_elements * itemsize(tensor.dtype) for tensor in tensors}.values())


def _summary_json(opened: Opened, summary: ManifestSummary) -> dict[str, Any]:
    manifest = opened.manifest
    info = opened.info
    return {
        **{name: getattr(info, name) for name in ("path", "format", "step", "save_id")},
        "created_at": manifest.provenance.get("created_at"),
        "world_size": info.world_size,
        "num_bytes": info.num_bytes,
        "num_files": len(manifest.files),
        "num_tensors": len(manifest.tensors),
        "num_aliases": len(manifest.aliases),
        "num_chunks": summary.num_chunks,
        "num_parameters": summary.num_parameters,
        "entries": [without(total, "num_chunks") for total in summary.entries],
        "dtypes": [without(total, "num_chunks") for total in summary.dtypes],
        "cuts": [without(total, "num_elements") for total in summary.cuts],
        "writers": writers_of(manifest),
        "compressed": compression_of(manifest),
        "metadata": manifest.metadata,
        "provenance": manifest.provenance,
    }


def _tensor_json(
    summary: ManifestSummary, tensor: TensorEntry, stats: Mapping[str, TensorStats] | None, *, in_depth: bool
) -> dict[str, Any]:
    found = stats.get(tensor.stored_fqn) if stats is not None else None
    chunks = summary.record(tensor).chunks if in_depth else None
    return {
        **tensor._asdict(),
        "num_elements": tensor.num_elements,
        "num_bytes": tensor.num_bytes,
        "num_chunks": summary.num_chunks_of(tensor),
        "chunks": None if chunks is None else list(map(summary.chunk_json, chunks)),
        "tiles_shape": summary.is_covered_once(tensor) if in_depth else None,
        "stats": None if found is None else found.as_json(),
    }


def _node_json(node: ModuleNode) -> dict[str, Any]:
    return {
        "name": node.name,
        "dtype": node.tensor.dtype if node.tensor else None,
        "shape": node.tensor.shape if node.tensor else None,
        "num_tensors": node.num_tensors,
        "num_elements": node.num_elements,
        "num_bytes": node.num_bytes,
        "children": list(map(_node_json, node.children)),
    }
