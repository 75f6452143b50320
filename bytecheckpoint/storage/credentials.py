"""Keeps credentials out of messages: what of a URL may be shown, and whether an error's text repeats a secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from bytecheckpoint.storage.os_errors import describe

_QUERY = re.compile(r"\?.*?(?=::|\Z)")
_USER = re.compile(r"(?<=://)[^/]*@")
_PLAIN_OPTIONS = frozenset({"endpoint_url", "endpoint", "region_name", "region", "host", "project", "protocol"})
"""Options whose values help to understand an error and are no secret."""
_MAX_SHOWN = 500


def showable_url(url: str) -> str:
    """The URL without user, password and query string."""
    return _USER.sub("", _QUERY.sub("", url))


def find_secrets(url: str, storage_options: Mapping[str, object]) -> frozenset[str]:
    """Every text of the URL and the options that no message may repeat."""
    secrets = set(_option_values(storage_options))
    for query in _QUERY.findall(url):
        secrets.add(query[1:])
        secrets.update(part.partition("=")[2] for part in query[1:].split("&"))
    for user in _USER.findall(url):
        secrets.add(user[:-1])
        secrets.add(user[:-1].partition(":")[2])
    return frozenset({*secrets, *map(unquote, secrets)} - {""})


def _option_values(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _option_values(value)
        elif isinstance(value, bytes):
            yield value.decode("utf-8", "replace")
        elif isinstance(value, str) and (name not in _PLAIN_OPTIONS or "@" in value):
            yield value


def tells_secret(error: BaseException | None, secrets: frozenset[str]) -> bool:
    """Whether a traceback of the error, with the errors behind it, would show a secret."""
    while error is not None:
        if any(secret in str(error) or secret in repr(error) for secret in secrets):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_safely(error: BaseException, secrets: frozenset[str]) -> str:
    """The error's own words, or only its class where they repeat a secret."""
    words = describe(error)
    if any(secret in words for secret in secrets):
        return f"{type(error).__name__} (its text is left out, because it repeats a credential)"
    return words if len(words) <= _MAX_SHOWN else words[:_MAX_SHOWN] + " ..."
