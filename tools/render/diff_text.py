"""Prints the output of `bcp diff`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

from bytecheckpoint.dtypes import MXFP4_SUFFIXES, SCALE_SUFFIXES

from ..analysis.value_difference import larger
from .number_format import count_text, left_out_text, number_text, rate_text, shape_text, shortened, size_text
from .terminal import LAST_DROP, NAME_STYLE, Column, Screen, TableShape

if TYPE_CHECKING:
    from bytecheckpoint.loading.select import LeftOut

    from ..analysis.checkpoint_diff import CheckpointDiff, TensorDifference

_MAX_VALUE_TEXT = 60
_OF_SCALES = (*SCALE_SUFFIXES, *MXFP4_SUFFIXES)
_MORE = ": --limit 0 shows all"


def print_diff(screen: Screen, paths: tuple[str, str], result: CheckpointDiff, *, limit: int) -> None:
    for letter, path in zip("AB", paths, strict=True):
        screen.line(f"{letter}  {path}", style="bold")
    screen.line()
    differing = [tensor for tensor in result.tensors if tensor.problems]
    near = [tensor for tensor in result.tensors if not tensor.problems]
    if result.is_same:
        screen.line(f"the same: {_counts(result)}{_within(near)}", style="bold green")
    else:
        screen.line(f"DIFFERENT: {_verdict(result, differing)}", style="bold red")
        screen.line(f"  {_counts(result)} were compared{_within(near)}")
    screen.line(f"  {_work(result)}")
    other_kind = [tensor for tensor in differing if tensor.shapes[0] != tensor.shapes[1] or "dtype" in tensor.problems]
    if _may_scale(result.only_in_a, [*result.only_in_b, *(tensor.fqn for tensor in other_kind)]):
        screen.line("  A may have quantized weights and B their products: --dtype compares these")
    if _may_scale(result.only_in_b, [*result.only_in_a, *(tensor.fqn for tensor in other_kind)]):
        screen.line("  B may have quantized weights and A their products: diff B A with --dtype compares these")
    _print_names(screen, "only in A", result.only_in_a, limit)
    _print_names(screen, "only in B", result.only_in_b, limit)
    other_values = [tensor for tensor in differing if "values" in tensor.problems]
    tables = [(_KIND_TABLE, other_kind), (_VALUE_TABLE, other_values), (_OBJECT_TABLE, result.objects)]
    for table, items in tables:
        if items:
            screen.section(table, items, limit=limit, rest=_MORE)


def print_left_out(screen: Screen, left_out: Sequence[LeftOut], *, limit: int) -> None:
    """Prints the parts of A that have no place in the export, so that they were not compared."""
    for item in left_out[: limit or None]:
        screen.line(f"  not compared: {left_out_text(item)}")
    screen.rest(len(left_out), limit, _MORE)


def _counts(result: CheckpointDiff) -> str:
    return f"{count_text(result.num_tensors, 'tensor')} and {count_text(result.num_objects, 'plain value')}"


def _may_scale(names: Sequence[str], products: Sequence[str]) -> bool:
    """Returns True if one of the names is that of the scales of a quantized weight with the name of a product."""
    may_be_products = set(products)
    return any(name.removesuffix(suffix) in may_be_products for name in names for suffix in _OF_SCALES)


def _verdict(result: CheckpointDiff, differing: Sequence[TensorDifference]) -> str:
    parts = [
        (len(differing), "tensor", "differ"),
        (len(result.only_in_a), "tensor", "only in A"),
        (len(result.only_in_b), "tensor", "only in B"),
        (len(result.objects), "plain value", "differ"),
    ]
    return ", ".join(
        f"{count_text(number, noun)} {how}{'s' * (number == 1 and how == 'differ')}"
        for number, noun, how in parts
        if number
    )


def _within(near: Sequence[TensorDifference]) -> str:
    if not near:
        return ""
    values = [tensor.values for tensor in near if tensor.values is not None]
    max_abs = reduce(larger, (found.max_abs for found in values), None)
    max_rel = reduce(larger, (found.max_rel for found in values), None)
    by = f"by at most {number_text(max_abs)} (relative {number_text(max_rel)})"
    return f"; within the tolerance {count_text(len(near), 'tensor')} differ{'s' * (len(near) == 1)} {by}"


def _work(result: CheckpointDiff) -> str:
    rate = rate_text(result.num_bytes_read, result.seconds)
    read = f"{size_text(result.num_bytes_read)} of both compared in {result.seconds:.1f} s ({rate})"
    same = f", {size_text(result.num_bytes_same)} of A have the checksums of B" if result.num_bytes_same else ""
    return read + same


def _print_names(screen: Screen, title: str, names: Sequence[str], limit: int) -> None:
    if names:
        screen.section(
            TableShape([Column(title, style=NAME_STYLE)], lambda name: [name]), names, limit=limit, rest=_MORE
        )


_KIND_TABLE = TableShape(
    [
        Column("tensor", style=NAME_STYLE),
        *(
            Column(name, is_whole=True, drop=LAST_DROP + order)
            for order, name in enumerate(("dtype A", "dtype B", "shape A", "shape B"))
        ),
    ],
    lambda tensor: [tensor.fqn, *tensor.dtypes, *map(shape_text, tensor.shapes)],
)


def _value_cells(tensor: TensorDifference) -> list[str]:
    values = tensor.values
    if values is None or values.first is None:
        return [tensor.fqn, *["-"] * 8]
    index = ", ".join(map(str, tensor.first_index or ()))
    return [
        tensor.fqn,
        f"{values.num_differing:,}",
        f"{tensor.num_elements:,}",
        number_text(values.max_abs),
        number_text(values.max_rel),
        f"{values.num_not_finite:,}",
        f"[{index}]",
        *(_value_text(text) for text in (values.first.a, values.first.b)),
    ]


def _value_text(text: str) -> str:
    """Formats a float in few digits; keeps integers, complex numbers and bits."""
    try:
        return text if text.lstrip("-").isdigit() else f"{float(text):.6g}"
    except ValueError:
        return text


_VALUE_TABLE = TableShape(
    [
        Column("tensor", style=NAME_STYLE),
        Column("differing", is_right=True),
        Column("of", is_right=True, drop=2),
        Column("max abs", is_right=True),
        Column("max rel", is_right=True, drop=3),
        Column("NaN/Inf", is_right=True, drop=1),
        Column("first at", is_whole=True, drop=4),
        Column("A", is_right=True, drop=LAST_DROP + 1),
        Column("B", is_right=True, drop=LAST_DROP),
    ],
    _value_cells,
)
_OBJECT_TABLE = TableShape(
    [Column("plain value", style=NAME_STYLE), Column("rank", is_right=True), Column("A"), Column("B")],
    lambda item: [
        item.fqn,
        "" if item.rank is None else str(item.rank),
        *(shortened(text, _MAX_VALUE_TEXT) for text in item.texts),
    ],
)
