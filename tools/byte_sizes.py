"""Sizes on the command line: `2GB`, `512MiB`, `1000000`."""

from __future__ import annotations

import re
from math import inf, isfinite
from typing import Any

import click

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\A([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)\Z")


class ByteSize(click.ParamType[int]):
    """A number of bytes, with or without a unit: 1 GB is 1000 MB, 1 GiB is 1024 MiB."""

    name = "size"

    def __init__(self, minimum: str) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        num_bytes = parse_bytes(value)
        if num_bytes is None:
            self.fail(f"{value!r} is no size: 2GB, 512MiB or 1000000 would be one", param, ctx)
        if num_bytes < (parse_bytes(self._minimum) or 0):
            self.fail(f"{value} is less than {self._minimum}", param, ctx)
        return num_bytes


def parse_bytes(text: str) -> int | None:
    """None where it is no size."""
    found = _SIZE.match(str(text))
    unit = _UNITS.get(found.group(2).upper()) if found else None
    num_bytes = float(found.group(1)) * unit if found and unit else inf
    return round(num_bytes) if isfinite(num_bytes) else None
