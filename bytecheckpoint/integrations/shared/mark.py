"""The mark of an integration in the metadata of what it saves, by which `bcp doctor` says where a run goes on."""

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
    """Returns the metadata of a checkpoint with the mark."""
    return {**(metadata or {}), INTEGRATION: name}
