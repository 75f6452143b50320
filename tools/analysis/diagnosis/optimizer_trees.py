"""Tells which plain data of a checkpoint is an optimizer, by its form: that of this library (docs/format.md) or torch's
own. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, join_fqn

_items_of = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw]).decode
_groups_of = msgspec.msgpack.Decoder(dict[str, dict[str, msgspec.Raw]]).decode


def is_optimizer(tree: Any) -> bool:
    """Returns True for a tree in the form in which this library saves an optimizer."""
    if not isinstance(tree, dict) or "state" not in tree or not isinstance(tree.get("groups"), dict):
        return False
    groups = tree["groups"].values()
    return bool(groups) and all(isinstance(group, dict) and isinstance(group.get("params"), dict) for group in groups)


def optimizers_in(manifest: Manifest) -> list[str]:
    """Returns the FQNs of the optimizers, in this library's form or torch's, also of those within other plain data."""
    return [found for fqn, data in manifest.objects.items() for found in _find(fqn, data, MAX_DEPTH)]


def _find(fqn: str, data: bytes, depth: int) -> Iterator[str]:
    """Yields the FQNs of the optimizers in encoded plain data, in its `depth` upper levels; none within another."""
    if depth == 0 or b"groups" not in data:
        return
    try:
        items = _items_of(data)
        is_found = isinstance(items, dict) and _has_form(items)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # no dict with names, and no list
        return
    if is_found:
        yield fqn
        return
    for key, item in items.items() if isinstance(items, dict) else enumerate(items):
        yield from _find(join_fqn(fqn, key), bytes(item), depth - 1)


def _has_form(items: Mapping[str, msgspec.Raw]) -> bool:
    if "state" not in items or "groups" not in items:
        return "state" in items and "param_groups" in items
    groups = _groups_of(items["groups"]).values()
    return bool(groups) and all("params" in group for group in groups)
