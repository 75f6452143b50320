"""What a reader passes on to each taker, parcel by parcel, and the signs of life that it gives meanwhile. It knows
nothing of what is read.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bytecheckpoint.distributed.connection import Connection
from bytecheckpoint.distributed.wire import FAREWELL, SIGN_OF_LIFE, Parcel

_LOOK_S = 0.1
"""How often a taker to whom there is nothing to send is looked after."""


class Activity:
    """Whether this rank gets on. It does when it has read something, and while it waits for another rank: that wait has
    a limit of its own, at which it will say who does not move.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_steps = 0
        self._num_waiting = 0

    def step(self) -> None:
        with self._lock:
            self._num_steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block this rank waits for another one."""
        with self._lock:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._num_steps += 1

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def gets_on(self, num_steps: int) -> bool:
        """Whether it does, or has since it had made so many steps."""
        with self._lock:
            return self._num_waiting > 0 or self._num_steps > num_steps


class Outbox:
    """What is on its way to one taker. Parcels may be put in from any thread, and are sent by one."""

    def __init__(self, connection: Connection, *, num_parcels: int, activity: Activity, beat_s: float) -> None:
        """`beat_s` is how often the taker hears that this rank gets on, where it hears nothing else."""
        self.connection = connection
        self._num_left = num_parcels
        self._num_steps_told = activity.num_steps
        self._activity = activity
        self._beat_s = beat_s
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        """None is the end."""

    def put(self, parcel: Parcel) -> None:
        self._parcels.put(parcel)

    def end(self) -> None:
        """Nothing more will be put in."""
        self._parcels.put(None)

    def send_all(self, is_over: threading.Event) -> None:
        """Sends parcels until there are no more and the taker has them, or says that this rank breaks off.

        Raises PeerLeftError or CheckpointError (rank_missing) about the taker.
        """
        while self._num_left and (parcel := self._next()) is not None and not is_over.is_set():
            with self._activity.waiting():
                for content in parcel.content:
                    self.connection.send(content)
            parcel.sent()
            self._num_left -= 1
        if is_over.is_set():
            self.connection.send(FAREWELL)
        elif not self._num_left:
            with self._activity.waiting():
                self.connection.await_receipt()

    def _next(self) -> Parcel | None:
        """What to send next; while there is nothing, the taker is looked after."""
        told_at = time.monotonic()
        while True:
            with suppress(queue.Empty):
                return self._parcels.get(timeout=_LOOK_S)
            self.connection.look_after_taker()
            if time.monotonic() - told_at >= self._beat_s and self._activity.gets_on(self._num_steps_told):
                self._num_steps_told, told_at = self._activity.num_steps, time.monotonic()
                self.connection.send(SIGN_OF_LIFE)
