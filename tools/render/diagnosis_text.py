"""Prints what `bcp doctor --checkpoint` found: what a path is, its parts, and the code that loads them."""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.errors import and_more

from ..analysis.diagnosis.checkpoint_diagnosis import CheckpointDiagnosis, Neighbour
from ..analysis.diagnosis.entries import Part
from ..analysis.diagnosis.load_code import LoadCode
from .number_format import count_text, size_text
from .terminal import LAST_DROP, NAME_STYLE, Column, Screen, TableShape

_MAX_NEIGHBOURS = 20
_NUM_NAMED = 3
_PARTS = TableShape(
    [
        Column("part", style=NAME_STYLE),
        Column("tensors", is_right=True, drop=2),
        Column("size", is_right=True, drop=1),
        Column("holds", drop=LAST_DROP),
        Column("loads into"),
    ],
    list,
)
_NEIGHBOURS = TableShape(
    [
        Column("checkpoint", style=NAME_STYLE),
        Column("step", is_right=True, drop=1),
        Column("format", is_whole=True),
        Column(""),
    ],
    lambda item: [
        item.path,
        "-" if item.step is None else str(item.step),
        item.format,
        "" if item.committed else "did not finish",
    ],
)


def print_diagnosis(diagnosis: CheckpointDiagnosis) -> None:
    screen = Screen()
    _print_verdict(screen, diagnosis)
    screen.fields([(name, value) for name, value in _facts(diagnosis) if value])
    if diagnosis.error is not None:
        screen.paragraph(" ".join(diagnosis.error.message.split()))
    if diagnosis.parts:
        screen.section(_PARTS, _rows(diagnosis.parts))
    for part in diagnosis.parts:
        if part.hint:
            screen.line(f"  {part.name or part.kind}: {part.hint}")
    _print_code(screen, diagnosis.code)
    if diagnosis.convert is not None:
        screen.paragraph("To write it in another format:", style="bold")
        screen.line(f"    {diagnosis.convert}")
    if diagnosis.neighbours:
        _print_neighbours(screen, diagnosis.neighbours, are_below=diagnosis.error is not None)


def _print_code(screen: Screen, codes: Sequence[LoadCode]) -> None:
    """Prints each code, after its imports unless earlier code has shown all of them."""
    imported: set[str] = set()
    for code in codes:
        *most, last = code.needs or [""]
        needs = f", with your {', '.join(most)}{' and ' if most else ''}{last}" if last else ""
        screen.paragraph(f"To {code.does}{needs}:", style="bold")
        imports = [] if imported.issuperset(code.imports) else [*code.imports, ""]
        imported.update(code.imports)
        for line in [*imports, *code.lines]:
            screen.line(f"    {line}" if line else "")


def _print_verdict(screen: Screen, diagnosis: CheckpointDiagnosis) -> None:
    if diagnosis.error is None:
        writer = f"written by {diagnosis.origin.writer}" if diagnosis.origin else diagnosis.format
        screen.line(f"{diagnosis.path}: {writer}", style="bold green")
    elif diagnosis.format is not None:
        screen.line(f"{diagnosis.path}: {diagnosis.format}, and nothing of it loads", style="bold red")
    elif diagnosis.neighbours:
        screen.line(f"{diagnosis.path}: no checkpoint itself", style="bold yellow")
    else:
        screen.line(f"{diagnosis.path}: no checkpoint", style="bold red")


def _facts(diagnosis: CheckpointDiagnosis) -> list[tuple[str, str]]:
    size = f"{size_text(diagnosis.num_bytes)} in {count_text(diagnosis.num_files, 'file')}"
    return [
        ("format", (diagnosis.format or "") if diagnosis.origin else ""),
        ("told by", diagnosis.origin.known_by if diagnosis.origin else ""),
        ("looks like", diagnosis.looks_like or ""),
        ("step", "" if diagnosis.step is None else str(diagnosis.step)),
        ("saved by", "" if diagnosis.world_size is None else count_text(diagnosis.world_size, "rank")),
        ("size", size if diagnosis.num_files else ""),
        ("left out", diagnosis.left_out or ""),
    ]


def _rows(parts: Sequence[Part]) -> list[list[str]]:
    rows = [
        [
            part.name or f"({part.kind} without a name)",
            str(part.num_tensors) if part.num_tensors else "-",
            size_text(part.num_bytes) if part.num_bytes else "-",
            f"{part.kind}: {part.holds}",
            part.into or "nothing: it is only read",
        ]
        for part in parts
        if part.kind != "values"
    ]
    values = [part.name for part in parts if part.kind == "values"]
    if values:
        rows.append([and_more(values, _NUM_NAMED), "-", "-", "values", "values under these names"])
    return rows


def _print_neighbours(screen: Screen, neighbours: Sequence[Neighbour], *, are_below: bool) -> None:
    screen.paragraph("Checkpoints there:" if are_below else "Beside it:", style="bold")
    rest = ": `bcp ls` lists all"
    screen.section(_NEIGHBOURS, neighbours, limit=_MAX_NEIGHBOURS, rest=rest)
