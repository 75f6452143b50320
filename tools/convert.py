"""`bcp convert`: writes a checkpoint of any format in another one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage.open_store import is_local

from . import exit_codes
from .arguments import AccessOptions, ByteSize, with_link_option, with_output_options, with_step_option
from .completion.param_types import StoredPath
from .name_options import DTYPES, FORMATS, NameOptions, with_name_options
from .render.number_format import count_text, left_out_text, rate_text, size_text
from .render.terminal import Screen, byte_progress, print_json, without

if TYPE_CHECKING:
    from bytecheckpoint.conversion.convert import Converted, ConvertRequest

_MAX_FILE_BYTES = {"bcp": 8 << 30, "hf": 5 * 10**9}
"""Where --max-shard-size is not given; the other formats know no such limit."""

_EXAMPLE = """\b
Example:
  bcp convert s3://bucket/run llama-hf --to hf --dtype bfloat16
  bcp convert run/step_00001000 dcp-folder --to dcp
  bcp convert run titan/step-1000 --to dcp --flatten-optimizer --rename '^model\\.='
  bcp convert deepspeed-folder linked --to bcp --link
  bcp convert megatron/iter_0001000 llama-hf --to hf --map megatron-gpt-to-hf-llama
"""


@click.command(epilog=_EXAMPLE)
@click.argument("src", type=StoredPath())
@click.argument("dst", type=StoredPath())
@click.option(
    "--to",
    type=click.Choice(FORMATS),
    required=True,
    metavar="FORMAT",
    help="Write this format. bcp: this library's own. hf: safetensors of one model, in a folder. dcp: a folder of "
    "torch.distributed.checkpoint. torch: a file of torch.save.",
)
@with_step_option("the root SRC")
@click.option("--link", is_flag=True, help="With --to bcp: write a manifest that points into the files of SRC.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    metavar="DTYPE",
    help=f"Convert tensors of {', '.join(DTYPES)} to one of these, and weights in FP8, int8 or MXFP4 with scales to "
    "their product; all others stay as they are.",
)
@click.option("--include", multiple=True, metavar="GLOB", help="Write only names of SRC that match; may be repeated.")
@click.option(
    "--exclude",
    multiple=True,
    metavar="GLOB",
    help="Write no names of SRC that match, nor the optimizer state of such weights; may be repeated.",
)
@with_name_options
@click.option(
    "--flatten-optimizer",
    is_flag=True,
    help="With --to dcp: write optimizers on one level, as torchtitan has them: state.NAME.exp_avg, "
    "param_groups.NAME.lr.",
)
@click.option(
    "--max-shard-size",
    type=ByteSize("1MB"),
    metavar="SIZE",
    help="Start another file when one would grow beyond this; a larger tensor gets a file of its own. 5GB for hf and "
    "8GiB for bcp if not given; the other formats know no such limit.",
)
@click.option(
    "--memory",
    type=ByteSize("64MiB"),
    default="2GB",
    show_default=True,
    metavar="SIZE",
    help="Take so much memory for tensors on their way, in each process.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint of the same format at DST.")
@with_link_option
@with_output_options
def convert(
    *,
    src: str,
    dst: str,
    names: NameOptions,
    is_renamed: bool,  # noqa: ARG001  for bcp diff
    link: bool,
    dtype: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
    flatten_optimizer: bool,
    max_shard_size: int | None,
    memory: int,
    overwrite: bool,
    access: AccessOptions,
    as_json: bool,
) -> int:
    """Write the checkpoint SRC, of any format that can be read, as DST, in the format --to.

    Tensors are streamed: memory stays bounded, whatever their size. DST is there whole or not at all. Parts that
    have no place in the target are listed. Under torchrun the ranks share the work.
    """
    to: Any = names.to
    _refuse_unused_options(to, link=link, max_shard_size=max_shard_size)
    name_map = names.name_map()
    if flatten_optimizer and to != "dcp":
        raise click.UsageError(f"--flatten-optimizer is for --to dcp, not --to {to}")
    of_source, of_target = access.for_paths(src, dst)
    from bytecheckpoint.conversion.convert import ConvertLimits, ConvertRequest  # noqa: PLC0415 - these need torch
    from bytecheckpoint.loading.open_checkpoint import LoadTarget  # noqa: PLC0415
    from bytecheckpoint.loading.select import SelectionRequest  # noqa: PLC0415

    selection = SelectionRequest(
        to=to,
        include=include,
        exclude=exclude,
        rename=names.rename,
        keep_names=names.keep_names,
        dtype=dtype,
        experts=names.experts or "",
        flatten_optimizer=flatten_optimizer,
    )
    request = ConvertRequest(
        source=LoadTarget(src, access.step, of_source.storage_options),
        target=dst,
        target_options={} if access.follow_links and is_local(dst) else of_target.storage_options,
        selection=selection,
        limits=ConvertLimits(memory, max_shard_size or _MAX_FILE_BYTES.get(to, 0)),
        overwrite=overwrite,
        is_link=link,
        follow_links=access.follow_links,
        name_map=name_map,
    )
    return _run(request, as_json=as_json)


def _refuse_unused_options(to: str, *, link: bool, max_shard_size: int | None) -> None:
    """Raises click.UsageError for options that would do nothing."""
    if link and to != "bcp":
        raise click.UsageError(f"--link writes a manifest, which only --to bcp has, not --to {to}")
    if max_shard_size is not None and (link or to not in _MAX_FILE_BYTES):
        raise click.UsageError(f"--max-shard-size is for --to hf and --to bcp, not --{'link' if link else f'to {to}'}")


def _run(request: ConvertRequest, *, as_json: bool) -> int:
    from bytecheckpoint.conversion.convert import convert as convert_checkpoint  # noqa: PLC0415
    from bytecheckpoint.distributed.ranks import COORDINATOR, Subject, join_ranks  # noqa: PLC0415
    from bytecheckpoint.options import LoadOptions  # noqa: PLC0415
    from bytecheckpoint.storage.credentials import showable_url  # noqa: PLC0415

    started = time.monotonic()
    with _process_group():
        about = Subject(showable_url(request.target), None, is_save=True)
        ranks = join_ranks(None, LoadOptions().timeout_s, about=about)
        is_first = ranks.rank == COORDINATOR
        try:
            result = convert_checkpoint(
                request,
                ranks,
                progress=lambda total: byte_progress("converting", total) if is_first else nullcontext(lambda _: None),
            )
        except CheckpointError as error:
            if is_first:
                _raise_if_unfollowed(request, error)
                raise
            return exit_codes.code_of(error)  # every rank has the same error, and one reports it
    if is_first and as_json:
        print_json(_as_json(request, result, time.monotonic() - started))
    elif is_first:
        _print(result, time.monotonic() - started)
    return exit_codes.FINE


def _raise_if_unfollowed(request: ConvertRequest, error: CheckpointError) -> None:
    """Raises UnfollowedLinkError if `error` says that the source is a link that was not to be followed."""
    source = request.source
    if error.kind == "path_escape" and not (request.follow_links or request.is_link):
        access = AccessOptions(source.storage_options or {}, source.step, follow_links=False)
        access.find_files(access.open_manifest(source.root))


@contextmanager
def _process_group() -> Iterator[None]:
    """Joins the ranks of torchrun until the block ends; does nothing in a process that torchrun has not started."""
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_torchelastic_launched():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _as_json(request: ConvertRequest, result: Converted, seconds: float) -> dict[str, Any]:
    return {
        **without(result, "sides"),
        "format": request.selection.to,
        "is_link": request.is_link,
        "aliases": [{"fqn": alias, "alias_of": fqn} for alias, fqn in result.aliases.items()],
        "dropped_prefix": result.dropped_prefix or None,
        "name_map": result.sides and {"from": result.sides[0], "to": result.sides[1]},
        "experts": result.experts or None,
        "seconds": round(seconds, 6),
    }


def _print(result: Converted, seconds: float) -> None:
    screen = Screen()
    rate = rate_text(result.num_bytes, seconds)
    screen.line(
        f"{result.path}: {count_text(result.num_tensors, 'tensor')}, {size_text(result.num_bytes)} in "
        f"{count_text(result.num_files, 'file')}, written in {seconds:.1f} s ({rate}) from {result.source}",
        style="bold",
    )
    if result.sides:
        screen.line(f"  names and shapes of {result.sides[1]}, from those of {result.sides[0]}")
    if result.num_cast:
        screen.line(f"  converted to another dtype: {count_text(result.num_cast, 'tensor')}")
    if result.dropped_prefix:
        screen.line(f"  names are without the {result.dropped_prefix!r} that stood before all of them")
    if result.experts:
        screen.line(f"  experts are named as those of {result.experts}; --experts gives other names")
    for alias, fqn in result.aliases.items():
        screen.line(f"  tied: {alias} is stored as {fqn}")
    for item in result.left_out:
        screen.line(f"  left out: {left_out_text(item)}")
