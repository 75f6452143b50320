"""The dealing out of streams to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from stream_loaders import BlockLoader, StreamLoader, stream_names

from bytecheckpoint.data.elastic_loader import assign_streams
from bytecheckpoint.data.known_loaders import elastic_loader_of


@pytest.mark.parametrize("size", [1, 3, 8, 20])
@pytest.mark.parametrize("loader", [StreamLoader(), BlockLoader()])
def test_each_stream_has_one_owner(loader: object, size: int) -> None:
    ids = stream_names(16)
    parts = assign_streams(loader, ids[::-1], size)
    assert len(parts) == size
    assert sorted(stream_id for part in parts for stream_id in part) == ids
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


class Broken(StreamLoader):
    """Deals its streams out as it is told to."""

    def __init__(self, parts: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.parts = parts

    def assign(self, _ids: Sequence[str], _size: int) -> Any:
        return self.parts


@pytest.mark.parametrize("parts", [[["a"], []], [["a", "b"], ["b"]], [["a", "b"]], [["a"], ["c"]]])
def test_a_loader_that_deals_out_wrongly_is_refused(parts: Sequence[Sequence[str]]) -> None:
    with pytest.raises(ValueError, match=r"Broken\.assign must give each of 2 streams to one of 2 ranks"):
        assign_streams(Broken(parts), ["a", "b"], 2)


def test_an_elastic_loader_is_its_own_and_others_are_not_known() -> None:
    loader = StreamLoader()
    assert elastic_loader_of(loader) is loader
    assert elastic_loader_of(object()) is None
