"""Marks checkpoints, in their metadata, with the integration that saved them: `bcp doctor` then says how to resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from bytecheckpoint.info import INTEGRATION

Name = Literal[
    "accelerate",
    "dcp",
    "deepspeed",
    "fabric",
    "lightning",
    "megatron",
    "megatron_bridge",
    "torchtitan",
    "transformers",
    "verl",
]


def marked(name: Name, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a copy of the metadata with the mark of this integration added."""
    return {**(metadata or {}), INTEGRATION: name}
