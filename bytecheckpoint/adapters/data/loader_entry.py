"""A `DataLoaderState` as an entry of the state: its streams are saved by their owners and dealt out by a load."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTree
from bytecheckpoint.adapters.data.elastic_rules import load_rule, why_not_saved
from bytecheckpoint.adapters.data.loader_state import DataLoaderState
from bytecheckpoint.adapters.data.merge_streams import digest_of, listed_ids
from bytecheckpoint.adapters.data.rank_states import consumed_prefix, rank_id
from bytecheckpoint.adapters.data.stream_wire import (
    MARK,
    VERSION,
    StreamsPart,
    StreamTable,
    encode_state,
    is_stream_tree,
    is_whole,
)
from bytecheckpoint.adapters.expectation import EntryContents, Expectation, Problem, not_stored
from bytecheckpoint.adapters.plain.plain_data import encode_plain, fits_inline
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.shards import LocalShards
from bytecheckpoint.adapters.tree_loader import TreeTarget, is_sharded
from bytecheckpoint.data.elastic_loader import ElasticLoader, assign_streams
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.info import DataReport
from bytecheckpoint.manifest.plain_wire import checked_text, join_fqn, unsupported


class _StreamShare(NamedTuple):
    """The part of a stored state that this rank takes over."""

    checkpoint: CheckpointView
    stored: StoredTree
    """The shared state, and those streams that may hold tensors."""
    plain: Mapping[str, Any]
    """States of the other streams, of plain data alone."""
    own: Sequence[str]
    """Sorted ids of the streams in `stored` and `plain`."""
    new: Mapping[str, Any]
    """Initial states of the streams of this rank that the checkpoint lacks."""
    ids: Sequence[str] | None
    """Sorted ids of the streams of all ranks; None if no streams were assigned to ranks."""
    names: Collection[str]
    """State FQNs of everything in the checkpoint that belongs to the entry."""
    problems: Sequence[Problem]
    report: DataReport
    why_restarted: str = ""
    """Reason why the loader starts anew; empty where it goes on."""
    has_start: bool = False
    """True if it starts anew from the states in `plain`, which may be none."""


class DataLoaderEntry:
    """A data loader whose state is a set of streams."""

    def __init__(self, fqn: str, state: DataLoaderState) -> None:
        self.fqn = fqn
        self._state = state
        self._target = TreeTarget()
        self._share: _StreamShare | None = None
        self._tensors: list[torch.Tensor] = []
        self.report: DataReport | None = None
        """Set by a load that has filled the loader."""

    def buffers(self) -> Sequence[torch.Tensor]:
        """Returns the tensors for data files that `collect` found: a loader may change them while a snapshot waits."""
        return self._tensors

    def collect(self) -> EntryContents:
        loader = self._state.streams
        self._state.is_in_use = True
        self.refuse_inexact()
        tensors: list[tuple[str, torch.Tensor]] = []

        def on_tensor(fqn: str, tensor: torch.Tensor) -> torch.Tensor | None:
            refuse_sharded(fqn, tensor)
            if fits_inline(tensor):
                return tensor
            tensors.append((fqn, tensor))
            return None

        prefix = join_fqn(self.fqn, "streams")
        ids = self.own_ids(loader)
        of_id = loader.stream_state
        streams = {each: msgspec.Raw(encode_state(of_id(each), f"{prefix}.{each}", on_tensor)) for each in ids}
        shared = encode_plain(loader.shared_state(), join_fqn(self.fqn, "shared"), on_tensor)
        shards = LocalShards()
        shards.add_all(tensors)
        self._tensors = [tensor for _, tensor in tensors]
        names = {self.fqn, prefix, *(name for name, _ in tensors)}
        return EntryContents(shards.found, names, {self.fqn: ("streams", self.encode_part(loader, streams, shared))})

    def refuse_inexact(self) -> None:
        """Raises CheckpointSaveError (unsupported_value) for a state that a save must not take."""
        state = self._state
        why = why_not_saved(state)
        if why is not None:
            raise unsupported(
                self.fqn,
                f'a {type(state.loader).__name__} whose state elastic="{state.elastic}" cannot keep: {why}',
                "wrap its sources in bcp.data.Streams, or choose another `elastic`, which docs/data.md explains",
            )

    def own_ids(self, loader: ElasticLoader) -> list[str]:
        """Returns the sorted ids of this rank's streams. Raises CheckpointSaveError (unsupported_value) for an id that
        the loader names twice, or that is no str or not valid Unicode.
        """
        fqn = join_fqn(self.fqn, "streams")
        given: Sequence[Any] = loader.stream_ids()  # of a class of the user
        if odd := [each for each in given if not isinstance(each, str)]:
            what = f"a stream whose id is of type {type(odd[0]).__name__}"
            raise unsupported(f"{fqn}.{odd[0]}", what, "let stream_ids() return texts")
        ids: list[str] = sorted(given)
        if len(set(ids)) < len(ids):
            twice = next(one for one, other in pairwise(ids) if one == other)
            raise unsupported(join_fqn(fqn, twice), "a stream that stream_ids() names twice", "give each its own id")
        if not "".join(ids).isascii():
            for stream_id in ids:
                checked_text(stream_id, f"{fqn}, in its id {stream_id!r},")
        return ids

    def encode_part(self, loader: ElasticLoader, streams: Mapping[str, msgspec.Raw], shared: bytes) -> bytes:
        """Returns this rank's StreamsPart, encoded. `streams` (states by id) and `shared` are encoded already."""
        state = self._state
        all_ids = getattr(loader, "all_stream_ids", None)
        known = state.loaded_ids if all_ids is None else sorted(all_ids())
        part = StreamsPart(
            loader=type(state.loader).__name__,
            elastic=state.elastic,
            keyed_by=state.keyed_by,
            size=state.size,
            dp_rank=state.rank,
            shared=msgspec.Raw(shared),
            streams=msgspec.Raw(msgspec.msgpack.encode(streams)),
            known=b"" if known is None else digest_of(known),
            known_ids=known if known is not None and state.rank == 0 else (),
        )
        return msgspec.msgpack.encode(part)

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        found = checkpoint.entry_tree(self.fqn)
        if found is None:
            return Expectation([], set(), [not_stored(self.fqn)])
        if not found.is_taken:
            return Expectation([], set(), [])
        if self._share is None or self._share.checkpoint is not checkpoint:
            names = {*map(checkpoint.rename, leaves(found.tree, found.fqn)), *checkpoint.tensor_names.below(self.fqn)}
            share = self._why_refused(found, checkpoint) or self._find_share(found, checkpoint, names)
            if isinstance(share, str):
                return Expectation([], names, [Problem("conflict", self.fqn, f"{self.fqn}: {share}")])
            self._check(share)
            self._share = share
        of_tree = self._target.expect(self._share.stored, {}, checkpoint)
        problems = [*self._share.problems, *of_tree.problems]
        return Expectation(of_tree.shards, of_tree.claims.union(self._share.names), problems)

    def _check(self, share: _StreamShare) -> None:
        """Raises CheckpointMismatchError (conflict) for a state that `check_streams` of the loader refuses, if it has
        that method; also in a load that is not strict: otherwise this rank alone would leave its streams as they are.
        """
        check = getattr(self._state.streams, "check_streams", None)
        if check is None or share.why_restarted:
            return
        tree = share.stored.tree
        states = {**share.plain, **tree["streams"]}
        try:
            check({each: states[each] for each in share.own}, tree["shared"])
        except CheckpointMismatchError as error:
            text = f"{self.fqn}: {error.message}. Nothing else was changed either"
            raise CheckpointMismatchError(text, kind="conflict") from error

    def _why_refused(self, saved: StoredTree, checkpoint: CheckpointView) -> str | None:
        """Returns why the stored state cannot be loaded into a loader; None if nothing is wrong with it."""
        tree = saved.tree
        if not is_stream_tree(tree):
            return "saved as another value than a DataLoaderState; load it as that kind, and wrap it in later saves"
        if tree[MARK] != VERSION:
            return "saved by a later release, in a form that this one does not know; load it with that release"
        if not checkpoint.takes_all:
            names = [*leaves(tree, saved.fqn), *checkpoint.saved_names.below(saved.fqn)]
            left_out = next((name for name in names if not checkpoint.takes(name)), None)
            if left_out is not None:
                return f"include and exclude leave out {left_out}; a loader takes all of its state, or none"
        if not is_whole(tree):
            return "a part of its state was left out when the checkpoint was converted"
        return None

    def _find_share(self, saved: StoredTree, checkpoint: CheckpointView, names: Collection[str]) -> _StreamShare | str:
        """Returns this rank's share, or the reason why the load is refused."""
        state, tree = self._state, saved.tree
        rule = load_rule(state, tree)
        report = DataReport(
            num_streams=len(tree["streams"]), saved_size=tree["size"], size=state.size, elastic=state.elastic
        )
        empty_tree = saved._replace(tree={"shared": None, "streams": {}})
        share = _StreamShare(checkpoint, empty_tree, {}, [], {}, None, names, [], report)
        if rule.action == "refuse":
            return rule.why
        if rule.action == "restart":
            start = getattr(state.streams, "start_states", lambda: None)()
            if start is None and state.is_in_use:
                return (
                    f"{rule.why}; it would start anew, but it was saved or loaded before and cannot be put back to its "
                    "start: make the loader and its DataLoaderState anew"
                )
            report = replace(report, restarted=True)
            share = share._replace(plain=start or {}, own=list(start or {}), has_start=start is not None)
            return share._replace(report=report, why_restarted=rule.why)
        if rule.action == "assign":
            return self._assigned(share, saved)
        states = [tree["streams"][rank_id(rank)] for rank in range(tree["size"])]
        prefix = consumed_prefix(states, state.loader, size=state.size)
        if isinstance(prefix, str):
            return f'{rule.why}, and {prefix}; load it on as many, or choose elastic="restart"'
        own = {rank_id(state.rank): prefix.state}
        report = replace(report, repeated_at_most=prefix.repeated_at_most)
        return share._replace(plain=own, own=list(own), report=report)

    def _assigned(self, share: _StreamShare, saved: StoredTree) -> _StreamShare | str:
        """Returns the share with this rank's streams, or the reason why the loader cannot assign streams to ranks."""
        state, loader, tree = self._state, self._state.streams, saved.tree
        table = tree["streams"]
        saved_by = dict(zip(sorted(table), tree["owners"].tolist(), strict=True))
        ids, new, problems = self._compare(loader, saved_by)
        try:
            parts = assign_streams(loader, ids, state.size)
        except ValueError as error:
            return str(error)
        own = sorted(parts[state.rank])
        plain, others = (
            table.decode(own) if isinstance(table, StreamTable) else ({}, {each: table[each] for each in own})
        )
        num_moved = sum(saved_by[each] != rank for rank, part in enumerate(parts) for each in part)
        return share._replace(
            stored=saved._replace(tree={"shared": tree["shared"], "streams": others}),
            plain=plain,
            own=own,
            new=self._joining(loader, new, {**plain, **others} or {each: table[each] for each in ids}) if new else {},
            ids=ids,
            problems=problems,
            report=replace(share.report, num_streams=len(ids), num_moved=num_moved),
        )

    def _joining(self, loader: ElasticLoader, new: Sequence[str], others: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the states of streams that the checkpoint lacks: those in which they join `others`, the states of
        other streams; or those that they have in the loader now, if it has no `joining_state`.
        """
        join = getattr(loader, "joining_state", None)
        return {each: loader.stream_state(each) if join is None else join(each, others) for each in new}

    def _compare(
        self, loader: ElasticLoader, saved_by: Mapping[str, int]
    ) -> tuple[list[str], list[str], list[Problem]]:
        """Returns the ids of the streams to assign, the ids of this rank's streams that the checkpoint lacks, and the
        problems: one for streams of the checkpoint that are not among `all_stream_ids()`, one for the lacking ones.
        """
        prefix, ids, problems = f"{self.fqn}.streams", sorted(saved_by), []
        all_ids = getattr(loader, "all_stream_ids", None)
        unknown = sorted(set(ids).difference(all_ids())) if all_ids is not None else []
        if unknown:
            text = f"{prefix}: {listed_ids(unknown)} are in the checkpoint, and the loader has no such streams"
            problems.append(Problem("conflict", prefix, text))
            ids = sorted(set(ids).difference(unknown))
        new = sorted(set(loader.stream_ids()).difference(saved_by))
        if new:
            text = f"{prefix}: {listed_ids(new)} of the loader are not in the checkpoint; they would start anew"
            problems.append(Problem("missing_key", prefix, text))
        return ids, new, problems

    def prepare(self, checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        if self._share is not None:
            self._target.prepare(self._share.stored, {}, checkpoint)

    def finish(self, checkpoint: CheckpointView) -> None:
        share, loader = self._share, self._state.streams
        if share is None:
            return
        self.report, self._state.is_in_use = share.report, True
        if share.why_restarted:
            self._restart(share)
            return
        filled = self._target.filled(share.stored, {}, checkpoint)
        states = {**share.plain, **filled["streams"]}
        # A load that is not strict: what the checkpoint lacks stays with the rank that has it.
        loader.load_streams({**{each: states[each] for each in share.own}, **share.new}, filled["shared"])
        self._state.loaded_ids = share.ids

    def _restart(self, share: _StreamShare) -> None:
        loader = self._state.streams
        if share.has_start:
            loader.load_streams({each: share.plain[each] for each in share.own}, loader.shared_state())
        if self._state.rank == 0:
            # A count of one rank's samples can only go back to 0 within its epoch.
            of = " of the epoch that it is in" if self._state.keyed_by == "rank" else ""
            at = f"from its first sample{of}" if share.has_start else "and must not have been read"
            text = f"{self.fqn}: the data loader starts anew, {at}: {share.why_restarted}"
            warnings.warn(text, stacklevel=2)


def refuse_sharded(fqn: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a sharded tensor in the state of a loader."""
    if is_sharded(tensor):
        raise unsupported(fqn, f"a {type(tensor).__name__}, which no stream owns alone", "save its to_local()")
