"""A checkpoint under the names of the state: filtered by include and exclude, renamed, decoded for one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch

from bytecheckpoint.adapters.data.stream_wire import decode_loader_state, is_loader_state
from bytecheckpoint.adapters.expectation import RankMissing
from bytecheckpoint.adapters.key_map import Globs, KeyMap, Renamer, SortedNames, UnusedRule, renamed_alike
from bytecheckpoint.adapters.plain.manifest_trees import (
    SavedByRank,
    all_trees,
    common_tree,
    leaves_of_others,
    named_by_content,
    stored_leaves,
    tensor_dicts,
)
from bytecheckpoint.adapters.plain.plain_data import decode_plain
from bytecheckpoint.adapters.plain.plain_tree import descend
from bytecheckpoint.adapters.shards import NEW_TUPLE, torch_dtype
from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef, is_at_or_below

T = TypeVar("T")

PER_RANK_NAME = "extra_state"
"""The top-level name under which plain data may differ from rank to rank without `RankLocal`."""

_REWRITTEN = {"converted_from", "linked_from"}
"""Keys of a provenance: where it has one of them, its `world_size` is not the number of ranks that saved the data."""

Reshape = Callable[[Any, str, Callable[[str], str], SortedNames], Any]
"""Takes a tree, its checkpoint FQN, the renaming to state FQNs, and all checkpoint FQNs of tensors; gives a tree."""


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint."""

    fqn: str
    """The FQN under which its chunks are stored. For an alias or a renamed tensor it is not the user's name."""
    dtype: str
    shape: tuple[int, ...]


class StoredTree(NamedTuple):
    """Plain data of one entry, of a part of it or of all, decoded; `CheckpointView.trees` says what may be in it."""

    fqn: str
    """FQN in the checkpoint."""
    tree: Any
    is_taken: bool
    """True if include and exclude let at least one of its leaves through."""


class CheckpointView:
    """A checkpoint by state FQNs, without what include and exclude leave out."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        rank: int,
        num_ranks: int,
        key_map: KeyMap | None,
        include: Sequence[str] | None,
        exclude: Sequence[str] | None,
        below: str = "",
        beside: Collection[str] = (),
        plain_names: Mapping[str, str] | None = None,
        reshape: Reshape | None = None,
        trees_at: Collection[str] | None = None,
    ) -> None:
        """`rank` is this rank's number among the `num_ranks` that load. `below` is a state FQN that is put before all
        names of the checkpoint, also before renamed ones, except for names at or below the state FQNs in `beside`.
        `plain_names` maps names of tensors, as earlier versions and other programs have saved them, to the state FQNs
        of the same tensors. `reshape` puts plain data that ranks share into the form that the state has. `trees_at` are
        state FQNs: the streams of a data loader whose name is neither above nor below one of them are one leaf, a
        StreamTable, because there may be 100,000; None makes trees of all, as include and exclude do.
        Raises CheckpointMismatchError (conflict) if two tensors get one name; `tree_leaves` does so for leaves.
        """
        self._manifest = manifest
        self.metadata = manifest.metadata
        """Metadata of the checkpoint."""
        self._reshape = reshape
        self._trees_at = trees_at
        self.rank = rank
        self.num_ranks = num_ranks
        self._include = None if include is None else Globs(include)
        self._exclude = Globs(exclude or ())
        self.takes_all = include is None and not exclude
        """True if include and exclude leave out nothing."""
        self._below = f"{below}." if below else ""
        self.is_renamed = key_map is not None or bool(below) or bool(plain_names)
        """False if `rename` changes no name."""
        self._is_as_saved = self.takes_all and not self.is_renamed
        self.rename = Renamer(key_map, below, beside, plain_names)
        """Checkpoint FQN -> state FQN."""
        self.of_other_ranks: dict[str, StoredTensor] = {}
        """Tensors in values of other ranks that an entry has asked for, by the FQN under which their chunks lie."""
        self.saved = self._saved_tensors()
        """Tensors by checkpoint FQN, whatever include and exclude say."""
        self.tensors = self.saved if self._is_as_saved else self._renamed(self.saved)
        """Tensors by state FQN, without those that include and exclude leave out."""
        self.saved_names, self.tensor_names = SortedNames(self.saved), SortedNames(self.tensors)
        """The FQNs in `saved` and in `tensors`."""

    def _saved_tensors(self) -> dict[str, StoredTensor]:
        """Returns all tensors by checkpoint FQN. A tensor that is named by its content, or that `reshape` gives another
        place, gets the FQN of this rank's leaf that refers to it, and is left out if there is none.
        """
        manifest = self._manifest
        described = manifest.describe_all()
        dtypes, shapes = (map(itemgetter(at), described.values()) for at in (0, 1))
        rows = zip(described, dtypes, shapes, strict=True)
        records = dict(zip(described, map(NEW_TUPLE, repeat(StoredTensor), rows), strict=True))
        records |= {alias: records[fqn] for alias, fqn in manifest.aliases.items()}
        by_content = named_by_content(manifest)
        if not by_content and self._reshape is None:
            return records
        refs = {fqn: leaf.fqn for fqn, leaf in self._saved_leaves.items() if isinstance(leaf, TensorRef)}
        moved = by_content.union(fqn for leaf, fqn in refs.items() if leaf not in records and fqn in records)
        saved = {fqn: record for fqn, record in records.items() if fqn not in moved}
        return saved | {leaf: records[fqn] for leaf, fqn in refs.items() if fqn in moved}

    def _renamed(self, values: Mapping[str, T]) -> dict[str, T]:
        """Takes values by checkpoint FQN; returns, by state FQN, those that include and exclude let through. Raises
        CheckpointMismatchError (conflict) if two of them get one name.
        """
        sources: dict[str, str] = {}
        for fqn in filter(self.takes, values):
            name = self.rename(fqn)
            if sources.setdefault(name, fqn) != fqn:
                raise renamed_alike(name, sources[name], fqn)
        return {name: values[fqn] for name, fqn in sources.items()}

    def takes(self, fqn: str) -> bool:
        """Returns True if include and exclude let this checkpoint FQN through."""
        if self.takes_all:
            return True
        if fqn in self._unsaved_here:
            return not self.excludes(fqn) and any(map(self.takes, self._unsaved_here[fqn]))
        is_excluded = self.excludes(fqn)  # asked whatever include says: it is known then that a glob matches something
        return self.includes(fqn) and not is_excluded

    @cached_property
    def _unsaved_here(self) -> dict[str, set[str]]:
        """FQNs of the leaves of each entry that only other ranks saved, by the entry's FQN; without extra_state."""
        unsaved = leaves_of_others(self._manifest, self.rank)
        return {fqn: names for fqn, names in unsaved.items() if fqn.split(".")[0] != PER_RANK_NAME}

    def why_left_out(self, fqn: str) -> str | None:
        """Returns why a name map leaves out the value saved as this state FQN; None if it leaves out no such value."""
        left_out = self._manifest.map_notes.left_out
        return next((why for source, why in left_out.items() if self.rename(source) == fqn), None)

    def includes(self, fqn: str) -> bool:
        """Returns True if include is None, or matches this checkpoint FQN."""
        return self._include is None or self._include.match(fqn)

    def excludes(self, fqn: str) -> bool:
        """Returns True if exclude matches this checkpoint FQN."""
        return self._exclude.match(fqn)

    def globbed_name(self, fqn: str) -> str:
        """Returns a state FQN without `below`: by this name, include and exclude judge what is not stored."""
        return fqn.removeprefix(self._below)

    @cached_property
    def tensor_dicts(self) -> dict[str, dict[str, str]]:
        """For each entry that is a long dict of tensors alone, by its FQN: the FQN of each tensor, by its key. Most
        large states are such dicts, which need no walk. Empty if this load renames, reshapes or leaves out anything.
        """
        if not self._is_as_saved or self._reshape is not None:
            return {}
        return tensor_dicts(self._manifest)

    @cached_property
    def trees(self) -> dict[str, Any]:
        """Plain data by the checkpoint FQN of its entry, with TensorRefs, `reshape` applied, and the streams of a data
        loader as `trees_at` says. Of values that ranks saved for themselves, this rank's; if it has none,
        `RankMissing`, or for extra_state what all of those ranks saved alike.
        """
        trees = {
            fqn: decode_loader_state(data) if is_loader_state(data) and not self._is_tree(fqn) else decode_plain(data)
            for fqn, data in self._manifest.objects.items()
        }
        if self._reshape is not None:
            names = SortedNames([*self._manifest.tensors, *self._manifest.aliases])
            trees = {fqn: self._reshape(tree, fqn, self.rename, names) for fqn, tree in trees.items()}
        for fqn, by_rank in self._manifest.rank_objects.items():
            if self.rank in by_rank:
                trees[fqn] = decode_plain(by_rank[self.rank])
            elif fqn.split(".")[0] == PER_RANK_NAME:
                trees[fqn] = common_tree([decode_plain(data) for _, data in sorted(by_rank.items())])
            else:
                trees[fqn] = RankMissing(len(by_rank))
        return trees

    def _is_tree(self, fqn: str) -> bool:
        """Returns True if the streams of a data loader with this checkpoint FQN become a tree: see `trees_at`."""
        if self._trees_at is None or not self.takes_all:
            return True
        name = self.rename(fqn)
        return any(not each or is_at_or_below(name, {each}) or is_at_or_below(each, {name}) for each in self._trees_at)

    @cached_property
    def tree_leaves(self) -> dict[str, Any]:
        """Leaves of the trees that are not left out, by state FQN; a TensorRef for a tensor in data files, RankMissing
        where this rank has no value. Raises CheckpointMismatchError (conflict) if two get one name.
        """
        return self._saved_leaves if self._is_as_saved else self._renamed(self._saved_leaves)

    @property
    def moment(self) -> str:
        """Name of the save: its step, or its save id if it has none. New random number streams are keyed by it."""
        return f"save {self._manifest.save_id}" if self._manifest.step is None else f"step {self._manifest.step}"

    def saved_by_rank(self, fqn: str) -> SavedByRank | None:
        """Returns the values that ranks saved for themselves as the entry of this state FQN; None if there are none."""
        source = self._tree_names.get(fqn)
        data = self._manifest.rank_objects.get(source) if source is not None else None
        if source is None or data is None:
            return None
        provenance = self._manifest.provenance
        size = None if provenance.keys() & _REWRITTEN else provenance.get("world_size")
        return SavedByRank(source, data, size if isinstance(size, int) else max(data) + 1)

    def tensor_of_other_rank(self, fqn: str) -> StoredTensor:
        """Returns the tensor of this checkpoint FQN, part of another rank's value, and adds it to `of_other_ranks`.

        Raises CheckpointCorruptError (bad_manifest) if the checkpoint has none.
        """
        if fqn not in self.of_other_ranks:
            source = self._manifest.aliases.get(fqn, fqn)
            if source not in self._manifest.tensors:
                raise CheckpointCorruptError(
                    f"the manifest is damaged: a value of a rank refers to the tensor {fqn!r:.200}, which the "
                    "checkpoint does not have",
                    kind="bad_manifest",
                )
            self.of_other_ranks[fqn] = StoredTensor(source, *self._manifest.describe_each([source])[0])
        return self.of_other_ranks[fqn]

    def entry_tree(self, fqn: str) -> StoredTree | None:
        """Returns the tree as which the entry of this state FQN was saved; None if there is no such entry."""
        source = self._tree_names.get(fqn)
        return None if source is None else self._stored_tree(source, self.trees[source])

    def _stored_tree(self, source: str, tree: Any) -> StoredTree:
        return StoredTree(source, tree, any(map(self.takes, stored_leaves(tree, source))))

    def object_tree(self, fqn: str) -> StoredTree | None:
        """Returns the tree that the object of this state FQN was saved as: an entry, the only item of a list of
        objects, a part of an entry, or the whole checkpoint if all of its names are put below this FQN.
        """
        is_alone = f"{fqn}.1" not in self._tree_names
        found = self.entry_tree(fqn) or (self.entry_tree(f"{fqn}.0") if is_alone else None) or self.subtree(fqn)
        return self._tree_of_all() if found is None and fqn == self._below[:-1] else found

    def _tree_of_all(self) -> StoredTree | None:
        """Returns all plain data and tensors with state FQNs below `self._below` as a tree; None without plain data."""
        below = {fqn: tree for fqn, tree in self.trees.items() if fqn and self.rename(fqn).startswith(self._below)}
        roots = set(below)
        alone = [fqn for fqn in self.saved if not is_at_or_below(fqn, roots)]
        below |= {fqn: TensorRef(fqn) for fqn in alone if self.rename(fqn).startswith(self._below)}
        return self._stored_tree("", below) if roots else None

    @cached_property
    def _tree_names(self) -> dict[str, str]:
        return self._by_new_name(self.trees, lambda fqn: any(map(self.takes, stored_leaves(self.trees[fqn], fqn))))

    def subtree(self, fqn: str) -> StoredTree | None:
        """Returns the part of the plain data whose leaves are at or below this state FQN; None without such a part."""
        source = self._sources.get(fqn)
        if source is None:
            names = self._sorted_sources.below(fqn) if fqn else self._sources
            below = ((at[len(fqn) :], self._sources[at]) for at in names)
            source = next((leaf.removesuffix(path) for path, leaf in below if leaf.endswith(path)), None)
        tree = None if source is None else self._tree_at(source)
        is_there = tree is not None or source in self._saved_leaves  # a leaf may be a None
        return self._stored_tree(source, tree) if source is not None and is_there else None

    @cached_property
    def _sources(self) -> dict[str, str]:
        """State FQN -> checkpoint FQN of every leaf of plain data."""
        return self._by_new_name(self._saved_leaves, self.takes)

    @cached_property
    def _sorted_sources(self) -> SortedNames:
        return SortedNames(self._sources)

    def _by_new_name(self, fqns: Iterable[str], is_taken: Callable[[str], bool]) -> dict[str, str]:
        """Returns checkpoint FQNs by state FQN; of two that get one name, the one for which `is_taken` is True."""
        by_name = {self.rename(fqn): fqn for fqn in (fqns if self._is_as_saved else sorted(fqns, key=is_taken))}
        # A rule that puts `name.` before all names makes `name.` of the empty FQN, the root: it has to be `name`.
        return {name if fqn else name.removesuffix("."): fqn for name, fqn in by_name.items()}

    def missing_at(self, fqn: str) -> tuple[str, RankMissing] | None:
        """Returns the innermost FQN at or above this one without a value for this rank, and why; None without such."""
        parts = fqn.split(".") if self.missing else []
        names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next(((name, self.missing[name]) for name in names if name in self.missing), None)

    @cached_property
    def missing(self) -> dict[str, RankMissing]:
        return {name: value for name, value in self.tree_leaves.items() if isinstance(value, RankMissing)}

    def _tree_at(self, fqn: str) -> Any:
        """Returns the part of the plain data at this checkpoint FQN; None if there is none, or if it is None."""
        leaf = self._saved_leaves.get(fqn)
        if fqn in self.trees or isinstance(leaf, dict):  # an empty dict is itself, whatever lies below a key with dots
            return leaf if isinstance(leaf, dict) else self.trees[fqn]
        parts = fqn.split(".")
        for count in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:count])
            found = descend(self.trees[name], fqn[len(name) + 1 :]) if name in self.trees else None
            if found is not None:
                return found
        return None

    def skips(self, fqn: str) -> bool:
        """Returns True if include or exclude keep this state FQN from being loaded."""
        if self.takes_all or fqn in self.skipped or fqn in self._taken:
            return not self.takes_all and fqn in self.skipped
        # First, as no glob is of use that names only what contains names that are taken.
        return fqn not in self.containers and not self.takes(self.globbed_name(fqn))

    @cached_property
    def skipped(self) -> set[str]:
        """State FQNs of all that include and exclude leave out, except FQNs that something they let through has too."""
        if self.takes_all:
            return set()
        left_out = {self.rename(fqn) for fqn in [*self.saved, *self._saved_leaves] if not self.takes(fqn)}
        return left_out.difference(self._taken)

    @cached_property
    def _taken(self) -> dict[str, None]:
        """Keys: state FQNs of all tensors and plain data that include and exclude let through."""
        if self.tensor_dicts.keys() < {*self._manifest.objects, *self._manifest.rank_objects}:
            return dict.fromkeys(chain(self.tensors, self.tree_leaves))
        # Long dicts of tensors alone are not walked.
        return dict.fromkeys(chain(self.tensors, *(refs.values() for refs in self.tensor_dicts.values())))

    @cached_property
    def containers(self) -> set[str]:
        """State FQNs of all containers of tensors and plain data that include and exclude let through."""
        split_fqns = (fqn.split(".") for fqn in self._taken)
        return {".".join(parts[:count]) for parts in split_fqns for count in range(1, len(parts))}

    @cached_property
    def tensor_sources(self) -> dict[str, str]:
        """State FQN -> checkpoint FQN of every tensor; of two that get one name, the one that is not left out."""
        return {self.rename(fqn): fqn for fqn in sorted(self.saved, key=self.takes)}

    @cached_property
    def own_names(self) -> list[str]:
        """Sorted state FQNs of tensors and leaves in this rank's own values: other ranks may see other names."""
        roots = set(self._manifest.rank_objects)
        names = [*self.saved, *self._saved_leaves] if roots else []
        return sorted({self.rename(fqn) for fqn in names if is_at_or_below(fqn, roots) and self.takes(fqn)})

    @cached_property
    def common_names(self) -> list[str]:
        """State FQNs of the tensors and leaves that are the same for every rank, in the order of the checkpoint."""
        own = set(self.own_names)
        return [fqn for fqn in self._taken if fqn not in own] if own else list(self._taken)

    @property
    def unmatched_rules(self) -> list[UnusedRule]:
        """Rules of include, exclude and key_map that have matched none of the names that were looked up so far."""
        found = [UnusedRule("include", glob) for glob in (self._include.unused if self._include else ())]
        found += [UnusedRule("exclude", glob) for glob in self._exclude.unused]
        return found + [UnusedRule("key_map", repr(rule)) for rule in self.rename.unused]

    @property
    def names_of_all_ranks(self) -> set[str]:
        """The checkpoint FQNs of all tensors and leaves of plain data, those of every rank's own values included."""
        names = {leaf for fqn, data in all_trees(self._manifest) for leaf in stored_leaves(decode_plain(data), fqn)}
        return names.union(self._manifest.tensors, self._manifest.aliases)

    def all_names(self) -> list[str]:
        """Returns the state FQNs of all that include and exclude let through, but for leaves that only others have."""
        return [*self.common_names, *self.own_names]

    @cached_property
    def _saved_leaves(self) -> dict[str, Any]:
        return dict(chain.from_iterable(stored_leaves(tree, fqn).items() for fqn, tree in self.trees.items()))


def placeholder(stored: StoredTensor) -> torch.Tensor:
    """Returns a tensor on the meta device that stands for one that a load will create."""
    return torch.empty(stored.shape, dtype=torch_dtype(stored.dtype), device="meta")
