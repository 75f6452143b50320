"""Builds a tree of modules from tensors, in which layers that repeat are one node: `layers.0-31`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..render.number_format import ranges_text
from .summary import TensorEntry

_MAX_DEPTH = 64
"""Deeper parts of a name are one node: a checkpoint must not decide the depth of a recursion."""
_Signature = tuple[Any, ...]


@dataclass(slots=True)
class ModuleNode:
    """A part of FQNs, and all below it."""

    name: str
    """One part, several that have no other child (`attn.wq.weight`), or numbers of equal siblings (`0-31`)."""
    tensor: TensorEntry | None = None
    """Tensor whose FQN ends here; of equal siblings, the first one's."""
    children: list[ModuleNode] = field(default_factory=list)
    num_tensors: int = 0
    """Sum over the node, as the following two: siblings that repeat are counted each time, aliases never."""
    num_elements: int = 0
    num_bytes: int = 0


class _SignedNode(NamedTuple):
    node: ModuleNode
    signature: int
    """Equal for nodes with the same names, dtypes, shapes and places of aliases below them."""


def build_tree(tensors: Iterable[TensorEntry]) -> list[ModuleNode]:
    """Returns the top-level nodes."""
    nested: dict[str | None, Any] = {}
    for tensor in tensors:
        level = nested
        for part in tensor.fqn.split(".", _MAX_DEPTH):
            level = level.setdefault(part, {})
        level[None] = tensor
    signatures: dict[_Signature, int] = {}
    built = [_build(name, below, signatures) for name, below in nested.items() if name is not None]
    return [signed.node for signed in _collapse(built)]


def _build(name: str, below: dict[str | None, Any], signatures: dict[_Signature, int]) -> _SignedNode:
    tensor: TensorEntry | None = below.get(None)
    built = [_build(part, deeper, signatures) for part, deeper in below.items() if part is not None]
    kind = (tensor.dtype, tensor.shape, tensor.alias_of is None) if tensor else None
    signature: _Signature = (kind, *((item.node.name, item.signature) for item in built))
    children = [item.node for item in _collapse(built)]
    node = ModuleNode(name, tensor, children)
    is_stored = tensor is not None and tensor.alias_of is None
    node.num_tensors = is_stored + sum(child.num_tensors for child in children)
    node.num_elements = (tensor.num_elements if tensor and is_stored else 0) + sum(c.num_elements for c in children)
    node.num_bytes = (tensor.num_bytes if tensor else 0) + sum(child.num_bytes for child in children)
    if tensor is None and len(children) == 1:
        node.name, node.tensor, node.children = f"{name}.{children[0].name}", children[0].tensor, children[0].children
    return _SignedNode(node, signatures.setdefault(signature, len(signatures)))


def _collapse(siblings: list[_SignedNode]) -> list[_SignedNode]:
    """Merges siblings that are numbered and equal."""
    groups: dict[Any, list[_SignedNode]] = {}
    for signed in siblings:
        number, _, suffix = signed.node.name.partition(".")
        is_numbered = number.isascii() and number.isdecimal() and str(int(number[:18])) == number
        groups.setdefault((signed.signature, suffix) if is_numbered else signed.node.name, []).append(signed)
    return [_merge(group) for group in groups.values()]


def _merge(group: list[_SignedNode]) -> _SignedNode:
    if len(group) == 1:
        return group[0]
    first = group[0].node
    numbers = sorted(int(signed.node.name.partition(".")[0]) for signed in group)
    suffix = first.name.partition(".")[1:]
    merged = _multiply(first, len(group))
    merged.name = ranges_text(numbers) + "".join(suffix)
    return _SignedNode(merged, group[0].signature)


def _multiply(node: ModuleNode, factor: int) -> ModuleNode:
    return ModuleNode(
        node.name,
        node.tensor,
        [_multiply(child, factor) for child in node.children],
        node.num_tensors * factor,
        node.num_elements * factor,
        node.num_bytes * factor,
    )
