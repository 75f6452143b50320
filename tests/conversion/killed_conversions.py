"""Run as a script: converts a checkpoint again and again, each time into another folder and in a child that is killed
one step later, until one lives to the end. A step is a call that changes what is stored.

    python killed_conversions.py SOURCE FOLDER [OPTION ...]

FOLDER gets `0`, `1`, ...; the number of the last, which was not killed, is printed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import torch.distributed.checkpoint  # noqa: F401  a child that is forked does not import it again

from bytecheckpoint.storage.backends import direct_io, local_store, posix_files
from bytecheckpoint.tools.main import cli

STEPS = [
    (direct_io, "write_fully"),
    (direct_io, "write_some"),
    (posix_files, "sync_folder"),
    (local_store, "sync_folder"),
    (local_store, "publish"),
    (local_store, "make_folders"),
    (local_store, "remove_quietly"),
    (os, "unlink"),
    (os, "link"),
]


def main() -> None:
    source, folder, *options = sys.argv[1:]
    for number in count():
        child = os.fork()
        if not child:
            kill_at(number)
            cli.main(["convert", source, f"{folder}/{number}", *options])
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.stdout.write(f"{number} {os.waitstatus_to_exitcode(status)}\n")
            return


def kill_at(step: int) -> None:
    """Lets this process be killed right before its call of that number."""
    calls = count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for module, name in STEPS:
        setattr(module, name, counted(getattr(module, name)))


if __name__ == "__main__":
    main()
