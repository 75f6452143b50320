"""The arguments of the run."""

from __future__ import annotations

from argparse import Namespace

_GIVEN: list[Namespace] = []


def set_args(args: Namespace) -> None:
    _GIVEN[:] = [args]


def get_args() -> Namespace:
    return _GIVEN[0]
