"""Serves the files of a folder as a bucket, with the options for a command that reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from pathlib import Path

from storage.s3_server import running_s3


@contextmanager
def filled_bucket(folder: Path, under: str = "run/") -> Iterator[list[str]]:
    """Yields the options of a command for a bucket that holds the files of the folder under `run`."""
    with counted_bucket(folder, under) as (_, options):
        yield options


@contextmanager
def counted_bucket(folder: Path, under: str = "run/") -> Iterator[tuple[MutableSequence[str], list[str]]]:
    """Yields the requests to such a bucket, as they come, and the options."""
    with running_s3() as server:
        for path in folder.rglob("*"):
            if path.is_file():
                server.objects[f"bucket/{under}{path.relative_to(folder).as_posix()}"] = path.read_bytes()
        options = {
            "key": json.dumps("access"),
            "secret": json.dumps("s3cr3t"),
            "endpoint_url": server.url,
            "client_kwargs": '{"region_name": "us-east-1"}',
            "config_kwargs": '{"retries": {"max_attempts": 1}}',
        }
        yield (
            server.requests,
            [part for key, value in options.items() for part in ("--storage-option", f"{key}={value}")],
        )
