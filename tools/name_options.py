"""Options that name the tensors of an export, for `bcp convert`, which writes it, and `bcp diff`, which compares it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import click

from bytecheckpoint.name_maps.fused_experts import EXPERT_NAMES, FUSED
from bytecheckpoint.name_maps.parameters import parse_options
from bytecheckpoint.options import NameMap

FORMATS = ("bcp", "hf", "dcp", "torch")
"""Formats that `bcp convert` writes."""
DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that `bcp convert` converts tensors to."""


class NameOptions(NamedTuple):
    """The options as click passes them."""

    to: str
    """Format of the export; "bcp" if none is given."""
    rename: Sequence[tuple[str, str]]
    map_name: str | None
    map_option: Mapping[str, int | str]
    keep_unmapped: bool
    keep_names: bool
    experts: str | None

    def name_map(self) -> NameMap | None:
        """Returns the map of `--map`, None without it. Raises click.UsageError for options that would do nothing."""
        if self.keep_names and self.to != "hf":
            raise click.UsageError(f"--keep-names is for --to hf: --to {self.to} keeps all names")
        if self.experts is not None and self.to != "hf":
            raise click.UsageError(f"--experts is for --to hf: --to {self.to} keeps experts as they are")
        if self.map_name:
            return NameMap(self.map_name, self.map_option, self.keep_unmapped)
        if self.map_option or self.keep_unmapped or self.map_name is not None:
            raise click.UsageError("--map takes a name or a file; --map-option and --keep-unmapped are for --map")
        return None


def _parse_rules(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Returns pattern and replacement of each text, which is split at its last `=`."""
    rules = []
    for text in texts:
        old, separator, new = text.rpartition("=")
        if not separator:
            raise click.BadParameter(f"{text!r} is not of the form OLD=NEW", ctx=ctx, param=param)
        try:
            re.sub(old, new, "")
        except (re.error, IndexError, OverflowError) as error:  # also of a group or a count that no pattern has
            raise click.BadParameter(
                f"{text!r} is not a pattern and replacement: {error}", ctx=ctx, param=param
            ) from error
        rules.append((old, new))
    return rules


def _parse_map_options(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, int | str]:
    try:
        return parse_options(texts)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx=ctx, param=param) from error


_OPTIONS = (
    click.option(
        "--rename",
        multiple=True,
        metavar="OLD=NEW",
        callback=_parse_rules,
        help="Rename by a pattern and a replacement for Python's re.sub, divided at the last =, as the rules of "
        "key_map in bcp.load: --rename '^model\\.=net.'. May be repeated; applied in order.",
    ),
    click.option(
        "--map",
        "map_name",
        metavar="NAME|FILE",
        help="Take names and shapes of another framework: megatron-gpt-to-hf-llama, hf-llama-to-megatron-gpt, or a "
        "file of your own (docs/name_maps.md). The options above get the names that come of it.",
    ),
    click.option(
        "--map-option",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_parse_map_options,
        help="Give what the map needs and the checkpoint does not say: --map-option heads=32. May be repeated.",
    ),
    click.option(
        "--keep-unmapped",
        is_flag=True,
        help="With --map: keep tensors of the model that it does not know, as they are.",
    ),
    click.option("--keep-names", is_flag=True, help="With --to hf: drop no name that stands before all others."),
    click.option(
        "--experts",
        type=click.Choice((*EXPERT_NAMES, FUSED)),
        metavar="NAMES",
        help="With --to hf: choose names for experts that transformers 5 holds in one tensor. qwen2_moe: gate_proj, "
        "up_proj and down_proj of each. mixtral: w1, w3 and w2 below block_sparse_moe. fused: as they are. Without it: "
        "what model_type in a config.json at the target or beside the source asks for, else qwen2_moe.",
    ),
)


def with_name_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of NameOptions but `--to`, which the command must have. The command gets them and `--to` as
    `names`, and `is_renamed`: True if `--to`, `--rename` or `--map` was given.
    """

    @wraps(command)
    def run(*, to: str | None, **given: Any) -> Any:
        names = NameOptions(to or "bcp", **{name: given.pop(name) for name in NameOptions._fields[1:]})
        return command(names=names, is_renamed=bool(to or names.rename or names.map_name), **given)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run
