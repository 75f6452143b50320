"""`RankLocal`, a value that differs from rank to rank, and what a save and a load do with it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTree
from bytecheckpoint.adapters.data.stream_wire import ONLY_FOR_LOADERS, is_stream_tree
from bytecheckpoint.adapters.expectation import (
    EntryContents,
    Expectation,
    Problem,
    RankMissing,
    not_stored,
    rank_missing,
)
from bytecheckpoint.adapters.native.subclass_flatten import subclasses_in
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.rank_values.generators import (
    FoundGenerator,
    at,
    generators_in,
    is_there,
    problems_of,
    put_back,
    set_state,
    with_states,
)
from bytecheckpoint.adapters.rank_values.merge_values import MergeRule, MergeTarget, check_mergeable
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.adapters.stateful import add_metadata, give_state, is_stateful
from bytecheckpoint.adapters.tree_loader import ABSENT, TreeTarget, contents_of, is_sharded
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest.plain_wire import unsupported


class RankLocal:
    """Marks state that differs from rank to rank, as that of random number generators and counters does.

    `value` is plain data, tensors, random number generators of torch, numpy or Python (alone or in dicts, lists and
    tuples), or an object with state_dict() and load_state_dict(); every rank's is saved. `load` puts back, as `value`,
    into its generators or through load_state_dict(), what the rank of the same number saved. Tensors come back as new
    ones on the CPU, wherever they were.

    On a larger number of ranks some have no saved value: with missing="error" that is an error that says so, because a
    data loader that starts anew repeats data; with missing="keep" they keep what they have, which is right for random
    numbers. On a smaller number the values of the other ranks can be had from `bcp.open(path).rank_values(fqn)`.

    With `merge` the value is numbers, tensors or arrays, or a tree of them, and nothing is lost on another number of
    ranks: with merge="sum" rank 0 gets the sum of all and the others zero, so that the sum over ranks stays; with
    merge="max" every rank gets the largest. All ranks of a load must pass the same `merge`. A save does not need it,
    but with it refuses a value that cannot be merged.

    Raises ValueError for another `missing` or `merge`.
    """

    def __init__(
        self, value: Any, *, missing: Literal["error", "keep"] = "error", merge: MergeRule | None = None
    ) -> None:
        if missing not in {"error", "keep"}:
            raise ValueError(f"RankLocal.missing takes 'error' or 'keep', not {missing!r}")
        if merge not in {None, "sum", "max"}:
            raise ValueError(f"RankLocal.merge takes None, 'sum' or 'max', not {merge!r}")
        self.value = value
        self.missing = missing
        self.merge = merge

    def __repr__(self) -> str:
        return f"RankLocal({self.value!r})"


class RankLocalEntry:
    """A `RankLocal`: small tensors are in its plain data, large ones in data files, named by their content."""

    def __init__(self, fqn: str, value: RankLocal) -> None:
        self.fqn = fqn
        self._holder = value
        self._target = TreeTarget()
        self._found: StoredTree | None = None
        self._merged: MergeTarget | None = None
        self._bad_sum = ""
        """Text of the reason for which the values of all ranks have no sum, once `refuse_sum` has given it."""
        self._current: dict[str, Any] = {}
        """Leaves of the present value, which stay where the load leaves something out."""
        self._unset: set[str] = set()
        """FQNs of generators that a load which is not strict leaves as they are, because their states do not fit."""
        self.random_restores: list[Callable[[], None]] = []
        """Calls that each set generators to the states that `finish` has given them."""

    @property
    def is_random(self) -> bool:
        """True if its value is or holds random number generators."""
        return isinstance(self._holder.value, RngState) or bool(self._generators())

    def collect(self) -> EntryContents:
        state = self._state()
        if self._holder.merge is not None:
            check_mergeable(self._holder.value, self.fqn, self._holder.merge)
            check_mergeable(state, self.fqn, self._holder.merge)
        contents = contents_of(state, self.fqn, "rank")
        for fqn, value in leaves(state, self.fqn).items():
            if is_sharded(value):
                advice = "put it into the state outside of RankLocal, or its to_local() into RankLocal"
                raise unsupported(fqn, f"a {type(value).__name__}, which is not a value of one rank's own", advice)
        return contents._replace(names=contents.names | {self.fqn})

    def _state(self) -> Any:
        value = self._holder.value
        return value.state_dict() if is_stateful(value) else with_states(value, self.fqn)

    def _generators(self) -> list[FoundGenerator]:
        return generators_in(self._holder.value, self.fqn)

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        found = checkpoint.entry_tree(self.fqn)
        self._found = None
        if found is None:
            return Expectation([], set(), [not_stored(self.fqn)])
        claims = set(map(checkpoint.rename, leaves(found.tree, found.fqn)))
        if self._bad_sum:
            self._merged = None
            return Expectation([], claims, [Problem("conflict", self.fqn, self._bad_sum)])
        try:
            found = self._chosen(found, checkpoint)
        except CheckpointMismatchError as error:
            return Expectation([], claims, [Problem("conflict", self.fqn, error.message)])
        if not found.is_taken:
            return Expectation([], set(), [])
        values = leaves(found.tree, found.fqn)
        claims |= set(map(checkpoint.rename, values))
        if is_stream_tree(found.tree):
            return Expectation([], claims, [Problem("conflict", self.fqn, f"{self.fqn}: {ONLY_FOR_LOADERS}")])
        missing = [value for value in values.values() if isinstance(value, RankMissing)]
        if missing and self._holder.missing == "keep":
            return Expectation([], claims, [])
        if missing:
            return Expectation([], claims, [rank_missing(self.fqn, missing[0].num_saved)])
        self._found = found
        if not all(map(checkpoint.takes, values)) and not self._current:
            state = self._state()
            self._current, self._target.own = leaves(state, self.fqn), subclasses_in(state, self.fqn)
        expectation = self._target.expect(found, {}, checkpoint)
        shards = expectation.shards if self._merged is None else self._merged.shards()
        of_generators = self._problems_of_generators(found, checkpoint)
        self._unset = {problem.fqn for problem in of_generators}
        return Expectation(shards, claims, of_generators + expectation.problems, skipped=expectation.skipped)

    def _chosen(self, stored: StoredTree, checkpoint: CheckpointView) -> StoredTree:
        """Returns the tree that this rank loads, which may be made of those of all ranks.

        Raises CheckpointMismatchError (conflict) where values of ranks cannot be merged.
        """
        value, rule = self._holder.value, self._holder.merge
        saved = checkpoint.saved_by_rank(self.fqn)
        if saved is None:  # the same on all ranks, and stored once
            return stored
        if isinstance(value, RngState):
            state = value.chosen(saved, checkpoint.rank, checkpoint.moment)
            tree: Any = RankMissing(len(saved.data)) if state is None else state
        elif rule is not None and saved.num_ranks != checkpoint.num_ranks:
            self._merged = self._merged or MergeTarget(saved, rule, checkpoint)
            tree = self._merged.outline(checkpoint)
        else:
            return stored
        return StoredTree(stored.fqn, tree, any(map(checkpoint.takes, leaves(tree, stored.fqn))))

    def _problems_of_generators(self, stored: StoredTree, checkpoint: CheckpointView) -> list[Problem]:
        problems: list[Problem] = []
        selected: list[FoundGenerator] = []
        for each in self._generators():
            state = at(stored.tree, each.keys)
            path = "".join(f".{key}" for key in each.keys)
            takes = list(map(checkpoint.takes, leaves(state, stored.fqn + path))) if is_there(state) else [True]
            if all(takes):
                selected.append(each)
            elif any(takes):
                text = f"{self.fqn}{path}: include and exclude leave out a part of a random number generator's state"
                problems.append(Problem("conflict", self.fqn + path, text))
        return problems + problems_of(selected, stored.tree, self.fqn)

    @property
    def is_summed(self) -> bool:
        """True if it loads a sum: all of it on rank 0, and zero on the others."""
        return self._merged is not None and self._found is not None and self._holder.merge == "sum"

    @property
    def sums_in_files(self) -> bool:
        """True if this rank sums integers that lie in data files."""
        return self._merged is not None and self._found is not None and self._merged.sums_in_files

    def shards_to_sum(self) -> list[LocalShard]:
        """Returns targets, which are no part of the state, of the stored integers that `bad_sum` looks at."""
        return self._merged.shards_to_sum() if self._merged is not None and self.sums_in_files else []

    def bad_sum(self) -> str:
        """Returns the conflict if the sum of the filled `shards_to_sum` is out of range of their dtype; else ""."""
        try:
            if self._merged is not None:
                self._merged.check_sums()
        except CheckpointMismatchError as error:
            return error.message
        return ""

    def refuse_sum(self, why: str) -> None:
        """Makes this the conflict that `expect` finds, also where another rank has found it."""
        self._bad_sum = why

    def prepare(self, checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        if self._merged is not None:
            self._merged.prepare()
        elif self._found is not None:
            self._target.prepare(self._found, {}, checkpoint)

    def finish(self, checkpoint: CheckpointView) -> None:
        if self._found is None:
            return
        found = self._found if self._merged is None else self._found._replace(tree=self._merged.tree())
        state, value = self._target.filled(found, self._current, checkpoint), self._holder.value
        if state is ABSENT:
            return
        if is_stateful(value):
            add_metadata(state, value.state_dict)
            give_state(value, state)
            self.random_restores += [partial(value.load_state_dict, state)] if isinstance(value, RngState) else []
            return
        generators = self._generators()
        fitting = [each for each in generators if ".".join([self.fqn, *map(str, each.keys)]) not in self._unset]
        self.random_restores += [partial(set_state, each.generator, at(state, each.keys)) for each in fitting]
        for restore in self.random_restores:
            restore()
        self._holder.value = put_back(state, generators)
