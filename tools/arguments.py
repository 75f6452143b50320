"""Arguments that the commands share: how checkpoints are opened, sizes (`2GB`, `512MiB`, `1000000`), ages,
local files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint, Opening, find_checkpoint, manifest_of
from bytecheckpoint.info import CheckpointInfo, describe_checkpoint
from bytecheckpoint.loading.links import Files, files_of, opening_at
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.storage.backends.posix_errors import describe
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import expand_home, open_store
from bytecheckpoint.storage.store import Store

from .completion.param_types import steps_below
from .exit_codes import UnfollowedLinkError

_Command = TypeVar("_Command", bound=Callable[..., Any])
AnyStep = int | Literal["latest"] | None


class Opened(NamedTuple):
    """A checkpoint, of any format, whose manifest was read. `store` and `folder` are those of the manifest; in what
    `find_files` returns, those of the data files.
    """

    store: Store
    folder: str
    manifest: Manifest
    path: str
    """Path for people: without credentials."""

    @property
    def info(self) -> CheckpointInfo:
        return describe_checkpoint(self.manifest, path=self.path)

    def as_json(self) -> dict[str, Any]:
        """Returns its path, step and save ID."""
        return {"path": self.path, "step": self.manifest.step, "save_id": self.manifest.save_id}


class AccessOptions(NamedTuple):
    """Options of a command that say how checkpoints are opened."""

    storage_options: Mapping[str, Any]
    step: AnyStep
    follow_links: bool

    def open_root(self, root: str) -> Store:
        """Opens the store at a root."""
        return open_store(root, storage_options=self.storage_options, writer_threads=1)

    def find(self, path: str) -> FoundCheckpoint:
        """Finds a checkpoint of any format. Raises the errors of `find_checkpoint`; they say what is there instead."""
        opening = opening_at(path, Opening(self.storage_options), follow_links=self.follow_links)
        return find_checkpoint(path, self.step, opening)

    def open_manifest(self, path: str) -> Opened:
        """Opens a checkpoint and reads its manifest. Raises the errors of `bcp.open`."""
        found = self.find(path)
        return Opened(found.store, found.folder, manifest_of(found), found.path)

    def find_files(self, opened: Opened) -> Opened:
        """Returns the checkpoint with store and folder of its data files, which for a link are those of its source.
        Raises UnfollowedLinkError for a link without `follow_links`.
        """
        manifest = opened.manifest
        if manifest.linked_to and not self.follow_links:
            raise UnfollowedLinkError(
                f"{opened.path} is a link to {showable_url(manifest.linked_to)!r:.300}, where no file was looked at, "
                "so nothing is known of them: if you trust whoever made the link, follow it with --follow-links",
                kind="path_escape",
                path=opened.path,
            )
        opening, own_files = Opening(self.storage_options), Files(opened.store, opened.folder)
        files = files_of(own_files, manifest, opening, follow_links=self.follow_links, path=opened.path)
        return opened._replace(store=files.store, folder=files.folder)

    def for_paths(self, *paths: str) -> list[AccessOptions]:
        """Returns these options for each path. If any path is a URL, storage options go to URLs only, else to all
        paths. With `follow_links` all get them, because links may lead to URLs.
        """
        is_url = ["://" in path or "::" in path for path in paths]
        gets_options = [self.follow_links or of_url or not any(is_url) for of_url in is_url]
        return [self if gets else self._replace(storage_options={}) for gets in gets_options]


class StepParam(click.ParamType[AnyStep]):
    """A step as `bcp.open` takes it: `latest`, `none` for the checkpoint at the path itself, or a number."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> AnyStep:
        if value == "none":
            return None
        if value == "latest":
            return "latest"
        text = str(value)
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 1 << 63):
            self.fail(f"{text!r} is no step: 0, 1, 2, ..., latest or none", param, ctx)
        return int(text)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del param
        return steps_below(ctx, incomplete)


def with_output_options(command: _Command) -> Callable[..., Any]:
    """Adds `--json` and the options of storages, which every command takes. The command gets `as_json`, and `access`
    with the options of storages, and its `--step` and `--follow-links` if it has these.
    """

    @wraps(command)
    def run(*, storage_options: Mapping[str, Any], **arguments: Any) -> Any:
        step, follow_links = arguments.pop("step", "latest"), arguments.pop("follow_links", False)
        s3_options = {name: arguments.pop(name) for name in ("endpoint_url", "profile")}
        return command(
            access=AccessOptions(_with_s3_options(storage_options, s3_options), step, follow_links), **arguments
        )

    run = click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_parse_storage_options,
        help="Pass this to the fsspec backend of a URL; may be repeated. A value that is JSON is taken as such, so: "
        "anon=true, or key='\"123\"' for text that looks like a number.",
    )(run)
    run = click.option(
        "--profile", metavar="NAME", help="Take credentials and region of s3:// URLs from this profile."
    )(run)
    run = click.option("--endpoint-url", metavar="URL", help="Send requests for s3:// URLs to this service.")(run)
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on standard output, and nothing else there."
    )(run)


def _with_s3_options(options: Mapping[str, Any], given: Mapping[str, str | None]) -> dict[str, Any]:
    """Returns the storage options and `--endpoint-url` and `--profile`, where given. Raises click.UsageError if one of
    these two is also among the storage options.
    """
    named = {name: value for name, value in given.items() if value is not None}
    twice = sorted(named.keys() & options.keys())
    if twice:
        option = twice[0].replace("_", "-")
        raise click.UsageError(f"--{option} and --storage-option {twice[0]}=... are the same: give one of them")
    return {**options, **named}


def _parse_storage_options(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for number, text in enumerate(texts, 1):
        key, separator, value = text.partition("=")
        if not separator or not key:
            # The text itself may be a credential, so it is not repeated.
            raise click.BadParameter(f"number {number} is not of the form KEY=VALUE", ctx=ctx, param=param)
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def with_step_option(under: str = "a root") -> Callable[[_Command], _Command]:
    """Adds `--step`, which `with_output_options` puts into `access`, for commands that open one checkpoint of a root;
    `under` names the root in the help.
    """
    return click.option(
        "--step",
        type=StepParam(),
        default="latest",
        metavar="N",
        help=f"Take this step under {under}. Without it, or with latest: the checkpoint at the path, or the newest "
        "committed step under it. none: the checkpoint at the path, where an earlier version left steps below it.",
    )


def with_link_option(command: _Command) -> _Command:
    """Adds `--follow-links`, for commands that read data files."""
    return click.option(
        "--follow-links",
        is_flag=True,
        help="Read the files to which a link of `bcp convert --link` leads, where they are not below its own folder.",
    )(command)


def with_limit_option(
    num_rows: int = 40, about: str = "Print at most this many rows of a table; 0 for all."
) -> Callable[[_Command], _Command]:
    """Adds `--limit`, for commands that print long tables: `num_rows` by default, and `about` begins its help."""
    return click.option(
        "--limit",
        type=click.IntRange(min=0),
        default=num_rows,
        show_default=True,
        metavar="ROWS",
        help=f"{about} --json always has all.",
    )


def with_threads_option(about: str) -> Callable[[_Command], _Command]:
    """Adds `--threads`, for commands that read data files; `about` is its help."""
    return click.option(
        "--threads",
        type=click.IntRange(1, 1024),
        default=LoadOptions().reader_threads,
        show_default=True,
        metavar="N",
        help=about,
    )


def finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Returns the number, or None. Raises click.BadParameter for infinity, and for NaN, which click lets through."""
    if value is not None and not isfinite(value):
        raise click.BadParameter(f"{value} is no finite number", ctx=ctx, param=param)
    return value


def at_home_folder(_ctx: click.Context, _param: click.Parameter, folder: str | None) -> str | None:
    """Expands the `~` of a folder, or returns None: a shell leaves that of `--option=~/folder` as it is."""
    return folder and expand_home(folder)


_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\A([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)\Z")


class ByteSize(click.ParamType[int]):
    """A number of bytes, `minimum` or more, with or without a unit: 1 GB is 1000 MB, 1 GiB is 1024 MiB."""

    name = "size"

    def __init__(self, minimum: str) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        num_bytes = parse_bytes(value)
        if num_bytes is None:
            self.fail(f"{value!r} is not a size: 2GB, 512MiB or 1000000 would be one", param, ctx)
        if num_bytes < (parse_bytes(self._minimum) or 0):
            self.fail(f"{value} is less than {self._minimum}", param, ctx)
        return num_bytes


def parse_bytes(text: str) -> int | None:
    """Returns the number of bytes that a text means, units as in ByteSize; None if it is not a size."""
    found = _SIZE.match(str(text))
    unit = _UNITS.get(found.group(2).upper()) if found else None
    num_bytes = float(found.group(1)) * unit if found and unit else inf
    return round(num_bytes) if isfinite(num_bytes) else None


_SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Age(click.ParamType[float]):
    """A length of time, converted to seconds: `90m`, `24h`, `7d`, or a number of seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no length of time: give 90m, 24h, 7d, or a number of seconds", param, ctx)
        seconds = float(found.group(1)) * _SECONDS_OF[found.group(2) or "s"]
        if not isfinite(seconds):
            self.fail(f"{value!s:.20}... is too long", param, ctx)
        return seconds


class LocalFile(click.Path):
    """A file to write. A folder that is missing or cannot be looked at is a usage error, before the command reads
    anything.
    """

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        value = expand_home(value)
        folder, fault = Path(value).parent, ""
        try:
            if not folder.is_dir():
                fault = "is not a folder" if folder.exists() else "does not exist"
        except OSError as error:  # of a folder above it, or a name that is too long
            fault = f"cannot be looked at: {describe(error)}"
        if fault:
            self.fail(f"cannot write {value!r}: the folder {str(folder)!r} {fault}; give another path", param, ctx)
        return super().convert(value, param, ctx)


def write_text(path: str, text: str) -> None:
    """Writes or replaces a file. Raises CheckpointSaveError (storage) if it cannot."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointSaveError(
            f"cannot write the {len(text.encode())} bytes of {path}: {describe(error)}; the checkpoint was only read: "
            "free space there, check who may write, or give another path",
            kind="storage",
            path=path,
        ) from error
