"""`bcp cat`: prints the values of a tensor, or of a part of it, or a plain value."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.options import LoadOptions

from . import exit_codes
from .analysis.element_values import has_values
from .analysis.summary import PlainSummary, no_such_tensor, plain_objects
from .arguments import AccessOptions, Opened, with_limit_option, with_link_option, with_output_options, with_step_option
from .completion.param_types import StoredPath, TensorName
from .render.number_format import shape_text
from .render.terminal import Screen, print_json

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULT_VALUES = 1000
_ALL_COLUMNS = 120
"""Width of lines that go to a file or a pipe."""
_INDEX = re.compile(r"(?P<fqn>.+)\[(?P<index>[^\[\]]*)\]", re.DOTALL)
_ITEM = re.compile(r"(-?\d{1,18})?(?:(:)(-?\d{1,18})?(?::(\d{1,18})?)?)?")

_EXAMPLE = """\b
Example:
  bcp cat s3://bucket/run 'model.embed.weight[:2, -4:]'
  bcp cat /data/run epoch --step 1000
"""


class PrintedPart(NamedTuple):
    """A tensor, or a part of it, that was read."""

    fqn: str
    dtype: str
    part: str
    """Index as text; empty for the whole tensor."""
    values: Tensor


@click.command(epilog=_EXAMPLE)
@click.argument("ckpt", type=StoredPath())
@click.argument("name", type=TensorName(), metavar="FQN[SLICE]")
@with_step_option()
@with_limit_option(
    _DEFAULT_VALUES, "Print only the first and last values of each dimension if there are more; 0 for all."
)
@with_link_option
@with_output_options
def cat(*, ckpt: str, name: str, limit: int, access: AccessOptions, as_json: bool) -> int:
    """Print the values of one tensor of the checkpoint CKPT, of a part of it, a plain value, or all plain values below
    a name.

    SLICE is as in Python: integers, slices with a step of 1 or more, and '...', separated by commas. Only the extents
    of files that hold the part are read, and verified if they have checksums. Quote SLICE, so that the shell leaves
    the brackets alone.
    """
    opened = access.find_files(access.open_manifest(ckpt))
    objects = plain_objects(opened, max_text=sys.maxsize)
    plain = [item for item in objects if item.fqn == name] or _below(opened, objects, name)
    if plain:
        _print_plain(opened, name, plain, as_json=as_json)
        return exit_codes.FINE
    others = dict.fromkeys(item.fqn for item in objects)
    part = _read(opened, name, LoadOptions(follow_links=access.follow_links), others=others)
    if as_json:
        print_json(
            {
                "path": opened.path,
                "step": opened.manifest.step,
                "fqn": part.fqn,
                "slice": part.part or None,
                "dtype": part.dtype,
                "shape": list(part.values.shape),
                "values": _numpy(part.values).tolist(),
                "objects": None,
            }
        )
    else:
        _print(part, limit)
    return exit_codes.FINE


def _below(opened: Opened, objects: Sequence[PlainSummary], name: str) -> list[PlainSummary]:
    """Returns the plain values below `name`, such as those of a scheduler; none if a tensor is there, or named so."""
    manifest, start = opened.manifest, f"{name}."
    has_tensors = any(fqn == name or fqn.startswith(start) for fqn in chain(manifest.tensors, manifest.aliases))
    return [] if has_tensors else [item for item in objects if item.fqn.startswith(start)]


def _read(opened: Opened, name: str, options: LoadOptions, *, others: Collection[str]) -> PrintedPart:
    """Reads a tensor, or a part of it; `others` are the names of the plain values. Raises click.UsageError for an index
    that the tensor does not have, and for an index after the name of a plain value; CheckpointNotFoundError, which
    lists near names, for any other name; CheckpointMismatchError (conflict) for a dtype without single numbers.
    """
    from bytecheckpoint.checkpoint import Checkpoint  # noqa: PLC0415 - torch takes seconds to import
    from bytecheckpoint.loading.read import Source  # noqa: PLC0415

    source = Source(opened.store, opened.folder, opened.manifest, options, is_exchanged=False, path=opened.path)
    checkpoint = Checkpoint(source)
    fqn, index = name, ""
    if name not in checkpoint and (found := _INDEX.fullmatch(name)):
        fqn, index = found["fqn"], found["index"]
    if fqn not in checkpoint:
        if fqn in others:
            raise click.UsageError(f"{fqn} is a plain value, of which no part is printed: leave out [{index}]")
        if fqn.partition("[")[0] in checkpoint:
            raise click.UsageError(f"{name}: a part is given as NAME[SLICE], with one pair of brackets at the end")
        raise no_such_tensor(opened.path, fqn, [*checkpoint, *others])
    view = checkpoint[fqn]
    dtype = str(view.dtype).removeprefix("torch.")
    if not has_values(dtype):
        what = f"{fqn} is of {dtype}, whose elements are not single numbers; `bcp show --tensor` shows where it lies"
        raise CheckpointMismatchError(what, kind="conflict", path=opened.path)
    try:
        return PrintedPart(fqn, dtype, index, view[_parse_index(index)])
    except IndexError as error:
        raise click.UsageError(f"{name}: {error}; the shape is {shape_text(view.shape)}") from error


def _parse_index(text: str) -> tuple[Any, ...]:
    """Returns the index that a text means in Python; "" is all. Raises IndexError for anything else."""
    if not text.strip():
        return (...,)
    return tuple(_parse_item(item.strip()) for item in text.rstrip().removesuffix(",").split(","))


def _parse_item(text: str) -> Any:
    if text == "...":
        return ...
    found = _ITEM.fullmatch(text)
    if found is None or not text:
        raise IndexError(f"{text!r} is not an integer, a slice or '...'")
    start, colon, stop, step = found.groups()
    if colon is None:
        return int(start)
    if step is not None and not int(step):
        raise IndexError("the step of a slice is 1 or more")
    return slice(*(None if value is None else int(value) for value in (start, stop, step)))


def _numpy(values: Tensor) -> Any:
    """Returns the numbers as an array. A dtype that numpy lacks is replaced by one that holds each number exactly."""
    import torch  # noqa: PLC0415

    if values.dtype == torch.complex32:
        return values.to(torch.complex64).numpy()
    is_wider = values.dtype.is_floating_point and values.dtype.itemsize < 4 and values.dtype != torch.float16
    return (values.float() if is_wider else values).numpy()


def _print(part: PrintedPart, limit: int) -> None:
    import numpy as np  # noqa: PLC0415

    screen = Screen()
    index = f"[{part.part}]" if part.part else ""
    screen.line(f"{part.fqn}{index}: {part.dtype}, {shape_text(part.values.shape)}", style="bold")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _ALL_COLUMNS
    threshold = limit or sys.maxsize
    text = np.array2string(
        _numpy(part.values), max_line_width=width, threshold=threshold, separator=", ", floatmode="unique"
    )
    for line in text.splitlines():
        screen.line(line)


def _print_plain(opened: Opened, name: str, plain: Sequence[PlainSummary], *, as_json: bool) -> None:
    if as_json:
        objects = [{"fqn": item.fqn, "rank": item.rank, "type": item.type, "value": item.value} for item in plain]
        absent = dict.fromkeys(("slice", "dtype", "shape", "values"))
        about = {"path": opened.path, "step": opened.manifest.step, "fqn": name}
        print_json({**about, **absent, "objects": objects})
        return
    screen = Screen()
    for item in plain:
        text = item.text if isinstance(item.value, str) and item.type != "str" else repr(item.value)
        before = "" if item.fqn == name else f"{item.fqn}: "
        screen.line(before + (text if item.rank is None else f"rank {item.rank}: {text}"))
