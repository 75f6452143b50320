"""The store of one call, and waits for one of its keys. A wait blocks in the server of the store, on a connection of
its own: so it costs nothing, ends at once, and holds up no other use of the store. Where that cannot be, it polls. The
keys are not known here.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.threads import shared_threads

LOOK_S = 0.25
"""Time between two looks at what else may end a wait."""
_TIMEOUT_LATER_S = 1.0
"""The server's limit for a wait beyond the caller's: torch prints a warning when it is reached."""
_EXIT_S = 10.0
"""Time that the end of a process may take, after its exit hooks."""
_SHORTEST_POLL_S = 0.0005
"""Less is not a gain: each poll takes some 0.1 ms of a core, which the rank that is awaited may need."""
_LONGEST_POLL_S = 0.02
_POLL_S_A_RANK = 0.0004
"""The polls of a whole group take the store some 5 % of a core, at 20 us each."""


class WaitingClients:
    """The connections on which this process waits for keys in the store of a process group. Later waits reuse them."""

    def __init__(self, store: Store, num_ranks: int) -> None:
        self.store = store
        self.longest_poll_s = max(_LONGEST_POLL_S, num_ranks * _POLL_S_A_RANK)
        # A FileStore polls its file, and removes it when as many were closed as there are ranks. torch before 2.8
        # cannot clone, and a store of someone else's may block all its users in a wait.
        self._can_block = isinstance(base_of(store), HashStore | TCPStore) and hasattr(store, "clone")
        self._idle: list[Store] = []
        self._under_way: dict[Future[bool], float] = {}
        """Waits, also those whose result is no longer wanted, with their ends on the monotonic clock."""
        atexit.register(_await_waits, weakref.ref(self), os.getpid())

    def begin(self, prefix: str, key: str, limit_s: float) -> Future[bool]:
        """Starts a wait on a thread: its result is True once the key is there, False after `limit_s`, or a RuntimeError
        if the connection breaks. Raises RuntimeError if this kind of store, or the lack of a thread, allows no such
        wait.
        """
        if not self._can_block:
            raise RuntimeError("this kind of store is polled")
        arrived = shared_threads().submit("bcp-wait", lambda: self._block(prefix, key, limit_s))
        self._under_way[arrived] = time.monotonic() + limit_s
        arrived.add_done_callback(lambda ended: self._under_way.pop(ended, None))
        return arrived

    def await_ending(self) -> None:
        """Blocks until the waits whose limit ends within `_EXIT_S` from now have ended. Longer waits go on."""
        now = time.monotonic()
        soon = {arrived: until - now for arrived, until in [*self._under_way.items()] if until - now < _EXIT_S}
        if soon:
            wait(soon, max(soon.values()) + _TIMEOUT_LATER_S)

    def _block(self, prefix: str, key: str, limit_s: float) -> bool:
        """Waits with a client of its own. Returns False after the limit."""
        try:
            client = self._idle.pop()
        except IndexError:
            client = self.store.clone()  # type: ignore[attr-defined]  # torch declares it for Python only
        try:
            (PrefixStore(prefix, client) if prefix else client).wait([key], timedelta(seconds=limit_s))
        except DistStoreError:  # the limit
            return False
        self._idle.append(client)  # not after an error, when an answer may still be under way
        return True


def _await_waits(reference: weakref.ref[WaitingClients], process: int) -> None:
    """Blocks until those waits have ended that could end while the interpreter is torn down: a thread that returns from
    torch then would end the process with SIGABRT. Does nothing in another process than `process`.
    """
    clients = reference()
    if clients is not None and os.getpid() == process:
        clients.await_ending()


class CallStore:
    """The store as the messages of one call use it."""

    def __init__(self, clients: WaitingClients, prefix: str = "") -> None:
        self.store: Store = PrefixStore(prefix, clients.store) if prefix else clients.store
        self._clients = clients
        self._prefix = prefix

    def is_set(self, *keys: str) -> bool:
        return not keys or bool(self.store.check(list(keys)))

    def remove(self, *keys: str) -> None:
        for key in keys:
            self.store.delete_key(key)

    def wait(self, key: str, limit_s: float, *, look: Callable[[], object] | None = None, is_own: bool = False) -> bool:
        """Returns True once the key is there, or False after the limit. `look` is called every LOOK_S; it may set the
        key itself, or raise. `is_own` says that nobody else waits for this key: after the limit it is then set and
        removed, which ends the wait in the server.
        """
        if self.is_set(key):
            return True
        deadline = time.monotonic() + limit_s
        try:
            return self._block(key, deadline, look, is_own=is_own)
        except CheckpointError:  # a signal handler's, or a look's
            raise
        except RuntimeError:  # no thread, no connection, or this one broke: the store itself may be well
            return self._poll(key, deadline, look)

    def _block(self, key: str, deadline: float, look: Callable[[], object] | None, *, is_own: bool) -> bool:
        arrived = self._clients.begin(self._prefix, key, deadline - time.monotonic() + _TIMEOUT_LATER_S)
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                return arrived.result(min(left_s, LOOK_S))
            except TimeoutError:
                if arrived.done():  # the wait has just ended, or this is its own error
                    return arrived.result()
                if look is not None:
                    look()
        if is_own and not self.is_set(key):
            self.store.set(key, "")
            self.remove(key)
            return False
        return self.is_set(key)

    def _poll(self, key: str, deadline: float, look: Callable[[], object] | None) -> bool:
        """Waits without a blocking call, by asking for the key again and again."""
        started = looked = time.monotonic()
        while not self.is_set(key):
            now = time.monotonic()
            if now > deadline:
                return False
            if look is not None and now - looked > LOOK_S:
                looked = now
                look()
            # Backoff in proportion, so that an answer is never noticed much later than it came.
            time.sleep(min(max((now - started) / 10, _SHORTEST_POLL_S), self._clients.longest_poll_s))
        return True


def base_of(store: Store) -> Store:
    """Returns the store under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
