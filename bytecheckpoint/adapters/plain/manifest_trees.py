"""The plain data of a whole manifest: the trees of all its entries and ranks, and the tensors that they refer to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bytecheckpoint.adapters.expectation import RankMissing
from bytecheckpoint.adapters.plain.plain_data import decode_plain, decode_refs, encode_plain, is_content_fqn
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointSaveError
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef

_LONG = 1 << 14
"""Number of bytes. Shorter plain data is decoded anyway: that takes less time than this check."""


class SavedByRank(NamedTuple):
    """The plain data of one entry that each rank saved for itself."""

    fqn: str
    """FQN in the checkpoint."""
    data: Mapping[int, bytes]
    """Encoded trees by rank."""
    num_ranks: int
    """Number of ranks of the save; for a checkpoint that was converted or linked, or that does not say, the highest
    rank in `data` plus one, which may be less.
    """

    def tree(self, rank: int) -> Any:
        """Returns a new tree of what this rank saved. Raises KeyError if it is not in `data`."""
        return decode_plain(self.data[rank])


def tensor_dicts(manifest: Manifest) -> dict[str, dict[str, str]]:
    """Returns, by the FQN of an entry, the FQNs of its tensors by key: for each entry that is a long dict of tensors
    alone, all named after the entry and their keys.
    """
    found = {fqn: decode_refs(data) for fqn, data in manifest.objects.items() if fqn and len(data) > _LONG}
    return {fqn: refs for fqn, refs in found.items() if refs and _are_own_names(fqn, refs)}


def _are_own_names(fqn: str, refs: Mapping[str, str]) -> bool:
    """Returns True if each tensor's FQN is the FQN of the dict, a dot, and the tensor's key."""
    text = "\n".join(refs.values())  # compared as one text: in a list each would be made and compared alone
    return text == f"{fqn}." + f"\n{fqn}.".join(refs) and text.count("\n") == len(refs) - 1


def named_by_content(manifest: Manifest) -> set[str]:
    """Returns the FQNs of tensors that `content_fqn` has named, and that a leaf with another FQN refers to."""
    is_any = "@" in "".join(manifest.tensors)
    candidates = {fqn for fqn in manifest.tensors if "@" in fqn and is_content_fqn(fqn)} if is_any else set()
    if not candidates:
        return candidates
    found = (item for fqn, data in all_trees(manifest) for item in leaves(decode_plain(data), fqn).items())
    return candidates & {value.fqn for fqn, value in found if isinstance(value, TensorRef) and value.fqn != fqn}


def all_trees(manifest: Manifest) -> list[tuple[str, bytes]]:
    """Returns all encoded plain data, that of single ranks too, with the FQN of its entry, which may repeat."""
    of_ranks = [(fqn, data) for fqn, by_rank in manifest.rank_objects.items() for data in by_rank.values()]
    return [*manifest.objects.items(), *of_ranks]


def stored_leaves(tree: Any, fqn: str) -> dict[str, Any]:
    """Returns a tree's `leaves`. Raises CheckpointMismatchError (unexpected_key) where two would have the same FQN."""
    try:
        return leaves(tree, fqn)
    except CheckpointSaveError as error:
        raise CheckpointMismatchError(
            f"{fqn!r:.200} of the checkpoint holds two values of one name, as under the keys 1 and '1', or 'a.b' and "
            "'a'; nothing was loaded: read all of it with load_tree, or its tensors with open",
            kind="unexpected_key",
        ) from error


def leaves_of_others(manifest: Manifest, rank: int) -> dict[str, set[str]]:
    """Returns, for each entry that only other ranks saved for themselves, the FQNs of its leaves, without its own FQN;
    leaves out entries with no other leaf.
    """
    of_others = {fqn: by_rank for fqn, by_rank in manifest.rank_objects.items() if rank not in by_rank}
    found = {
        fqn: {name for data in by_rank.values() for name in leaves(decode_plain(data), fqn)} - {fqn}
        for fqn, by_rank in of_others.items()
    }
    return {fqn: names for fqn, names in found.items() if names}


def common_tree(trees: Sequence[Any]) -> Any:
    """Returns a tree with the keys of all trees: the values that all have in common, and RankMissing for all others."""
    if all(isinstance(tree, dict) for tree in trees):
        by_key: dict[Any, list[Any]] = {}
        for key, item in (item for tree in trees for item in tree.items()):
            by_key.setdefault(key, []).append(item)
        num, lists = len(trees), by_key.items()
        return {key: common_tree(items) if len(items) == num else RankMissing(len(items)) for key, items in lists}
    # Compared as bytes: the text of a tensor rounds its values and leaves out most of a long one.
    is_same = len({encode_plain(tree, "") for tree in trees}) == 1
    return trees[0] if is_same else RankMissing(len(trees))
