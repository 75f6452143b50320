"""The elastic loader of each kind of data loader that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bytecheckpoint.data.elastic_loader import ElasticLoader
from bytecheckpoint.data.tracked_loader import tracked_loader_of

_ADAPTERS: Sequence[Callable[[Any], ElasticLoader | None]] = (tracked_loader_of,)
"""Each returns the elastic loader for a data loader of its kind, and None for all others. It looks at names of classes
and imports no framework that the caller has not imported."""


def elastic_loader_of(loader: Any) -> ElasticLoader | None:
    """Returns the loader itself where it is elastic, or what makes it so; None for loaders that are not known."""
    if isinstance(loader, ElasticLoader):
        return loader
    return next((found for adapter in _ADAPTERS if (found := adapter(loader)) is not None), None)
