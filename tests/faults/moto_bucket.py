"""moto's S3 on 127.0.0.1, and a look at what is in its bucket that goes through no client library."""

from __future__ import annotations

import json
import logging
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import unescape
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from bytecheckpoint.manifest import decode_manifest

REGION = "us-east-1"
_LOOKS = 100
_LOOK_S = 0.01
_SIGNED = f"AWS4-HMAC-SHA256 Credential=access/20260101/{REGION}/s3/aws4_request"
"""moto asks for a signature, and looks no further into it."""


@contextmanager
def running_moto() -> Iterator[Bucket]:
    """A bucket on a server of its own. What moto keeps is the whole process', whichever server it came through."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        server.start()
        try:
            yield Bucket(server.get_host_and_port()[1], "bucket").created()
        finally:
            server.stop()


class Bucket:
    """A bucket of a server on 127.0.0.1."""

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.name = name
        self.url = f"http://127.0.0.1:{port}"

    def created(self) -> Bucket:
        with suppress(urllib.error.HTTPError):  # it is there
            self._ask("PUT", f"/{self.name}")
        return self

    def beside(self, name: str) -> Bucket:
        """Another one of the same server."""
        return Bucket(self.port, name).created()

    def clear(self, prefix: str) -> None:
        """Removes all objects and uploads below the prefix."""
        for key in self._stored(prefix):
            self._ask("DELETE", f"/{self.name}/{quote(key)}")
        for key, upload_id in self._uploads(prefix):
            self._ask("DELETE", f"/{self.name}/{quote(key)}?{urlencode({'uploadId': upload_id})}")

    def objects(self, prefix: str) -> dict[str, bytes]:
        """All of them at one time. A late request may replace or remove one meanwhile: then all are read again."""
        for _ in range(_LOOKS - 1):
            with suppress(ValueError, KeyError):  # moto has closed it; it is gone
                return self._contents(prefix)
            time.sleep(_LOOK_S)
        return self._contents(prefix)

    def _contents(self, prefix: str) -> dict[str, bytes]:
        return {key: bytes(stored.value) for key, stored in self._stored(prefix).items()}

    def _stored(self, prefix: str) -> dict[str, Any]:
        """What moto holds, which is in this process: asking for it through its server takes most of the time."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[self.name].keys
        return {key: found for key, found in stored.items() if key.startswith(prefix)}

    def uploads(self, prefix: str) -> list[str]:
        """The keys of uploads that were neither completed nor aborted."""
        return [key for key, _ in self._uploads(prefix)]

    def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        listing = self._ask("GET", f"/{self.name}?uploads").decode()
        found = re.findall(r"<Upload>.*?<Key>(.*?)</Key>.*?<UploadId>(.*?)</UploadId>.*?</Upload>", listing, re.DOTALL)
        return [(unescape(key), upload_id) for key, upload_id in found if unescape(key).startswith(prefix)]

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, method=method, headers={"Authorization": _SIGNED})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())


def storage_options(url: str, **more: Any) -> dict[str, Any]:
    """For s3fs, to reach a server at this URL; whatever the client library retries by itself is done soon."""
    return {
        "key": "access",
        "secret": "secret",
        "endpoint_url": url,
        "client_kwargs": {"region_name": REGION},
        **more,
    }


def what_is_partial(objects: dict[str, bytes]) -> list[str]:
    """The objects of which only a part is there, by what they say of themselves."""
    return [key for key, content in objects.items() if not _is_whole(key, content)]


def _is_whole(key: str, content: bytes) -> bool:
    try:
        if key.endswith(".safetensors"):
            header_bytes = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + header_bytes])
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return len(content) == 8 + header_bytes + max(ends, default=0)
        if key.endswith("/manifest.bcp"):
            return bool(decode_manifest(content).save_id)
        return bool(json.loads(content))  # telemetry
    except ValueError:
        return False
