"""A proxy on 127.0.0.1 between the client of an object store and its server, which does to requests what networks and
busy services do to them. Of HTTP it knows where a request and its answer begin and end, and nothing of S3 but what
requests look like. Every request has a connection of its own to the server; the client's ends with the answer.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

REQUESTS = {
    "any": r"",
    "head": r"^HEAD ",
    "list": r"^GET /[^/?]+/?\?",
    "get": r"^GET /[^/?]+/[^?]",
    "manifest": r"^PUT /[^?]*/manifest\.bcp",
    "data": r"^PUT /[^?]*/data/",
    "telemetry": r"^PUT /[^?]*/telemetry/",
    "create": r"^POST /[^?]*\?(.*&)?uploads\b",
    "complete": r"^POST /[^?]*\?(.*&)?uploadId=",
    "abort": r"^DELETE /[^?]*\?(.*&)?uploadId=",
    "delete": r"^DELETE /(?!.*[?&]uploadId=)",
}
"""Sorts of requests, as patterns of their first lines."""

KINDS = {
    "reset": "the connection is reset before anything reaches the server",
    "refuse": "the answer is 503 SlowDown, and nothing reaches the server",
    "error_within": "the answer is 200 with an error for a body, and nothing reaches the server",
    "cut_request": "the server gets `num_bytes` of the body; then both connections end",
    "cut_answer": "the server does what it was asked to; the client gets `num_bytes` of the answer (0: it is lost)",
    "stall_request": "the server gets `num_bytes` of the body, and nothing moves until the client gives up",
    "stall_answer": "the server does what it was asked to; the client gets `num_bytes`, and nothing moves any more",
    "late": "nothing moves until the client gives up; then the server gets the whole request",
}
FOR_GOOD = 1 << 30
"""As a count: to every request from the first on."""

_CHUNK_BYTES = 64 << 10
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_INTERNAL_ERROR = b"<Error><Code>InternalError</Code><Message>We met an internal error.</Message></Error>"
_RESET = struct.pack("ii", 1, 0)
_SETTLED_S = 30.0


class Fault(NamedTuple):
    """What happens to `count` requests of a sort, from number `first` (the first is 1) on."""

    kind: str
    where: str
    first: int
    count: int
    num_bytes: int
    is_reset: bool
    """Whether a cut resets the connections; they are closed in good order otherwise."""

    def hits(self, number: int) -> bool:
        return self.first <= number < self.first + self.count


class Met(NamedTuple):
    """A fault that came about."""

    fault: Fault
    line: str
    """The first line of the request."""


class Pace(NamedTuple):
    """How fast the network is."""

    latency_s: float
    """Before each request."""
    bytes_per_s: float
    """Of each connection, in either direction."""


AT_ONCE = Pace(0.0, float("inf"))


class FaultProxy:
    """Passes requests on to a port of 127.0.0.1; `begin` says what goes wrong from then on. Used by one thread."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.met: list[Met] = []
        self.lines: list[str] = []
        """First lines of the requests, in the order in which they came, each with what happened to it."""
        self.before_passing: Callable[[str], object] | None = None
        """Called in a thread of its own with the first line of each request that is about to reach the server. Where
        it raises, the client loses its connection, and `heal` raises the same."""
        self.raised: list[Exception] = []
        """By `before_passing`, since the last `heal`."""
        self._target_port = target_port
        self._faults: Sequence[Fault] = ()
        self._pace = AT_ONCE
        self._counts: Counter[str] = Counter()
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="fault-proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self, faults: Sequence[Fault] = (), pace: Pace = AT_ONCE) -> None:
        """From now on these faults come about, and the counts of requests begin anew."""
        self.met, self.lines = [], []
        self._counts.clear()
        self._faults, self._pace = faults, pace

    def heal(self) -> None:
        """No more faults, and nothing is under way any more when it returns; what was met stays to be looked at."""
        self._faults, self._pace = (), AT_ONCE
        assert self._is_idle.wait(_SETTLED_S), f"requests are still under way: {self.lines}"
        if self.raised:
            error = self.raised[0]
            self.raised.clear()
            raise error

    def start(self) -> None:
        self._thread.start()
        assert self._is_up.wait(_SETTLED_S), "the proxy did not start"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._over.wait()
        server.close()
        for task in list(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        self._is_idle.clear()
        try:
            await self._serve_one(_Side(reader, writer))
        except (OSError, EOFError):
            _end(writer, is_reset=True)  # one side is gone, so the other is let go
        finally:
            _end(writer, is_reset=False)
            self._under_way.discard(task)
            if not self._under_way:
                self._is_idle.set()

    async def _serve_one(self, client: _Side) -> None:
        request = _Request(await client.reader.readuntil(b"\r\n\r\n"))
        fault = self._fault_of(request.line)
        await asyncio.sleep(self._pace.latency_s)
        if request.expects_to_be_told:
            client.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        match fault.kind if fault else "":
            case "reset":
                _end(client.writer, is_reset=True)
            case "refuse" | "error_within" as kind:
                await _drop(client.reader, request.num_bytes)
                is_refused = kind == "refuse"
                client.writer.write(
                    request.answer(503, _SLOW_DOWN) if is_refused else request.answer(200, _INTERNAL_ERROR)
                )
                await client.writer.drain()
            case "late":
                body = await client.reader.readexactly(request.num_bytes)
                await _wait_until_gone(client.reader)
                await self._pass_late(request, body)
            case _:
                await self._pass(client, request, fault)

    def _fault_of(self, line: str) -> Fault | None:
        sorts = [sort for sort, pattern in REQUESTS.items() if re.search(pattern, line)]
        self._counts.update(sorts)
        hitting = [fault for fault in self._faults if fault.where in sorts and fault.hits(self._counts[fault.where])]
        fault = hitting[0] if hitting else None
        self.lines.append(f"{line}  <- {fault.kind} {fault.num_bytes}" if fault else line)
        if fault:
            self.met.append(Met(fault, line))
        return fault

    async def _pass(self, client: _Side, request: _Request, fault: Fault | None) -> None:
        limits = {fault.kind: fault.num_bytes} if fault else {}
        ends_early = limits.get("cut_request", limits.get("stall_request"))
        server = await self._reach_server(request.line)
        try:
            server.writer.write(request.head)
            await self._copy(client, server, request.num_bytes if ends_early is None else ends_early % request.size)
            if ends_early is None:
                await self._pass_answer(client, server, limits.get("cut_answer", limits.get("stall_answer")))
            if fault and fault.kind.startswith("stall"):
                await _wait_until_gone(client.reader)
            elif fault:
                _end(client.writer, is_reset=fault.is_reset)
        finally:
            # Of a request that was cut short the server must not wait for the rest.
            _end(server.writer, is_reset=fault is not None and fault.is_reset)

    async def _pass_answer(self, client: _Side, server: _Side, num_bytes: int | None) -> None:
        """All of the answer, or so many bytes of it."""
        head = await server.reader.readuntil(b"\r\n\r\n")
        status, _, rest = head.partition(b"\r\n")
        head = status + b"\r\nConnection: close\r\n" + re.sub(rb"(?im)^Connection:.*\r\n", b"", rest)
        client.writer.write(head if num_bytes is None else head[:num_bytes])
        await self._copy(server, client, None if num_bytes is None else max(0, num_bytes - len(head)))

    async def _pass_late(self, request: _Request, body: bytes) -> None:
        server = await self._reach_server(request.line)
        server.writer.write(request.head + body)
        await server.reader.read(-1)
        _end(server.writer, is_reset=False)

    async def _reach_server(self, line: str) -> _Side:
        if self.before_passing is not None:
            try:
                await asyncio.to_thread(self.before_passing, line)
            except Exception as error:
                self.raised.append(error)
                raise ConnectionAbortedError("nothing is passed on: before_passing raised") from error
        return _Side(*await asyncio.open_connection("127.0.0.1", self._target_port))

    async def _copy(self, source: _Side, target: _Side, num_bytes: int | None) -> None:
        """So many bytes, or all that there are. Raises EOFError where there are less."""
        while num_bytes is None or num_bytes > 0:
            chunk = await source.reader.read(_CHUNK_BYTES if num_bytes is None else min(_CHUNK_BYTES, num_bytes))
            if not chunk and num_bytes is None:
                break
            if not chunk:
                raise EOFError("the connection ended too early")
            target.writer.write(chunk)
            await target.writer.drain()
            await asyncio.sleep(len(chunk) / self._pace.bytes_per_s)
            num_bytes = None if num_bytes is None else num_bytes - len(chunk)
        await target.writer.drain()


class _Side(NamedTuple):
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _Request:
    """The head of a request."""

    def __init__(self, head: bytes) -> None:
        first, _, rest = head.partition(b"\r\n")
        self.line = first.decode("latin-1").removesuffix(" HTTP/1.1")
        self.expects_to_be_told = re.search(rb"(?im)^Expect:.*100-continue", rest) is not None
        assert not re.search(rb"(?im)^Transfer-Encoding:", rest), f"its length is not known ahead: {self.line}"
        length = re.search(rb"(?im)^Content-Length: *(\d+)", rest)
        self.num_bytes = int(length[1]) if length else 0
        rest = re.sub(rb"(?im)^(?:Expect|Connection):.*\r\n", b"", rest)
        self.head = first + b"\r\nConnection: close\r\n" + rest

    @property
    def size(self) -> int:
        """At least 1, so that what is cut short is always a part."""
        return max(1, self.num_bytes)

    def answer(self, status: int, body: bytes) -> bytes:
        head = f"HTTP/1.1 {status} As Drawn\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        return head if self.line.startswith("HEAD ") else head + body


async def _drop(reader: asyncio.StreamReader, num_bytes: int) -> None:
    while num_bytes > 0:
        chunk = await reader.read(min(_CHUNK_BYTES, num_bytes))
        if not chunk:
            raise EOFError("the client is gone")
        num_bytes -= len(chunk)


async def _wait_until_gone(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(_CHUNK_BYTES):
            pass


def _end(writer: asyncio.StreamWriter, *, is_reset: bool) -> None:
    if is_reset and not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
    else:
        writer.close()


@contextmanager
def running_proxy(target_port: int) -> Iterator[FaultProxy]:
    proxy = FaultProxy(target_port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
