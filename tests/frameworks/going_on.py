"""The line of `bcp doctor` with which a run in a framework goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bytecheckpoint.tools.analysis.diagnosis.checkpoint_diagnosis import diagnose


def line_of(path: Path | str, framework: str) -> str:
    """The line; a test fails unless the doctor says that the checkpoint is of this framework."""
    found = diagnose(str(path), {})
    assert found.origin == (f"this library within {framework}", "'bcp_integration' in the metadata")
    (line,) = found.code[0].lines
    assert found.code[0].does == f"go on in {framework}"
    return line


def go_on(path: Path | str, framework: str, **live: Any) -> Any:
    """Runs the line with the live objects that it needs, and returns what its call gives."""
    line = line_of(path, framework)
    names = dict(live)
    exec("\n".join(diagnose(str(path), {}).code[0].imports), names)
    return eval(line, names)
