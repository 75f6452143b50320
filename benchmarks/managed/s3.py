"""An S3 for a manager: moto's, in a process of its own. It is slow, but answers as S3 does: listings come in pages of
1,000.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

BUCKET = "bucket"
SERVER = Path(__file__).with_name("moto_server.py")


class S3Place(NamedTuple):
    """The bucket of a server."""

    port: int

    @property
    def root(self) -> str:
        return f"s3://{BUCKET}/run"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "key": "access",
            "secret": "secret",
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }


@contextmanager
def serving_moto() -> Iterator[S3Place]:
    """Starts a server with an empty bucket in a process of its own."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER), BUCKET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield S3Place(int(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()
