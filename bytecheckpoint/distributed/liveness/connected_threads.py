"""The threads of one call on one rank, and the connections that they use. The first failure, on any of them or on
another rank, ends what all have under way. It does not know what is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from bytecheckpoint.distributed.connection import Connection, PeerLeftError
from bytecheckpoint.distributed.failures import no_thread
from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.distributed.rendezvous import MAX_UNAUTHENTICATED, connect
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.threads import shared_threads

TELL_S = 10.0
"""Time in which a rank that has failed still connects to the ranks that wait for it, so that they see it leave."""
_LOOK_S = 1.0
_LOOK_S_A_RANK = 0.0008
"""The two looks of each rank of a whole group take the store some 5 % of a core, at 20 us each."""


class ConnectedThreads:
    """Threads that fail together. A subclass has `_stop`, which ends all their waits and can be called again."""

    def __init__(
        self, ranks: Ranks, num_threads: int, *, name: str, use: str, initializer: Callable[[], object] | None = None
    ) -> None:
        """`use` says for an error what takes threads. Besides `num_threads` there are those that a Listener needs."""
        self._ranks = ranks
        self._use = use
        # Threads of its own, so many and no more: connections of unknown processes must not start others.
        self._pool = ThreadPoolExecutor(num_threads + 2 * MAX_UNAUTHENTICATED, name, initializer)
        self._futures: list[Future[object]] = []
        self._inbound: list[Connection] = []
        """Connections to ranks that this one takes bytes from, also those that are not established yet."""
        self._outbound: list[Connection] = []
        self._errors: list[BaseException] = []
        """Errors of all threads, in the order in which they were raised."""
        self._is_over = threading.Event()
        """Set with the first error."""
        self._is_interrupted = threading.Event()
        """Set when no more connections are to be made."""

    def _stop(self) -> None:
        raise NotImplementedError

    def _start(self, do: Callable[..., object], *arguments: object) -> Future[object]:
        """Calls `do` on a thread. Raises CheckpointError (rank_failed) if there can be no more threads."""
        try:
            self._futures.append(self._pool.submit(self._failing_together()(do), *arguments))
        except CheckpointError:  # raised by a signal handler
            raise
        except RuntimeError as error:
            raise no_thread(error, self._use) from error
        return self._futures[-1]

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Runs a block. The first error in any such block, on any thread, ends what all have under way."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._is_over.set()
        self._stop()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Runs a block while a thread looks about once a second, less often in a large group, if the call has failed
        on another rank: one that has ended before it was connected breaks no connection. If there can be no such
        thread, runs the block alone.

        When the call has failed, calls `_fail`: with the CheckpointError (rank_missing) about ranks that have ended and
        send their messages to this one, else with PeerLeftError.
        """
        over, lock = threading.Event(), threading.Lock()

        def look() -> None:
            try:
                while not over.wait(max(_LOOK_S, self._ranks.num_ranks * _LOOK_S_A_RANK)):
                    if self._ranks.has_failed():
                        raise PeerLeftError
            except (CheckpointError, PeerLeftError) as error:
                with lock:
                    if not over.is_set():
                        self._fail(error)

        try:
            shared_threads().begin("bcp-failures", look)
        except RuntimeError as error:  # no more threads: failures are told by connections, and at the time limit
            if isinstance(error, CheckpointError):  # raised by a signal handler
                raise
        try:
            yield
        finally:
            with lock:
                over.set()

    def _connection_to(self, rank: int, address: Address, request: bytes, *, timeout_s: float) -> Connection:
        """Returns a connection to a rank of the group, over which `request` has been sent. Raises as `connect` does."""
        own_rank, global_rank = self._ranks.rank, self._ranks.global_ranks[rank]
        opened, is_over = self._inbound.append, self._is_interrupted
        return connect(global_rank, address, own_rank, request, timeout_s=timeout_s, on_open=opened, is_over=is_over)

    def _interrupt(self) -> None:
        """Interrupts all connections, and lets no more be opened."""
        self._is_interrupted.set()
        for connection in (*self._inbound, *self._outbound):
            connection.interrupt()

    def _close(self, limit_s: float) -> None:
        """Waits for all threads, and closes the connections. After an error, interrupts the connections if threads
        still use them `limit_s` later.
        """
        if self._errors:
            wait(self._futures, timeout=limit_s)
            self._interrupt()
        self._pool.shutdown()
        for connection in (*self._inbound, *self._outbound):
            connection.close()
