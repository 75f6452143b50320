"""Stops of a training loop: signals and requests of any rank, agreed on by all at the end of a step. The agreement is
that of `CheckpointManager`, for runs that have no such manager.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Self

from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.manager.agreement.stopping import StopRequests, join_stop
from bytecheckpoint.options import SaveOptions

_TIMEOUT_S = SaveOptions().timeout_s


class AgreedStop:
    """Stops training after the same step on all ranks. All ranks construct this object together, in their main threads,
    and all close it: `with AgreedStop(folder) as stop:`.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, signals: Sequence[str] = ("SIGTERM",), timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Handles the signals until `close`. `root` only names the run in errors. Waits at most `timeout_s` for the
        other ranks, here and in `end_step`.
        """
        decisions = Decisions(None, os.fspath(root), timeout_s=timeout_s)
        token = decisions.decide_together("beginning to train", partial(secrets.token_hex, 8), str)
        self._requests = StopRequests(signals, deadlines=(), needed_s=float)
        self._agreement = join_stop(self._requests, None, token=token, timeout_s=timeout_s)

    @property
    def reason(self) -> str:
        """The reason of the stop, such as `SIGTERM`. Empty until this rank knows of a request, which may be some steps
        before `end_step` returns True.
        """
        return self._agreement.reason

    def request(self, reason: str) -> None:
        """Requests a stop of all ranks. A call on any one rank, from any thread, is enough."""
        self._requests.request(reason, deadline_s=None)

    def end_step(self) -> bool:
        """Returns True, on all ranks after the same step, if training is to stop. All ranks call it after each step.

        Waits for other ranks only once a stop was requested; raises CheckpointError (rank_missing) if some of them do
        not report their step within `timeout_s`.
        """
        return self._agreement.pass_boundary()

    def close(self) -> None:
        """Puts the old signal handlers back and ends the agreement, without a wait for other ranks."""
        self._requests.close()
        self._agreement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
