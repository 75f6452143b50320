"""Redaction of credentials: URLs fit for messages, and errors whose text repeats a secret."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from urllib.parse import quote, quote_plus, unquote

from bytecheckpoint.errors import with_causes
from bytecheckpoint.storage.backends.posix_errors import describe

_QUERY = re.compile(r"\?.*?(?=::|\Z)", re.DOTALL)
_USER = re.compile(r"(?P<before>:/{1,2})(?P<user>[^/]*|[^/:@]+:(?!\d*(?:/|\Z))[^@:]*)@")
"""User and password before the host, also in a URL that lost a slash. A password may contain slashes, as keys of S3 do:
after a colon that no port follows, it extends to the `@`."""
_AZURE = re.compile(r"\b(?:abfss?|az|wasbs?)\Z")
"""Schemes whose URLs have a container in place of the user: `abfs://CONTAINER@ACCOUNT...`. It is not a secret."""
_QUERY_FIELD = re.compile(r"[&?][^=&]*=([^&]+)")
_STRING_FIELD = re.compile(r";[^=;]*=([^;]{8,})")
"""A field of a connection string; shorter values are not keys, but words like `https`."""
_PLAIN_OPTIONS = frozenset(
    {
        *("endpoint_url", "endpoint", "region_name", "region", "host", "project", "protocol", "profile"),
        *("addressing_style", "signature_version", "mode", "default_cache_type", "cache_type"),
        *("ACL", "ServerSideEncryption", "StorageClass"),
        *("account_name", "account_host", "container_name"),
    }
)
"""Options, at any depth, whose values help to understand an error and are not secret."""
_PASSWORDS = {"username": "password", "user": "password", "key": "secret"}
"""Options that some backend sends together, as in Basic authentication."""
_MIN_PART = 4
"""Shortest part of a secret that counts as a secret itself, in characters: shorter parts occur in ordinary words."""
_MAX_SHOWN = 500


def shown_path(path: object) -> str:
    """Returns a path or a URL for messages, without credentials; for anything else, which will be refused, its type."""
    return showable_url(str(path)) if isinstance(path, (str, os.PathLike)) else f"a {type(path).__name__}"


def showable_url(url: str) -> str:
    """Returns the URL without user, password and query string. A local path stays unchanged."""
    if ":/" not in url and "::" not in url:
        return url
    return _USER.sub(lambda found: found[0] if _is_container(found) else found["before"], _QUERY.sub("", url))


def _is_container(found: re.Match[str]) -> bool:
    return ":" not in found["user"] and _AZURE.search(found.string[: found.start()]) is not None


def find_secrets(url: str, storage_options: Mapping[str, object]) -> frozenset[str]:
    """Returns every text of the URL and the options that no message may repeat, in all forms in which it could show."""
    secrets = {*_secrets_of_url(url), *_secrets_of_options(storage_options)}
    for user, password in _PASSWORDS.items():
        if user in storage_options and password in storage_options:
            secrets.add(f"{storage_options[user]}:{storage_options[password]}")
    plain = {*secrets, *map(unquote, secrets)}
    quoted = {quoted for secret in plain for quoted in (quote(secret), quote(secret, safe=""), quote_plus(secret))}
    basic = {b64encode(secret.encode()).decode() for secret in plain if ":" in secret}
    return frozenset({*plain, *quoted, *basic, *(repr(secret)[1:-1] for secret in plain)} - {""})


def _secrets_of_url(url: str) -> Iterator[str]:
    for query in _QUERY.findall(url):
        yield query[1:]
        yield from _QUERY_FIELD.findall(query)
    for found in _USER.finditer(url):
        if _is_container(found):
            continue
        yield found["user"]
        yield found["user"].partition(":")[2]
        # A parser that takes the first slash for the end of the host repeats the part before it.
        yield from (part for part in re.split("[:/]", found["user"]) if len(part) >= _MIN_PART)


def _secrets_of_options(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        yield from _secrets_of_option(name, value)


def _secrets_of_option(name: str, value: object) -> Iterator[str]:
    """Yields the texts in the value of an option that no message may repeat."""
    match value:
        case Mapping():
            yield from _secrets_of_options(value)
        case bytes():
            yield value.decode("utf-8", "replace")
        case list() | tuple():
            parts = [part for item in value for part in _secrets_of_option("", item)]
            yield from parts
            yield ":".join(parts)
        case str() if "://" in value and name in _PLAIN_OPTIONS:
            yield from _secrets_of_url(value)
        case str() if name not in _PLAIN_OPTIONS:
            yield value
            yield from _STRING_FIELD.findall(f";{value}")


def contains_secret(error: BaseException, secrets: frozenset[str]) -> bool:
    """Returns True if a traceback of the error, with its causes, could show a secret."""
    texts = (text for each in with_causes(error) for text in (str(each), repr(each)))
    return any(secret in text for text in texts for secret in secrets)


def describe_safely(error: BaseException, secrets: frozenset[str]) -> str:
    """Returns the error's message, cut after 500 characters; only its class and a note if it repeats a secret."""
    words = describe(error)
    if any(secret in words for secret in secrets):
        return f"{type(error).__name__} (its text is left out, because it repeats a credential)"
    return words if len(words) <= _MAX_SHOWN else words[:_MAX_SHOWN] + " ..."
