"""Transfers of bytes by client libraries alone: s3fs, boto3 and obstore, each tuned. Every transfer goes from memory to
memory; none verifies more than the library does by itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import botocore.config
import numpy as np

KEY, SECRET, REGION = "access", "secret", "us-east-1"


class Transfer(NamedTuple):
    """Functions with which a library moves an object."""

    put: Callable[[str, memoryview], None]
    get: Callable[[str, memoryview], None]
    """Fills the memory, which is as long as the object."""


def s3fs_options(endpoint: str) -> dict[str, Any]:
    return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": {"region_name": REGION}}


def s3fs_transfer(endpoint: str, bucket: str, part_bytes: int, at_once: int) -> Transfer:
    import s3fs  # noqa: PLC0415  only libraries that are measured are imported

    options = s3fs_options(endpoint) | {"max_concurrency": at_once, "default_block_size": part_bytes}
    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True, config_kwargs={"max_pool_connections": at_once})

    def put(key: str, content: memoryview) -> None:
        fs.pipe_file(f"{bucket}/{key}", bytes(content), chunksize=part_bytes)  # it takes bytes only

    def get(key: str, into: memoryview) -> None:
        into[:] = fs.cat_file(f"{bucket}/{key}", chunksize=part_bytes)

    return Transfer(put, get)


def boto3_transfer(endpoint: str, bucket: str, part_bytes: int, at_once: int) -> Transfer:
    import boto3  # noqa: PLC0415  as above
    from boto3.s3.transfer import TransferConfig  # noqa: PLC0415  as above

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=REGION,
        config=botocore.config.Config(max_pool_connections=at_once),
    )
    config = TransferConfig(multipart_threshold=part_bytes, multipart_chunksize=part_bytes, max_concurrency=at_once)

    def put(key: str, content: memoryview) -> None:
        client.upload_fileobj(io.BytesIO(content), bucket, key, Config=config)

    def get(key: str, into: memoryview) -> None:
        client.download_fileobj(bucket, key, MemoryFile(into), Config=config)

    return Transfer(put, get)


class MemoryFile(io.RawIOBase):
    """A file that writes into memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, _whence: int = 0, /) -> int:
        self._position = offset
        return offset

    def write(self, content: Any, /) -> int:
        self._memory[self._position : self._position + len(content)] = content
        self._position += len(content)
        return len(content)


def obstore_transfer(endpoint: str, bucket: str, part_bytes: int, at_once: int) -> Transfer:
    import obstore  # noqa: PLC0415  as above
    from obstore.store import S3Store  # noqa: PLC0415  as above

    store = S3Store(
        bucket,
        endpoint=endpoint,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region=REGION,
        client_options={"allow_http": True},
    )

    def put(key: str, content: memoryview) -> None:
        whole = np.frombuffer(content, np.uint8)
        obstore.put(store, key, memoryview(whole), use_multipart=True, chunk_size=part_bytes, max_concurrency=at_once)

    def get(key: str, into: memoryview) -> None:
        def get_part(start: int) -> None:
            end = min(start + part_bytes, len(into))
            into[start:end] = memoryview(obstore.get_range(store, key, start=start, end=end))

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(get_part, range(0, len(into), part_bytes)))

    return Transfer(put, get)
