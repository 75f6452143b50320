"""Facts that the figures of a benchmark depend on, without names or paths of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def machine_facts(folder: Path) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "file system": file_system(folder),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "bytecheckpoint", "safetensors")},
    }


def facts_line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def file_system(folder: Path) -> str:
    """Returns the type of the file system that holds a folder: of all mount points above it the lowest one's."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(fields[1], fields[2]) for fields in lines if folder.resolve().is_relative_to(fields[1])]
    return max(above, key=lambda mount: len(mount[0]))[1]


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
