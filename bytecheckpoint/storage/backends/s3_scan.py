"""Looks for a name in many folders of a bucket, or lists the folders, by reading pages of all keys in ascending order:
a page of 1,000 keys covers hundreds of steps. Ends early after a page that covers fewer than two folders, or whose keys
are out of order, as in directory buckets: the caller then asks for the rest folder by folder. Knows no client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ReadPage = Callable[[str], Mapping[str, Any]]
"""Returns the answer to `list_objects_v2` for the keys after this one."""


class _Page(NamedTuple):
    """Keys in ascending order, with their sizes in bytes; `is_last` if no keys follow."""

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
    """Returns, for each of these keys, which are in ascending order, True if it exists, else False. Keys that the pages
    do not reach are left out.
    """
    found: dict[str, bool] = {}
    while len(found) < len(wanted):
        remaining = wanted[len(found) :]
        page = _page_after(remaining[0][:-1], read_page)
        if page is None:
            break
        reached = remaining if page.is_last else [key for key in remaining if key <= page.keys[-1]]
        existing = set(page.keys)
        found |= {key: key in existing for key in reached}
        if len(reached) < 2:
            break
    return found


def list_folders(prefixes: Sequence[str], read_page: ReadPage) -> Mapping[str, Mapping[str, int | None]]:
    """Returns the listings of folders, by the prefixes of their keys, which are in ascending order. Folders that the
    pages do not reach are left out.
    """
    found: dict[str, Mapping[str, int | None]] = {}
    while len(found) < len(prefixes):
        remaining = prefixes[len(found) :]
        page = _page_after(remaining[0], read_page)
        if page is None:
            break
        reached = list(_listings_in(page, remaining))
        found |= reached
        if len(reached) < 2:
            break
    return found


def _listings_in(page: _Page, prefixes: Sequence[str]) -> Iterator[tuple[str, Mapping[str, int | None]]]:
    """Yields, in order, prefix and listing of each folder before the first one whose keys may go on after the page."""
    for prefix in prefixes:
        first, stop = (bisect_left(page.keys, key) for key in (prefix, f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"))
        if stop == len(page.keys) and not page.is_last:
            return
        listing: dict[str, int | None] = {}
        for key, size in zip(page.keys[first:stop], page.sizes[first:stop], strict=True):
            name, is_folder, _ = key[len(prefix) :].partition("/")
            listing[name] = listing.get(name) if is_folder else size
        yield prefix, listing
