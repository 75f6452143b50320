"""Copy of one object inside a bucket, made by the service: in one request, or in parts of an upload if it is large. It
translates no errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.backends.s3_client import BROKEN_OFF
from bytecheckpoint.storage.backends.s3_errors import FailedRequestError, is_no_upload
from bytecheckpoint.storage.backends.s3_requests import RetryPolicy, S3Requests
from bytecheckpoint.storage.backends.s3_upload import abort_uploads_of, begin_upload

MAX_COPY_BYTES = 5 << 30
"""S3 copies no longer object in one request."""
_PART_BYTES = 1 << 30
_RESULTS = {"copy_object": "CopyObjectResult", "upload_part_copy": "CopyPartResult"}


class S3CopySource(NamedTuple):
    """The object to be copied, as it was found."""

    bucket: str
    key: str
    etag: str
    num_bytes: int

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of a copy request, which fails if the object's ETag, where known, has changed."""
        source = {"CopySource": {"Bucket": self.bucket, "Key": self.key}}
        return {**source, "CopySourceIfMatch": self.etag} if self.etag else source


def copy(requests: S3Requests, source: S3CopySource, key: str, policy: RetryPolicy, *, in_flight: int) -> None:
    """Copies an object to a key that no other writer may use meanwhile: if a copy in parts fails, all uploads to the
    key are aborted. Raises FailedRequestError.
    """
    if source.num_bytes <= MAX_COPY_BYTES:
        _copy(requests, "copy_object", policy, Key=key, **source.parameters())
        return
    lost: list[bool] = []
    try:
        upload_id = begin_upload(requests, key, policy, on_lost=lambda: lost.append(True))
        starts = range(0, source.num_bytes, _PART_BYTES)
        request = partial(
            _copy, requests, "upload_part_copy", policy, Key=key, UploadId=upload_id, **source.parameters()
        )
        copy_part = partial(_copy_part, request, source.num_bytes)
        parts = map_jobs(copy_part, list(enumerate(starts, 1)), num_threads=in_flight)
        requests.persist(lambda _: _complete(requests, key, upload_id, parts), policy)
    except FailedRequestError as failed:
        found = requests.head(key, policy) if is_no_upload(failed.error) else None
        if found is None or found.get("ContentLength") != source.num_bytes:  # else only the answer was lost
            abort_uploads_of(requests, key)
            raise
    except BaseException:
        abort_uploads_of(requests, key)
        raise
    if lost:
        abort_uploads_of(requests, key)


def _copy_part(request: Callable[..., Mapping[str, Any]], num_bytes: int, part: tuple[int, int]) -> Mapping[str, Any]:
    number, start = part
    end = min(start + _PART_BYTES, num_bytes)
    copied = request(PartNumber=number, CopySourceRange=f"bytes={start}-{end - 1}")
    return {"PartNumber": number, "ETag": copied["ETag"]}


def _copy(requests: S3Requests, operation: str, policy: RetryPolicy, **parameters: Any) -> Mapping[str, Any]:
    """Sends a request that copies, and returns the answer's result, which has an ETag."""

    def attempt(_number: int) -> Mapping[str, Any]:
        answer = requests.send(operation, **parameters)
        copied: Mapping[str, Any] = answer.get(_RESULTS[operation]) or {}
        if "ETag" not in copied:  # S3 answers 200 before it copies, and may break off after that
            raise ConnectionError(BROKEN_OFF)
        return copied

    return requests.persist(attempt, policy)


def _complete(requests: S3Requests, key: str, upload_id: str, parts: list[Mapping[str, Any]]) -> None:
    listed = {"Parts": parts}
    answer = requests.send("complete_multipart_upload", Key=key, UploadId=upload_id, MultipartUpload=listed)
    if "ETag" not in answer:  # S3 answers 200 before it puts the parts together, and may break off after that
        raise ConnectionError(BROKEN_OFF)
