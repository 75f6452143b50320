"""A way to call the program in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from bytecheckpoint.tools.main import cli


class Ended(NamedTuple):
    """What a call of the program left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Ended]


@pytest.fixture
def call() -> Call:
    """Runs `bcp` with these arguments; whatever it does not turn into an exit code fails the test."""

    def run(*args: object) -> Ended:
        result = CliRunner().invoke(cli, [str(arg) for arg in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ended(result.exit_code, result.stdout, result.stderr)

    return run
