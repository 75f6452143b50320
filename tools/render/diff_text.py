"""How `bcp diff` looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..analysis.differences import ObjectDifference, Result, TensorDifference
from ..analysis.value_difference import larger
from .column_widths import Column
from .number_format import count_text, number_text, shape_text, shortened, size_text
from .terminal import Screen

if TYPE_CHECKING:
    from bytecheckpoint.loading.select import LeftOut

_NAME = "bold cyan"
_MAX_VALUE_TEXT = 60
_HOW = "more: --limit 0 shows all"


def print_diff(screen: Screen, paths: tuple[str, str], result: Result, *, limit: int) -> None:
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
    _print_names(screen, "only in A", result.only_in_a, limit)
    _print_names(screen, "only in B", result.only_in_b, limit)
    _print_kinds(screen, differing, limit)
    _print_values(screen, [tensor for tensor in differing if "values" in tensor.problems], limit)
    _print_objects(screen, result.objects, limit)


def print_left_out(screen: Screen, left_out: Sequence[LeftOut], *, limit: int) -> None:
    """What of A the export has no place for, so that it was not compared."""
    for item in left_out[: limit or None]:
        size = f": {count_text(item.num_tensors, 'tensor')}, {size_text(item.num_bytes)}" if item.num_tensors else ""
        screen.line(f"  not compared: {item.name}{size} ({item.why})")
    screen.rest(len(left_out), limit, _HOW)


def _counts(result: Result) -> str:
    return f"{count_text(result.num_tensors, 'tensor')} and {count_text(result.num_objects, 'plain value')}"


def _verdict(result: Result, differing: Sequence[TensorDifference]) -> str:
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
    max_abs: Any = None
    max_rel: Any = None
    for tensor in near:
        if tensor.values is not None:
            max_abs, max_rel = larger(max_abs, tensor.values.max_abs), larger(max_rel, tensor.values.max_rel)
    by = f"by at most {number_text(max_abs)} (relative {number_text(max_rel)})"
    return f"; within the tolerance {count_text(len(near), 'tensor')} differ{'s' * (len(near) == 1)} {by}"


def _work(result: Result) -> str:
    rate = result.num_bytes_read / max(result.seconds, 1e-9)
    read = f"{size_text(result.num_bytes_read)} of both compared in {result.seconds:.1f} s ({size_text(rate)}/s)"
    same = f", {size_text(result.num_bytes_same)} of A have the checksums of B" if result.num_bytes_same else ""
    return read + same


def _print_names(screen: Screen, title: str, names: Sequence[str], limit: int) -> None:
    if not names:
        return
    screen.line()
    screen.table([Column(title, style=_NAME)], [[name] for name in names[: limit or None]])
    screen.rest(len(names), limit, _HOW)


def _print_kinds(screen: Screen, tensors: Sequence[TensorDifference], limit: int) -> None:
    shown = [tensor for tensor in tensors if tensor.shapes[0] != tensor.shapes[1] or "dtype" in tensor.problems]
    if not shown:
        return
    facts = ("dtype A", "dtype B", "shape A", "shape B")
    columns = [Column("tensor", style=_NAME), *(Column(name, is_whole=True) for name in facts)]
    screen.line()
    screen.table(
        columns,
        [[tensor.fqn, *tensor.dtypes, *map(shape_text, tensor.shapes)] for tensor in shown[: limit or None]],
    )
    screen.rest(len(shown), limit, _HOW)


def _print_values(screen: Screen, tensors: Sequence[TensorDifference], limit: int) -> None:
    if not tensors:
        return
    columns = [
        Column("tensor", style=_NAME),
        Column("differing", is_right=True),
        Column("of", is_right=True, drop=2),
        Column("max abs", is_right=True),
        Column("max rel", is_right=True, drop=3),
        Column("NaN/Inf", is_right=True, drop=1),
        Column("first at", is_whole=True, drop=4),
        Column("A", is_right=True),
        Column("B", is_right=True),
    ]
    screen.line()
    screen.table(columns, list(map(_value_row, tensors[: limit or None])))
    screen.rest(len(tensors), limit, _HOW)


def _value_row(tensor: TensorDifference) -> list[str]:
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
    """A float in few digits; integers, complex numbers and bits as they are."""
    try:
        return text if text.lstrip("-").isdigit() else f"{float(text):.6g}"
    except ValueError:
        return text


def _print_objects(screen: Screen, objects: Sequence[ObjectDifference], limit: int) -> None:
    if not objects:
        return
    columns = [Column("plain value", style=_NAME), Column("rank", is_right=True), Column("A"), Column("B")]
    rows = [
        [item.fqn, "" if item.rank is None else str(item.rank), *(shortened(t, _MAX_VALUE_TEXT) for t in item.texts)]
        for item in objects[: limit or None]
    ]
    screen.line()
    screen.table(columns, rows)
    screen.rest(len(objects), limit, _HOW)
