"""Questions about many folders of a bucket, answered from pages of all keys in order: a page of 1,000 keys tells of
hundreds of steps. A page that reaches no second folder was not worth it, and one that is out of order, as in directory
buckets, tells nothing: what is left is then asked folder by folder. Knows no client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ReadPage = Callable[[str], Mapping[str, Any]]
"""Returns the answer to `list_objects_v2` for the keys after this one."""


class _Page(NamedTuple):
    """Keys in order, with their sizes."""

    keys: list[str]
    sizes: list[int]
    is_last: bool


def _page_after(key: str, read_page: ReadPage) -> _Page | None:
    """Returns a page of keys after this one; None if it is out of order, or empty and not the last."""
    answer = read_page(key)
    entries, is_last = answer.get("Contents", ()), not answer.get("IsTruncated")
    keys = [str(entry["Key"]) for entry in entries]
    if keys != sorted(keys) or any(first <= key for first in keys[:1]) or not (keys or is_last):
        return None
    return _Page(keys, [int(entry["Size"]) for entry in entries], is_last)


def find_keys(wanted: Sequence[str], read_page: ReadPage) -> Mapping[str, bool]:
    """Returns, for keys in order, which exist, as far as the pages tell."""
    found: dict[str, bool] = {}
    while len(found) < len(wanted):
        left = wanted[len(found) :]
        page = _page_after(left[0][:-1], read_page)
        if page is None:
            break
        reached = left if page.is_last else [key for key in left if key <= page.keys[-1]]
        there = set(page.keys)
        found |= {key: key in there for key in reached}
        if len(reached) < 2:
            break
    return found


def list_folders(prefixes: Sequence[str], read_page: ReadPage) -> Mapping[str, Mapping[str, int | None]]:
    """Returns what lies directly in folders, given in order by the prefixes of their keys, as far as the pages tell."""
    found: dict[str, Mapping[str, int | None]] = {}
    while len(found) < len(prefixes):
        left = prefixes[len(found) :]
        page = _page_after(left[0], read_page)
        if page is None:
            break
        reached = list(_listings_in(page, left))
        found |= reached
        if len(reached) < 2:
            break
    return found


def _listings_in(page: _Page, prefixes: Sequence[str]) -> Iterator[tuple[str, Mapping[str, int | None]]]:
    """Yields the listings of the folders, in order, that the page has to their end."""
    for prefix in prefixes:
        first, stop = (bisect_left(page.keys, key) for key in (prefix, f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"))
        if stop == len(page.keys) and not page.is_last:
            return
        listing: dict[str, int | None] = {}
        for key, size in zip(page.keys[first:stop], page.sizes[first:stop], strict=True):
            name, is_folder, _ = key[len(prefix) :].partition("/")
            listing[name] = None if is_folder else size
        yield prefix, listing
