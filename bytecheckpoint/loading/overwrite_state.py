"""What a load that fails leaves of the state of this rank: all as it was, memory that is not filled, or old and new
values side by side. It knows nothing of how a load works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.errors import CheckpointError

_BEFORE_USE = "load a good checkpoint into it before it is used"


class Changes:
    """What one load has done to the state so far. May be told from any thread: what is true stays true."""

    def __init__(self) -> None:
        self._may_have_made_memory = False
        self.may_have_overwritten = False
        self._has_overwritten = False

    def make_memory(self) -> None:
        """What has no memory is about to be given some."""
        self._may_have_made_memory = True

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Within the block something of the state is overwritten, and has been when the block ends without an error."""
        self.may_have_overwritten = True
        yield
        self._has_overwritten = True

    def told(self, whose: str) -> str:
        """What has become of the state, and what follows from that. `whose` it is stands behind `the state`."""
        if self._has_overwritten:
            return f"The state{whose} is partly overwritten: {_BEFORE_USE}"
        if self.may_have_overwritten:
            return f"The state{whose} may be partly overwritten: {_BEFORE_USE}"
        if self._may_have_made_memory:
            unfilled = "but what had no memory may have some now that is not filled"
            return f"Nothing of the state{whose} was overwritten, {unfilled}: {_BEFORE_USE}"
        return f"Nothing of the state{whose} was overwritten"


@contextmanager
def telling(changes: Changes, ranks: Ranks) -> Iterator[None]:
    """The message of a CheckpointError ends with what has become of the state of this rank: the others know theirs."""
    try:
        yield
    except CheckpointError as error:
        is_sole = ranks.num_ranks == 1
        told = changes.told("" if is_sole else f" of rank {ranks.global_ranks[ranks.rank]}")
        others = "" if is_sole else ". The error of every other rank says that of its own"
        raise type(error)(
            f"{error.message}. {told}{others}", kind=error.kind, path=error.path, step=error.step, ranks=error.ranks
        ) from error.__cause__
