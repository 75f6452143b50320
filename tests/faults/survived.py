"""What must hold after any fault, however it was made: what was acknowledged loads, what is visible is whole, the next
save works, and what died can be cleaned up. Each function says what does not hold, or None.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import bytecheckpoint as bcp
from bytecheckpoint.storage.garbage import find_leftovers, remove
from bytecheckpoint.storage.open_store import open_store
from faults.savers import OWN, Saver, Training
from faults.seams import files_under

_OUTPUT = re.compile(r"^(begin|done) (\d+)(?: after ([0-9.]+))?$", re.MULTILINE)


def told(output: str) -> tuple[int, list[int], list[float]]:
    """What a program said before it ended: which save it had begun last, which were done, and after how long."""
    said = _OUTPUT.findall(output)
    begun = max((int(number) for what, number, _ in said if what == "begin"), default=0)
    done = [(int(number), float(seconds)) for what, number, seconds in said if what == "done"]
    return begun, [number for number, _ in done], [seconds for _, seconds in done]


def lost(saver: Saver, root: Path, *, begun: int, acknowledged: Sequence[int], in_place: bool) -> str | None:
    """What was acknowledged and is not there, or not as it was."""
    if not acknowledged:
        return None
    if in_place:
        return _wrong(saver, root, None, among={acknowledged[-1], begun})
    for step in acknowledged:
        if (wrong := _wrong(saver, root, step, among={step})) is not None:
            return f"acknowledged, and {wrong}"
    return None


def torn(root: Path, *, begun: int, acknowledged: Sequence[int], in_place: bool) -> str | None:
    """What else readers of this library see that is not whole, after `lost`, which looks at all that was acknowledged.
    Any step that was begun may be there.
    """
    saver = OWN
    if in_place:
        is_there = not acknowledged and (root / "manifest.bcp").exists()
        return _wrong(saver, root, None, among={begun}) if is_there else None
    steps = saver.steps(root)
    if bcp.latest(root) != max(steps, default=None):
        return f"latest is {bcp.latest(root)} with {steps} there"
    for step in sorted(set(steps) - set(acknowledged)):
        if (wrong := _wrong(saver, root, step, among={step})) is not None:
            return f"visible, and {wrong}"
    return None


def stuck(root: Path, *, begun: int, in_place: bool) -> str | None:
    """The save that the run would make when it is started again, and what stays for ever."""
    saver, step = OWN, begun + 1
    try:
        saver.save(root, Training(steps=step), in_place=in_place)
    except bcp.CheckpointError as error:
        return f"the next save fails: {error}"
    wrong = _wrong(saver, root, None if in_place else step, among={step})
    if wrong is not None:
        return f"the next save is wrong: {wrong}"
    clean_up(root)
    strangers = files_of_the_dead(root, in_place=in_place)
    if strangers:
        return f"left after clean-up: {', '.join(strangers)}"
    return _wrong(saver, root, None if in_place else step, among={step})


def clean_up(root: Path) -> None:
    """As `bcp gc ROOT --older-than 0 --delete`, without starting a command."""
    store = open_store(root, storage_options=None, writer_threads=1)
    for leftover in find_leftovers(store, "").found:
        remove(store, leftover)


def files_of_the_dead(root: Path, *, in_place: bool) -> list[str]:
    """Every file that belongs to no checkpoint that is there, told by names alone."""
    alive = {None: ""} if in_place else {step: f"step_{step:08d}/" for step in bcp.steps(root)}
    prefixes = []
    for step, folder in alive.items():
        save_id = bcp.open(root, step=step).info.save_id
        prefixes += [f"{folder}manifest.bcp", f"{folder}data/{save_id}-", f"{folder}telemetry/{save_id}-"]
    return [name for name in files_under(root) if not name.startswith(tuple(prefixes))]


def _wrong(saver: Saver, root: Path, step: int | None, *, among: Collection[int]) -> str | None:
    """Why the checkpoint is none of those that it may be: after so many steps, at the call of a save. One step more is
    what a snapshot that was made too late would hold.
    """
    where = "the checkpoint" if step is None else f"step {step}"
    try:
        found = saver.steps_loaded(root, step=step)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # torch's own error is no Exception
        first_line = (str(error).splitlines() or [""])[0]
        return f"{where} does not load: {type(error).__name__}: {first_line[:300]}"
    return None if found in among else f"{where} is that after {found} steps, none of {sorted(among)}"
