"""Buckets of moto's S3 server on 127.0.0.1, started once a session and only where a test asks for it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Bucket(NamedTuple):
    """A place for a run."""

    url: str
    options: dict[str, Any]


@contextmanager
def running_moto() -> Iterator[dict[str, Any]]:
    """The storage options that lead to it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {
            "key": "access",
            "secret": "hidden",
            "endpoint_url": f"http://{host}:{port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }
    finally:
        server.stop()


def new_bucket(options: dict[str, Any]) -> Bucket:
    """An empty one."""
    import s3fs

    name = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(**options).call_s3("create_bucket", Bucket=name)
    return Bucket(f"s3://{name}/run", options)
