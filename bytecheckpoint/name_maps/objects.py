"""Plain data of a checkpoint that is seen through a name map: without what names tensors that have other names now, and
with optimizers that know their parameters by the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from bytecheckpoint.adapters.native.parameter_names import MODEL_FQN
from bytecheckpoint.adapters.optimizers.hyperparameters import same_value
from bytecheckpoint.adapters.optimizers.stored_optimizer import BY_POSITION, is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain, keep_in_tree
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn
from bytecheckpoint.name_maps.apply import Mapped

LEFT_OUT_BY_MAP = "left out by the name map"
_GONE = object()


class _NotRenamedError(Exception):
    """Why an optimizer cannot have the new names."""


def mapped_objects(manifest: Manifest, mapped: Mapped) -> tuple[dict[str, bytes], dict[str, str]]:
    """The plain data as the other framework has it; and what is left out, by FQN, and why: what the map says, and the
    groups of an optimizer that cannot have the new names, which no load finds then.
    """
    walk = _Walk(manifest, mapped)
    objects: dict[str, bytes] = {}
    for fqn, data in manifest.objects.items():
        tree = decode_plain(data)
        left = walk.left(tree, fqn)
        if left is tree:
            objects[fqn] = data
        elif left is not _GONE:
            objects[fqn] = encode_plain(left, fqn, keep_in_tree)
    return objects, walk.left_out


class _Walk:
    """Through the plain data of a checkpoint."""

    def __init__(self, manifest: Manifest, mapped: Mapped) -> None:
        self._manifest = manifest
        self._mapped = mapped
        self._gone = mapped.sources.union(mapped.dropped)
        self.left_out: dict[str, str] = {}

    def left(self, tree: Any, fqn: str) -> Any:
        """What is left of a tree; the same object where that is all of it."""
        if isinstance(tree, TensorRef):
            return _GONE if tree.fqn in self._gone else tree
        if any(fnmatchcase(fqn, glob) for glob in self._mapped.drop):
            self.left_out[fqn] = LEFT_OUT_BY_MAP
            return _GONE
        if is_optimizer_tree(tree) and BY_POSITION not in tree and _is_sound(tree):
            return self._renamed_optimizer(tree, fqn)
        if not isinstance(tree, dict):
            return tree
        items = {key: self.left(item, join_fqn(fqn, key)) for key, item in tree.items()}
        if all(items[key] is item for key, item in tree.items()):
            return tree
        left = {key: item for key, item in items.items() if item is not _GONE}
        return type(tree)(left) if left else _GONE

    def _renamed_optimizer(self, tree: Mapping[str, Any], fqn: str) -> Any:
        try:
            return self._optimizer(tree, fqn)
        except _NotRenamedError as why:
            self.left_out[fqn] = f"the name map cannot rename the groups of this optimizer: {why}"
            return _GONE

    def _optimizer(self, tree: Mapping[str, Any], fqn: str) -> Mapping[str, Any]:
        """An optimizer, as docs/format.md has it, with its parameters under their new names."""
        outside = tree.get("outside_model", ())
        parameters = [name for group in tree["groups"].values() for name in group["params"]]
        new = {name: self._parameters(name, is_in_model=name not in outside) for name in [*parameters, *tree["state"]]}
        if all(names == (name,) for name, names in new.items()):
            return tree
        self._refuse_left_behind(fqn, {name for name, names in new.items() if names != (name,)})
        groups = {
            first: {**group, "params": dict.fromkeys(name for old in group["params"] for name in new[old])}
            for first, group in tree["groups"].items()
        }
        renamed = {**tree, "groups": _united(groups), "state": self._state(tree["state"], new)}
        if outside:
            renamed["outside_model"] = dict.fromkeys(name for old in outside for name in new.get(old, (old,)))
        if "elsewhere" in tree:
            pairs = ((self._translated(other), new.get(name, (name,))) for other, name in tree["elsewhere"].items())
            renamed["elsewhere"] = {
                other: name for others, names in pairs for other, name in zip(others, names, strict=False)
            }
        return renamed

    def _parameters(self, name: str, *, is_in_model: bool) -> tuple[str, ...]:
        """The new names of a parameter; its own where the map does not know it."""
        in_model = join_fqn(MODEL_FQN, name)
        if is_in_model and (in_model in self._manifest.tensors or in_model in self._manifest.aliases):
            return tuple(each.removeprefix(f"{MODEL_FQN}.") for each in self._translated(in_model))
        return self._translated(name)

    def _translated(self, fqn: str) -> tuple[str, ...]:
        return self._mapped.translation.translate(fqn) or (fqn,)

    def _state(self, state: Mapping[str, Any], new: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        """What is no tensor, by new names. Parameters that become one must have it alike."""
        found: dict[str, Any] = {}
        for old, values in state.items():
            for name in new[old]:
                if name in found and encode_plain(found[name], "", keep_in_tree) != encode_plain(
                    values, "", keep_in_tree
                ):
                    raise _NotRenamedError(
                        f"the state of {old!r:.200} differs from that of others that {name!r:.200} is"
                    )
                found[name] = values
        return found

    def _refuse_left_behind(self, fqn: str, renamed: set[str]) -> None:
        """Refuses parameters with new names whose state keeps the old ones."""
        prefix = join_fqn(fqn, "state.")
        for kept in (name for name in self._mapped.others if name.startswith(prefix)):
            parameter = kept.removeprefix(prefix)
            while parameter and parameter not in renamed:
                parameter = parameter.rpartition(".")[0]
            if parameter:
                raise _NotRenamedError(f"{parameter!r:.200} has another name by it, and {kept!r:.200} has not")


def _united(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Groups by their first parameter. Those that have parts of one parameter become one: ranks and stages that share
    the elements of a parameter have each saved a group of it.
    """
    united: dict[str, Mapping[str, Any]] = {}
    for first, group in groups.items():
        params = dict(group["params"])
        sharing = [other for other, of_other in united.items() if not params.keys().isdisjoint(of_other["params"])]
        for other in sharing:
            _refuse_differing(united[other], group)
            params = {**united[other]["params"], **params}
            del united[other]
        united[next(iter(params), first)] = {**group, "params": params}
    return united


def _refuse_differing(group: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuses two groups that have parts of one parameter, and other hyperparameters."""
    name = next(name for name in group["params"] if name in other["params"])
    a, b = group.get("values", {}), other.get("values", {})
    keys = [key for key in {**a, **b} if key not in a or key not in b or not same_value(a[key], b[key])]
    if keys:
        raise _NotRenamedError(f"two of them have parts of {name!r:.200}, with different values of {', '.join(keys)}")


def _is_sound(tree: Mapping[str, Any]) -> bool:
    """Whether an optimizer has what docs/format.md says; one that has not stays as it is, for loads to refuse."""
    of_names = (tree["state"], tree["groups"], tree.get("outside_model", {}), tree.get("elsewhere", {}))
    if not all(isinstance(each, dict) for each in of_names):
        return False
    return all(isinstance(group, dict) and isinstance(group.get("params"), dict) for group in tree["groups"].values())
