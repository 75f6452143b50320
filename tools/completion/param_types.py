"""Types of arguments that complete themselves: paths, steps and names of tensors. A path or a name is not checked
here: the command that takes it reports what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from bytecheckpoint.errors import CheckpointError

if TYPE_CHECKING:
    from bytecheckpoint.manifest import Manifest

_MAX_WHOLE = 40
"""Most names that are offered whole; of more, the parts up to the next dot are offered first."""
_PATHS = ("ckpt", "checkpoint", "root", "a", "src", "path")
"""Names of arguments that say which checkpoint the others are about."""
_SAFE_NAME = re.compile(r"[\w.,:=@%+/\[\]-]+")
"""Names that a shell takes for one word. bash puts a candidate into the line as it is: some other characters in it
would run as code."""


class StoredPath(click.ParamType[str]):
    """A folder, a file or a URL. Only local ones are completed: listing a bucket at each key costs requests."""

    name = "path"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del ctx, param
        return [] if "://" in incomplete else [CompletionItem(incomplete, type="file")]


class TensorName(click.ParamType[str]):
    """A name, completed from those of the tensors in the checkpoint that an earlier argument gives."""

    name = "fqn"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del param
        try:
            manifest = _manifest_of(ctx)
        except (CheckpointError, OSError, ValueError):  # nothing to offer; the command will say why
            return []
        names = sorted(filter(_SAFE_NAME.fullmatch, [*manifest.tensors, *manifest.aliases])) if manifest else []
        return [CompletionItem(name) for name in next_parts(names, incomplete)]


def path_in(ctx: click.Context) -> str | None:
    """Returns the checkpoint or root on the unfinished line; None if there is none, or if it is a URL."""
    path = next((ctx.params[name] for name in _PATHS if ctx.params.get(name)), None)
    return None if path is None or "://" in path else path


def _manifest_of(ctx: click.Context) -> Manifest | None:
    # A shell waits for each completion: only the completion of a name imports what reads checkpoints.
    from bytecheckpoint.formats.find_checkpoint import Opening, find_checkpoint, manifest_of  # noqa: PLC0415

    path, step = path_in(ctx), ctx.params.get("step")
    if path is None:
        return None
    return manifest_of(find_checkpoint(path, "latest" if step is None else step, Opening(None)))


def steps_below(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Returns the words for `--step` that begin with `incomplete`: the committed steps of the root in the command line,
    the newest first, then `latest` and `none`. Empty if there is no local root, or it cannot be listed.
    """
    from bytecheckpoint.storage import layout  # noqa: PLC0415 - as above
    from bytecheckpoint.storage.open_store import open_store  # noqa: PLC0415

    path = path_in(ctx)
    if path is None:
        return []
    try:
        steps = layout.committed_steps(open_store(path, storage_options=None, writer_threads=1))
    except (CheckpointError, OSError, ValueError):
        return []
    words = [*map(str, reversed(steps)), "latest", "none"]
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def next_parts(names: Iterable[str], incomplete: str) -> Sequence[str]:
    """Returns the names that begin with `incomplete`. Of more than 40, returns only the distinct parts up to the next
    dot, or up to a later one if all are the same up to there.
    """
    found = [name for name in names if name.startswith(incomplete)]
    if len(found) <= _MAX_WHOLE:
        return found
    ends = (name.find(".", len(incomplete)) + 1 or len(name) for name in found)
    only = list(dict.fromkeys(name[:end] for name, end in zip(found, ends, strict=True)))
    # A shell would otherwise ask once more for each dot.
    return next_parts(found, only[0]) if len(only) == 1 and only[0].endswith(".") else only
