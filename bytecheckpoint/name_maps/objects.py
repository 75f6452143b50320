"""Plain data of a checkpoint that is seen through a name map: without references to tensors that have other names now,
and with optimizers that have the new names of their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from bytecheckpoint.adapters.native.parameter_names import MODEL_FQN
from bytecheckpoint.adapters.optimizers.hyperparameters import same_value
from bytecheckpoint.adapters.optimizers.stored_optimizer import BY_POSITION, is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn
from bytecheckpoint.name_maps.apply import Mapped

LEFT_OUT_BY_MAP = "left out by the name map"
_LEFT_OUT = object()


class _NotRenamedError(Exception):
    """An optimizer cannot have the new names, for this reason."""


def mapped_objects(manifest: Manifest, mapped: Mapped) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns the plain data with the new names in optimizers, encoded, and the reason for each value that is left out:
    the map drops it, or it is an optimizer that cannot have the new names. Both by FQN in the checkpoint.
    """
    renaming = _ObjectRenaming(manifest, mapped)
    objects: dict[str, bytes] = {}
    for fqn, data in manifest.objects.items():
        tree = decode_plain(data)
        renamed = renaming.rename(tree, fqn)
        if renamed is tree:
            objects[fqn] = data
        elif renamed is not _LEFT_OUT:
            objects[fqn] = encode_plain(renamed, fqn)
    return objects, renaming.left_out


class _ObjectRenaming:
    """The new names for all plain data of a checkpoint."""

    def __init__(self, manifest: Manifest, mapped: Mapped) -> None:
        self._manifest = manifest
        self._mapped = mapped
        self._renamed = mapped.sources.union(mapped.dropped)
        """FQNs of tensors that have other names now, or are left out."""
        self.left_out: dict[str, str] = {}

    def rename(self, tree: Any, fqn: str) -> Any:
        """Returns the tree at an FQN, with the new names in optimizers, without what the map drops, and without
        references to tensors that have other names now. Looks into dicts only. Returns the same object if nothing
        changes, _LEFT_OUT if nothing remains. Notes in `left_out` what the map drops and optimizers that are left out.
        """
        if isinstance(tree, TensorRef):
            return _LEFT_OUT if tree.fqn in self._renamed else tree
        if any(fnmatchcase(fqn, glob) for glob in self._mapped.drop):
            self.left_out[fqn] = LEFT_OUT_BY_MAP
            return _LEFT_OUT
        if is_optimizer_tree(tree) and BY_POSITION not in tree and _is_well_formed(tree):
            return self._renamed_optimizer(tree, fqn)
        if not isinstance(tree, dict):
            return tree
        items = {key: self.rename(item, join_fqn(fqn, key)) for key, item in tree.items()}
        if all(items[key] is item for key, item in tree.items()):
            return tree
        remaining = {key: item for key, item in items.items() if item is not _LEFT_OUT}
        return type(tree)(remaining) if remaining else _LEFT_OUT

    def _renamed_optimizer(self, tree: Mapping[str, Any], fqn: str) -> Any:
        try:
            return self._optimizer(tree, fqn)
        except _NotRenamedError as why:
            self.left_out[fqn] = f"the name map cannot rename the groups of this optimizer: {why}"
            return _LEFT_OUT

    def _optimizer(self, tree: Mapping[str, Any], fqn: str) -> Mapping[str, Any]:
        """Returns an optimizer, as docs/format.md describes it, with its parameters under their new names."""
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
        renamed = {**tree, "groups": _merge_groups(groups), "state": self._state(tree["state"], new)}
        if outside:
            renamed["outside_model"] = dict.fromkeys(name for old in outside for name in new.get(old, (old,)))
        if "elsewhere" in tree:
            pairs = ((self._translated(other), new.get(name, (name,))) for other, name in tree["elsewhere"].items())
            renamed["elsewhere"] = {old: name for olds, names in pairs for old, name in zip(olds, names, strict=False)}
        return renamed

    def _parameters(self, name: str, *, is_in_model: bool) -> tuple[str, ...]:
        """Returns the new names of a parameter; its own if the map does not know it."""
        in_model = join_fqn(MODEL_FQN, name)
        if is_in_model and (in_model in self._manifest.tensors or in_model in self._manifest.aliases):
            return tuple(each.removeprefix(f"{MODEL_FQN}.") for each in self._translated(in_model))
        return self._translated(name)

    def _translated(self, fqn: str) -> tuple[str, ...]:
        return self._mapped.translation.translate(fqn) or (fqn,)

    def _state(self, state: Mapping[str, Any], new: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        """Returns the plain values of parameters by their new names. Raises _NotRenamedError if parameters that become
        one have different values.
        """
        found: dict[str, Any] = {}
        for old, values in state.items():
            for name in new[old]:
                if name in found and encode_plain(found[name], "") != encode_plain(values, ""):
                    raise _NotRenamedError(
                        f"the state of {old!r:.200} differs from that of others that become {name!r:.200}"
                    )
                found[name] = values
        return found

    def _refuse_left_behind(self, fqn: str, renamed: set[str]) -> None:
        """Raises _NotRenamedError if a parameter is in `renamed`, and the map does not rename its state."""
        prefix = join_fqn(fqn, "state.")
        for name in (name for name in self._mapped.others if name.startswith(prefix)):
            parameter = name.removeprefix(prefix)
            while parameter and parameter not in renamed:
                parameter = parameter.rpartition(".")[0]
            if parameter:
                raise _NotRenamedError(f"the map renames {parameter!r:.200} but not its state {name!r:.200}")


def _merge_groups(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns groups by their first parameter. Groups that have parts of one parameter become one: ranks and stages
    that share the elements of a parameter have each saved a group of it. Raises _NotRenamedError if their
    hyperparameters differ.
    """
    merged: dict[str, Mapping[str, Any]] = {}
    for first, group in groups.items():
        params = dict(group["params"])
        sharing = [other for other, of_other in merged.items() if not params.keys().isdisjoint(of_other["params"])]
        for other in sharing:
            _refuse_differing(merged[other], group)
            params = {**merged[other]["params"], **params}
            del merged[other]
        merged[next(iter(params), first)] = {**group, "params": params}
    return merged


def _refuse_differing(group: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises _NotRenamedError if two groups that have parts of one parameter differ in hyperparameters."""
    name = next(name for name in group["params"] if name in other["params"])
    a, b = group.get("values", {}), other.get("values", {})
    keys = [key for key in {**a, **b} if key not in a or key not in b or not same_value(a[key], b[key])]
    if keys:
        raise _NotRenamedError(f"two of them have parts of {name!r:.200}, with different values of {', '.join(keys)}")


def _is_well_formed(tree: Mapping[str, Any]) -> bool:
    """Returns True if an optimizer is as docs/format.md describes it. Others stay unchanged, and loads refuse them."""
    by_name = (tree["state"], tree["groups"], tree.get("outside_model", {}), tree.get("elsewhere", {}))
    if not all(isinstance(each, dict) for each in by_name):
        return False
    return all(isinstance(group, dict) and isinstance(group.get("params"), dict) for group in tree["groups"].values())
