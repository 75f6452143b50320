"""State of data loaders that is gathered in the step before a save, so that the save need not wait for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.adapters.collect import data_loaders_in

logger = logging.getLogger("bytecheckpoint")


class PreparedState:
    """The preparation of one save at a time, on this rank."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._failure: Exception | None = None

    def prepare(self, step: int, state: Mapping[str, Any]) -> None:
        """Lets each loader of the state gather what the save of `step` will want. Once for each step.

        An error is kept for that save: raised here, on one rank in the middle of training, it would leave the other
        ranks waiting for this one.
        """
        if step == self._step:
            return
        self._step, self._failure = step, None
        try:
            for loader in data_loaders_in(state).values():
                loader.prepare_state()
        except Exception as error:
            logger.exception("the state of a data loader was not prepared; the save of step %d raises this", step)
            self._failure = error

    def raise_failure(self, step: int) -> None:
        """Raises, once, the error that the preparation of this step has met."""
        if self._failure is None or step != self._step:
            return
        failure, self._failure = self._failure, None
        raise failure

    def forget(self) -> None:
        """Forgets the preparation: training goes on from another step."""
        self._step = self._failure = None
