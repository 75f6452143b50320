"""Names that count how often they are looked at, which tells a search of all of them from one that is sorted."""

from __future__ import annotations

from typing import Any


class CountedName(str):
    """A name; `num_looks` counts comparisons and looks at the beginning of any of them."""

    __slots__ = ()
    num_looks = 0

    def __lt__(self, other: str) -> bool:
        CountedName.num_looks += 1
        return super().__lt__(other)

    def startswith(self, *args: Any) -> bool:
        CountedName.num_looks += 1
        return super().startswith(*args)
