"""Records what a load has done to the state of this rank, for the error of a load that fails: nothing, memory that is
not filled, or old and new values side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.errors import CheckpointError

_BEFORE_USE = "load a good checkpoint into it before it is used"


class StateChanges:
    """Changes of the state by one load. Methods may be called from any thread: a flag that is set stays set."""

    def __init__(self) -> None:
        self._may_have_made_memory = False
        self.may_have_overwritten = False
        self._has_overwritten = False

    def note_new_memory(self) -> None:
        """Notes that tensors without memory are about to be given some."""
        self._may_have_made_memory = True

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Notes that the block may overwrite some of the state; when it ends without an error, that it has done so."""
        self.may_have_overwritten = True
        yield
        self._has_overwritten = True

    def describe(self, whose: str) -> str:
        """Returns a sentence on the state's condition and what to do now; `whose` follows `the state` in it."""
        if self._has_overwritten:
            return f"The state{whose} is partly overwritten: {_BEFORE_USE}"
        if self.may_have_overwritten:
            return f"The state{whose} may be partly overwritten: {_BEFORE_USE}"
        if self._may_have_made_memory:
            unfilled = "but what had no memory may have some now that is not filled"
            return f"Nothing of the state{whose} was overwritten, {unfilled}: {_BEFORE_USE}"
        return f"Nothing of the state{whose} was overwritten"


@contextmanager
def report_overwrite(changes: StateChanges, ranks: Ranks) -> Iterator[None]:
    """Adds a sentence to the message of a CheckpointError: the state of this rank was overwritten, or was not."""
    try:
        yield
    except CheckpointError as error:
        is_sole = ranks.num_ranks == 1
        state = changes.describe("" if is_sole else f" of rank {ranks.global_ranks[ranks.rank]}")
        others = "" if is_sole else ". The error of every other rank says this about its own state"
        raise type(error)(
            f"{error.message}. {state}{others}", kind=error.kind, path=error.path, step=error.step, ranks=error.ranks
        ) from error.__cause__
