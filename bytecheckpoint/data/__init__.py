"""Data loading whose state any number of ranks can share: see docs/data.md."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bytecheckpoint.data.elastic_loader import ElasticLoader
    from bytecheckpoint.data.packer import Packer
    from bytecheckpoint.data.shuffle_buffer import ShuffleBuffer
    from bytecheckpoint.data.streams import Streams

__all__ = ["ElasticLoader", "Packer", "ShuffleBuffer", "Streams"]

# They need torch, which takes seconds to import.
_MODULES = {
    "ElasticLoader": "bytecheckpoint.data.elastic_loader",
    "Packer": "bytecheckpoint.data.packer",
    "ShuffleBuffer": "bytecheckpoint.data.shuffle_buffer",
    "Streams": "bytecheckpoint.data.streams",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
