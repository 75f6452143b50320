"""What runs in a worker of the pool: it takes calls from a pipe, runs each in a process group of its own, and sends
back what came of it. When to call, wait or give up is for the pool, in workers.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

_RENDEZVOUS_S = 120.0


class RemoteError(Exception):
    """Stands for an exception that cannot be rebuilt here: its type's name, its arguments, its attributes."""

    def __init__(self, type_name: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> None:
        self.type_name = type_name
        self.remote_args = args
        self.attributes = attributes
        super().__init__(f"{type_name}{args!r}")


class Group(NamedTuple):
    """Where the ranks of a call meet."""

    port: int
    prefix: str
    world_size: int


@dataclass(frozen=True)
class Call:
    """What a worker is asked to do."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    world_size: int
    group: Group | None
    filters: Sequence[Any] = field(repr=False)

    def function(self) -> Callable[..., Any]:
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return found


@dataclass(frozen=True)
class SentError:
    """An exception on its way. Rebuilt without calling `__init__`, which may want more than `args`."""

    pickled_type: bytes | None
    type_name: str
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    cause: SentError | None

    def rebuild(self) -> BaseException:
        if self.pickled_type is None:
            error: BaseException = RemoteError(self.type_name, self.args, self.attributes)
        else:
            cls = pickle.loads(self.pickled_type)
            error = cls.__new__(cls, *self.args)
            error.args = self.args
            error.__dict__.update(self.attributes)
        error.__cause__ = self.cause.rebuild() if self.cause else None
        return error


def _pack(error: BaseException) -> SentError:
    cls = type(error)
    args = tuple(value if _can_pickle(value) else repr(value) for value in error.args)
    attributes = {name: value if _can_pickle(value) else repr(value) for name, value in error.__dict__.items()}
    pickled_type = pickle.dumps(cls) if _can_pickle(cls) and args == error.args else None
    cause = _pack(error.__cause__) if error.__cause__ is not None else None
    return SentError(pickled_type, f"{cls.__module__}.{cls.__qualname__}", args, attributes, cause)


def _can_pickle(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # noqa: BLE001  # pickling runs anybody's code
        return False
    return True


def serve(rank: int, connection: Connection, stacks: str) -> None:
    """The life of a worker: calls come in, outcomes go out, until the pool closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool, which then ends its workers
    import no_pickle
    import no_sync
    import torch

    no_pickle.install()
    no_sync.install()
    torch.set_num_threads(1)
    gc.freeze()  # a collection would copy every page that the server has filled
    with Path(stacks).open("w") as file:
        faulthandler.enable(file=file, all_threads=True)  # what a crash in native code leaves behind
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        connection.send_bytes(b"ready")
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                _answer(rank, connection, pickle.loads(connection.recv_bytes()))


def _answer(rank: int, connection: Connection, call: Call) -> None:
    value, error = _attempt(_run_call, rank, call)
    if error is not None:
        # The group of a rank that failed goes at once: the others, in a collective with it, then fail as well.
        _attempt(_leave_group)
    connection.send_bytes(_encode(value, error))
    connection.recv_bytes()
    _, error = _attempt(_leave_group)
    connection.send_bytes(_encode(None, error))


def _attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, SentError | None]:
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001  # whatever a test raises is its outcome, SystemExit included
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
        return None, _pack(error)


def _encode(value: Any, error: SentError | None) -> bytes:
    encoded, refusal = _attempt(pickle.dumps, (value, error))
    return pickle.dumps((None, refusal)) if refusal is not None else encoded


def _run_call(rank: int, call: Call) -> Any:
    function = call.function()
    if call.group is not None:
        _join_group(rank, call.group)
    with warnings.catch_warnings():
        warnings.filters[:] = list(call.filters)
        warnings._filters_mutated()
        return function(rank, call.world_size, *call.args)


def _join_group(rank: int, group: Group) -> None:
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", group.port, is_master=False, timeout=timedelta(seconds=_RENDEZVOUS_S))
    store = dist.PrefixStore(group.prefix, server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=group.world_size)
    # A rank that fails at once would take its group down while others, on a busy machine, still connect with it.
    store.set(f"joined {rank}", "")
    store.wait([f"joined {other}" for other in range(group.world_size)], timedelta(seconds=_RENDEZVOUS_S))


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
