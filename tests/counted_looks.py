"""Names and lists that count how often they are looked at: a test tells by it what grows with a square."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


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


class CountedList(list[T]):
    """A list; `num_walks` counts how often it is walked."""

    num_walks = 0

    def __iter__(self) -> Iterator[T]:
        self.num_walks += 1
        return super().__iter__()
