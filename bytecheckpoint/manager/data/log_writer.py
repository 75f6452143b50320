"""Writes one rank's positions in the background, and deletes those that nobody needs any more. A slow or failing store
never holds up training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import torch.distributed as dist

from bytecheckpoint.errors import CheckpointError, StorageError
from bytecheckpoint.manager.after_commit.retried_work import RetriedWork
from bytecheckpoint.manager.agreement.stopping import rank_in, size_of
from bytecheckpoint.manager.data.log_objects import LogRecord, branch_folder, encode_record, object_name
from bytecheckpoint.manager.ownership import Generation
from bytecheckpoint.storage.store import Store, one_block

logger = logging.getLogger("bytecheckpoint")

MAX_LOGGED_STEPS = 128
"""Newest steps of a rank that stay between two commits."""
_MAX_WAITING = 16
"""Records that wait for a slow store. Beyond that the oldest are dropped: the newest is the one that counts."""


def log_of(
    store: Store, generation: int, process_group: dist.ProcessGroup | None, *, timeout_s: float
) -> LogWriter | None:
    """Returns the log of this rank of the manager that has claimed a generation; None if it only reads."""
    if not generation:
        return None
    rank, num_ranks = rank_in(process_group), size_of(process_group)
    return LogWriter(Generation(store, generation, "", ()), rank=rank, num_ranks=num_ranks, timeout_s=timeout_s)


class LogWriter:
    """The log of one rank. Methods may be called from any thread."""

    def __init__(self, generation: Generation, *, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._generation = generation
        self._store = generation.store
        self.rank, self._num_ranks = rank, num_ranks
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._branch = 0
        self._waiting: deque[tuple[str, LogRecord]] = deque()
        self._written: dict[str, int] = {}
        """Steps by name, in the order of writing."""
        self._unneeded: list[str] = []
        self._work = RetriedWork("bcp-data-log", self._catch_up, what=f"the log of data positions in {self._store}")
        self._is_superseded = False
        self._committed = -1
        """Step that was committed last on this branch; what is logged up to it is needless."""

    @property
    def folder(self) -> str:
        """Folder of the branch that training is on."""
        return branch_folder(self._generation.number, self._branch)

    def add(self, record: LogRecord) -> None:
        """Hands over a record to be written. Ignores it if the committed step is no earlier, or another manager owns
        the root. Of more than `_MAX_WAITING` records that wait, drops the oldest. Never blocks.
        """
        with self._lock:
            if self._is_superseded or record.step <= self._committed:
                return
            self._waiting.append((object_name(self.folder, record.step, self.rank, self._num_ranks), record))
            while len(self._waiting) > _MAX_WAITING:
                self._waiting.popleft()
        self._work.ask()

    def drop_through(self, step: int) -> None:
        """Deletes, in the background, the positions up to a step that was committed. Never blocks."""
        with self._lock:
            self._committed = step
            self._waiting = deque(item for item in self._waiting if item[1].step > step)
            self._mark_unneeded([name for name, logged in self._written.items() if logged <= step])
        self._ask_to_delete()

    def begin_branch(self) -> None:
        """Begins a new log: the records before it belong to a branch that training leaves."""
        with self._lock:
            self._branch, self._committed = self._branch + 1, -1
            self._waiting.clear()
            self._mark_unneeded(list(self._written))
        self._ask_to_delete()

    def _mark_unneeded(self, names: list[str]) -> None:
        """Marks written objects for deletion. The caller holds the lock."""
        self._unneeded += names
        for name in names:
            del self._written[name]

    def _ask_to_delete(self) -> None:
        if self._unneeded:
            self._work.ask()

    def finish(self) -> None:
        """Waits until everything is written and deleted that is due. Raises CheckpointError if that fails, or makes no
        progress for `timeout_s`.
        """
        began = time.monotonic()
        failure = self._work.wait(began=began, failing_s=0.0, hanging_s=self._timeout_s)
        if isinstance(failure, CheckpointError):
            raise failure
        if failure is not None:
            raise StorageError(
                f"the log of data positions in {self._store} cannot be brought up to date: {failure!r}",
                kind="unavailable",
                path=str(self._store),
            ) from failure

    def wait(self) -> None:
        """Waits as `finish` does, and raises nothing: warns of a store that fails or hangs."""
        try:
            self.finish()
        except CheckpointError as error:
            logger.warning("%s", error)

    def close(self) -> None:
        """Waits as `wait` does, and ends the thread."""
        self.wait()
        self._work.close()

    def _catch_up(self) -> None:
        try:
            self._write_all()
        finally:  # also where there is no space to write: this makes some
            while self._unneeded:
                self._store.delete(self._unneeded[0])
                self._unneeded.pop(0)
                self._work.note_progress()

    def _write_all(self) -> None:
        while (item := self._next()) is not None:
            name, record = item
            try:
                if not self._generation.is_newest():
                    self._note_superseded()
                    return
                self._store.write(name, one_block(encode_record(record)), replace=True)
            except BaseException:
                self._put_back(item)
                raise
            self._work.note_progress()
            self._note_written(name, record.step)

    def _next(self) -> tuple[str, LogRecord] | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _put_back(self, item: tuple[str, LogRecord]) -> None:
        """Puts a record whose write has failed first in line again, unless it has become needless meanwhile."""
        name, record = item
        with self._lock:
            if self._is_needless(name, record.step):
                self._unneeded.append(name)  # it may have been written all the same
            else:
                self._waiting.appendleft(item)

    def _note_written(self, name: str, step: int) -> None:
        with self._lock:
            if self._is_needless(name, step):
                self._unneeded.append(name)
                return
            self._written.pop(name, None)
            self._written[name] = step
            self._mark_unneeded(list(self._written)[:-MAX_LOGGED_STEPS])

    def _is_needless(self, name: str, step: int) -> bool:
        """Returns True if a commit or a new branch makes this object needless. The caller holds the lock."""
        return step <= self._committed or not name.startswith(f"{self.folder}/")

    def _note_superseded(self) -> None:
        with self._lock:
            self._is_superseded = True
            self._waiting.clear()
        logger.error(
            "%s belongs to another manager since this one was made: positions of data loaders are not logged any more, "
            "and the next save raises this",
            self._store,
        )
