"""The elastic loader of each kind of data loader that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bytecheckpoint.data.cursors import grain_cursor, litdata_cursor, megatron_cursor, mosaic_cursor
from bytecheckpoint.data.elastic_loader import ElasticLoader
from bytecheckpoint.data.energon import energon_loader
from bytecheckpoint.data.tracked_loader import tracked_loader_of

_ADAPTERS: Sequence[Callable[[Any], ElasticLoader | None]] = (
    tracked_loader_of,
    megatron_cursor,
    mosaic_cursor,
    grain_cursor,
    litdata_cursor,
    energon_loader,
)
"""Each returns the elastic loader for a data loader of its kind, and None for all others. It looks at names of classes
and imports no framework that the caller has not imported."""


def elastic_loader_of(loader: Any) -> ElasticLoader | None:
    """Returns the loader itself where it is an ElasticLoader, or the ElasticLoader for its kind; None for kinds that
    are not known. Raises the ValueError of `tracked_loader_of`.
    """
    if isinstance(loader, ElasticLoader):
        return loader
    return next((found for adapter in _ADAPTERS if (found := adapter(loader)) is not None), None)
