"""Joins tensors that Megatron has cut over the ranks of tensor parallelism. Their names say how; a tensor of another
name is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from bytecheckpoint.formats.file_reader import damaged, not_readable
from bytecheckpoint.formats.torch_save.duplicates import StoredCopy
from bytecheckpoint.formats.torch_save.file import moved
from bytecheckpoint.manifest import Chunk

_ROWS, _COLUMNS, _GATED, _SAME = "rows", "columns", "gated", "same"

_RULES = (
    (_GATED, r"(linear_fc1|dense_h_to_4h)\.(weight|bias)\d*"),
    (_COLUMNS, r"(linear_proj|linear_fc2|dense_4h_to_h|\w*attention\.dense)\.weight\d*"),
    (_SAME, r"(linear_proj|linear_fc2|dense_4h_to_h|\w*attention\.dense)\.bias\d*"),
    (_ROWS, r"(word_embeddings|word_embeddings_for_head|output_layer|linear_qkv|query_key_value)\.(weight|bias)"),
    (_ROWS, r"(linear_q|linear_kv|query|key_value)\.(weight|bias)"),
    (_SAME, r"(\w*layer_?norm\d?|\w*_norm|norm)\.(weight|bias)"),
    (_SAME, r"(layer_norm_weight|layer_norm_bias|ln_bias|ln_weight)"),
    (_SAME, r"(position_embeddings|tokentype_embeddings|router)\.(weight|bias)"),
    (_SAME, r"(router\.expert_bias|shared_experts\.gate_weight|rotary_pos_emb\.inv_freq)"),
)
_PATTERNS = [(rule, re.compile(rf"(?:\A|\.){pattern}\Z")) for rule, pattern in _RULES]


def whole_of(fqn: str, parts: Sequence[StoredCopy], *, is_gated: bool | None) -> tuple[tuple[int, ...], list[Chunk]]:
    """Returns the shape and the chunks of a tensor whose parts are those of all ranks, in their order. `is_gated`: a
    first linear layer of an MLP is two, of which each rank has a part of the one, followed by its part of the other;
    None if that is not known.

    Raises CheckpointCorruptError (bad_manifest, unsupported_version).
    """
    saved, view = parts[0]
    if len(parts) == 1:
        return view.shape, saved.chunks(view, fqn)
    rule = _rule_of(fqn)
    if rule is None or (rule == _GATED and is_gated is None):
        what = f"{fqn!r:.200} is of no kind whose parts this release knows how to put together"
        raise not_readable(saved.path, what, "load it with Megatron and save it with --ckpt-format torch_dist")
    if rule == _GATED and not is_gated:
        rule = _ROWS
    _refuse_odd_parts(fqn, parts, rule)
    if rule == _SAME:
        return view.shape, saved.chunks(view, fqn)
    if rule == _GATED:
        parts = [_half(part, index) for index in (0, 1) for part in parts]
    return _joined(fqn, parts, 1 if rule == _COLUMNS else 0)


def is_same_on_all(fqn: str) -> bool:
    """Returns True if every rank has a copy of this tensor."""
    return _rule_of(fqn) == _SAME


def _rule_of(fqn: str) -> str | None:
    return next((rule for rule, pattern in _PATTERNS if pattern.search(fqn)), None)


def _refuse_odd_parts(fqn: str, parts: Sequence[StoredCopy], rule: str) -> None:
    """Raises CheckpointCorruptError unless all parts have one dtype and shape: Megatron cuts evenly."""
    first, first_view = parts[0]
    for saved, view in parts:
        if (view.dtype, view.shape) != (first_view.dtype, first_view.shape):
            here, there = (f"{each.dtype}{list(each.shape)}" for each in (view, first_view))
            raise damaged(saved.path, f"its part of {fqn!r:.200} is {here}, and {there} in {first.path}")
    shape = first_view.shape
    if len(shape) < (2 if rule == _COLUMNS else 1) or (rule == _GATED and shape[0] % 2):
        raise damaged(first.path, f"its part of {fqn!r:.200} has the shape {list(shape)}")


def _half(part: StoredCopy, index: int) -> StoredCopy:
    saved, view = part
    num_rows = view.shape[0] // 2
    start = view.item_offset + index * num_rows * view.strides[0]
    return saved, replace(view, item_offset=start, shape=(num_rows, *view.shape[1:]))


def _joined(fqn: str, parts: Sequence[StoredCopy], dim: int) -> tuple[tuple[int, ...], list[Chunk]]:
    chunks: list[Chunk] = []
    lengths = list(parts[0][1].shape)
    at = 0
    for saved, view in parts:
        chunks += moved(saved.chunks(view, fqn), [at if index == dim else 0 for index in range(len(lengths))])
        at += view.shape[dim]
    lengths[dim] = at
    return tuple(lengths), chunks
