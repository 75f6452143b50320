"""How the bytes of one object reach S3: in one request, or in parts, several in flight, straight out of the memory
that blocks give. Either the whole object appears or nothing stays behind. It translates no errors.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

from bytecheckpoint.errors import TransferProgress
from bytecheckpoint.storage.backends.s3_client import BROKEN_OFF
from bytecheckpoint.storage.backends.s3_errors import (
    S3_ERRORS,
    FailedRequestError,
    is_missing,
    is_no_upload,
    is_taken,
    is_transient,
    is_unreachable,
    is_unsupported,
    may_arrive,
)
from bytecheckpoint.storage.backends.s3_requests import RetryPolicy, S3Requests
from bytecheckpoint.storage.object_io import open_block, take_blocks
from bytecheckpoint.storage.store import Block

_MIN_PART_BYTES = 5 << 20
"""S3 takes no smaller one, but for the last."""
_PART_BYTES = 16 << 20
_MAX_PARTS = 9000
"""S3 takes 10,000."""
_WRITER = "bytecheckpoint-write"
"""Under which an object's metadata says who wrote it: how a lost answer is told from another writer's object."""
_CLEAN_UP_S = 10.0
_LOOKS = 2
"""At an object that is not said to be one's own: an answer may break off within its headers."""


class TakenError(Exception):
    """The name exists, and what is there is another writer's, who was no slower."""


class Target(NamedTuple):
    """An object that is to be."""

    key: str
    is_new: bool
    """Whether the name must be free."""
    writer: str
    """Unlike that of any other write."""


def new_target(key: str, *, replace: bool) -> Target:
    return Target(key, is_new=not replace, writer=secrets.token_hex(16))


def upload(
    requests: S3Requests, target: Target, blocks: Sequence[Block], num_bytes: int, *, in_flight: int, timeout_s: float
) -> None:
    """Publishes the object, once all blocks are left. Memory is that of the blocks, which are entered `in_flight` at a
    time; where they are too small or too many for parts, `in_flight` parts of up to 64 MiB, more from 576 GiB on. What
    has 16 MiB or less is copied.

    Raises TakenError, FailedRequestError, and what a block's `content` raises.
    """
    patience = RetryPolicy(timeout_s, threading.Event())
    if num_bytes <= _PART_BYTES:
        _put(requests, target, _copied(blocks, num_bytes), patience)
        return
    _Parts(requests, target, patience).send(_as_parts(blocks, num_bytes), in_flight=in_flight)


def _put(requests: S3Requests, target: Target, content: memoryview, patience: RetryPolicy) -> None:
    body = content if content.nbytes else b""
    parameters = {"Key": target.key, "Body": body, "Metadata": {_WRITER: target.writer}, **_checksum(requests, content)}
    _publish(requests, target, partial(requests.send, "put_object", **parameters), patience)


def _publish(requests: S3Requests, target: Target, request: Callable[..., Any], patience: RetryPolicy) -> None:
    """The request that makes the object visible. What was carried out while its answer was lost is a success."""
    replaced = "" if target.is_new else requests.persist(lambda _: _look(requests, target).etag, patience)
    mine = (requests, target, patience)
    unanswered: list[Exception] = []

    def send(**condition: str) -> None:
        try:
            request(**condition)
        except S3_ERRORS as error:
            if may_arrive(error):
                unanswered.append(error)
            raise

    def attempt(number: int) -> None:
        # Hazard: what an attempt without an answer has put there may be replaced since, and what it needs be deleted.
        if number and not target.is_new:
            found = _look(requests, target)
            if found.writer == target.writer:
                return
            if found.etag != replaced:
                # Hazard: one that was sent without a condition replaces what stands there now, when it arrives.
                raise unanswered[-1] if unanswered and not _condition(requests, replaced) else TakenError
        condition = _condition(requests, replaced)
        try:
            send(**condition)
        except S3_ERRORS as error:
            if condition and (is_unsupported(error) or _is_misjudged(requests, target, replaced, error)):
                requests.refuses |= condition.keys()
                send()
            # What is refused now may have been done by an attempt whose answer did not arrive, one of botocore's too.
            elif is_transient(error) or not (number or _is_refused(error, replaced)) or not _is_there(*mine):
                raise

    try:
        requests.persist(attempt, patience)
    except FailedRequestError as failed:
        if _is_refused(failed.error, replaced):
            raise TakenError from failed
        failed.may_arrive = bool(unanswered)
        if not is_transient(failed.error) or not _is_seen(requests, target, patience):
            raise
    if target.is_new and "IfNoneMatch" in requests.refuses and not _is_there(requests, target, patience):
        raise TakenError


def _condition(requests: S3Requests, replaced: str) -> dict[str, str]:
    """Under which the request is to be carried out, whenever it arrives: that the name is as it was when it was looked
    at. Late ones, of a save that was given up long ago, then change nothing.
    """
    condition = {"IfMatch": replaced} if replaced else {"IfNoneMatch": "*"}
    return {name: value for name, value in condition.items() if name not in requests.refuses}


def _is_refused(error: Exception, replaced: str) -> bool:
    """Whether the condition did not hold: another object stands there, or the one that was to be replaced is gone."""
    return is_taken(error) or (bool(replaced) and is_missing(error))


def _is_misjudged(requests: S3Requests, target: Target, replaced: str, error: Exception) -> bool:
    """Whether a service says that another object stands there than the one that does: it compares otherwise."""
    return bool(replaced) and is_taken(error) and _look(requests, target).etag == replaced


class _Found(NamedTuple):
    """What stands under a name; of empty words where nothing does."""

    etag: str
    writer: str


def _look(requests: S3Requests, target: Target) -> _Found:
    """One attempt; raises S3_ERRORS."""
    try:
        found = requests.send("head_object", Key=target.key)
    except S3_ERRORS as error:
        if is_missing(error):
            return _Found("", "")
        raise
    if "ETag" not in found:
        raise ConnectionError(BROKEN_OFF)
    return _Found(str(found["ETag"]), str(found.get("Metadata", {}).get(_WRITER, "")))


def _is_there(requests: S3Requests, target: Target, patience: RetryPolicy) -> bool:
    """Whether the object is the one of this write. Raises FailedRequestError where that cannot be found out: who took
    his own object for another's would take back what belongs to it.
    """
    for _ in range(_LOOKS):
        found = requests.head(target.key, patience._replace(timeout_s=min(patience.timeout_s, _CLEAN_UP_S)))
        if found is None or found.get("Metadata", {}).get(_WRITER) == target.writer:
            return found is not None
    return False


def _is_seen(requests: S3Requests, target: Target, patience: RetryPolicy) -> bool:
    """As `_is_there`, for a write that is known to have failed otherwise."""
    with suppress(FailedRequestError):
        return _is_there(requests, target, patience)
    return False


class _Parts:
    """A multipart upload."""

    def __init__(self, requests: S3Requests, target: Target, patience: RetryPolicy) -> None:
        self._requests = requests
        self._target = target
        self._patience = patience
        self._upload_id = ""
        self._may_have_others = False
        """Whether the service may have begun an upload whose answer was lost."""
        self._failures: list[FailedRequestError] = []
        """Of parts, in the order of time."""

    def send(self, parts: Sequence[Block], *, in_flight: int) -> None:
        started = time.monotonic()
        numbers = {part.byte_offset: number for number, part in enumerate(parts, 1)}
        sent: dict[int, dict[str, object]] = {}

        def take(content: memoryview, byte_offset: int) -> None:
            number = numbers[byte_offset]
            sent[number] = self._send_part(number, content)

        try:
            self._begin()
            take_blocks(parts, take, num_threads=in_flight)
            listed = {"Parts": [sent[number] for number in sorted(sent)]}
            _publish(self._requests, self._target, partial(self._complete, MultipartUpload=listed), self._patience)
        except FailedRequestError as failed:
            first = self._failures[0] if self._failures else failed
            done_bytes = sum(part.byte_length for part in parts if numbers[part.byte_offset] in sent)
            num_bytes = sum(part.byte_length for part in parts)
            first.moved = TransferProgress(done_bytes, num_bytes, time.monotonic() - started)
            self._abort(first)
            raise first from first.error
        except BaseException as error:
            self._abort(error)
            raise
        if self._may_have_others:
            abort_uploads_of(self._requests, self._target.key)

    def _begin(self) -> None:
        metadata = {_WRITER: self._target.writer}

        def note() -> None:
            self._may_have_others = True

        self._upload_id = begin_upload(
            self._requests, self._target.key, self._patience, on_lost=note, Metadata=metadata
        )

    def _send_part(self, number: int, content: memoryview) -> dict[str, object]:
        """What completing the upload says about this part."""
        checksum = _checksum(self._requests, content)

        def attempt(_number: int) -> dict[str, object]:
            answer = self._request("upload_part", PartNumber=number, Body=content, **checksum)
            if "ETag" not in answer:
                raise ConnectionError(BROKEN_OFF)
            told = {name: value for name, value in answer.items() if name in checksum}
            return {"PartNumber": number, "ETag": answer["ETag"], **told}

        try:
            return self._requests.persist(attempt, self._patience)
        except FailedRequestError as failed:
            self._failures.append(failed)
            self._patience.stop.set()  # others may be waiting to try theirs again
            raise

    def _complete(self, **parameters: Any) -> None:
        # Hazard: S3 answers 200 before it puts the parts together, and may break off after that. If they were, the
        # next attempt finds the object.
        if "ETag" not in self._request("complete_multipart_upload", **parameters):
            raise ConnectionError("the answer to the end of the upload names no object")

    def _request(self, operation: str, **parameters: Any) -> Any:
        return self._requests.send(operation, Key=self._target.key, UploadId=self._upload_id, **parameters)

    def _abort(self, error: BaseException) -> None:
        patience = RetryPolicy(_CLEAN_UP_S, threading.Event())
        try:
            if self._upload_id:
                self._requests.persist(lambda _: self._request("abort_multipart_upload"), patience)
        except FailedRequestError as failed:
            if not is_no_upload(failed.error):
                error.add_note("parts that were uploaded may be left, which `bcp gc` removes")
        if self._may_have_others:
            abort_uploads_of(self._requests, self._target.key)


def begin_upload(
    requests: S3Requests, key: str, patience: RetryPolicy, *, on_lost: Callable[[], None], **parameters: Any
) -> str:
    """The id of a new upload. `on_lost` is called where the service may have begun one whose id did not arrive."""

    def attempt(_number: int) -> str:
        try:
            return str(requests.send("create_multipart_upload", Key=key, **parameters)["UploadId"])
        except S3_ERRORS as error:
            if is_transient(error) and not is_unreachable(error):
                on_lost()
            raise

    return requests.persist(attempt, patience)


def abort_uploads_of(requests: S3Requests, key: str) -> None:
    """As far as the service lets it. Hazard: all uploads of this object, so nobody else may use its name."""
    patience = RetryPolicy(_CLEAN_UP_S, threading.Event())
    found: Mapping[str, Any] = {}
    with suppress(FailedRequestError):
        found = requests.call("list_multipart_uploads", patience, Prefix=key)
    for upload_id in [other["UploadId"] for other in found.get("Uploads", ()) if other["Key"] == key]:
        with suppress(FailedRequestError):  # as it is when the answer to the first attempt was lost: there is none more
            requests.call("abort_multipart_upload", patience, Key=key, UploadId=upload_id)


def _checksum(requests: S3Requests, content: memoryview) -> dict[str, str]:
    """What the service compares with the bytes that reached it."""
    if not requests.has_checksums:
        return {}
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()}


def _as_parts(blocks: Sequence[Block], num_bytes: int) -> Sequence[Block]:
    """The blocks themselves where they can be parts, so that nothing is copied."""
    part_bytes = max(_PART_BYTES, -(-num_bytes // _MAX_PARTS))
    is_large_enough = all(block.byte_length >= _MIN_PART_BYTES for block in blocks[:-1])
    return blocks if is_large_enough and len(blocks) <= _MAX_PARTS else _joined(blocks, part_bytes)


def _joined(blocks: Sequence[Block], part_bytes: int) -> list[Block]:
    """Neighbours as one, each of at least so many bytes but for the last."""
    groups: list[list[Block]] = []
    for block in blocks:
        if not groups or sum(other.byte_length for other in groups[-1]) >= part_bytes:
            groups.append([])
        groups[-1].append(block)
    return [_join(group) for group in groups]


def _join(group: Sequence[Block]) -> Block:
    num_bytes = sum(block.byte_length for block in group)
    return Block(group[0].byte_offset, num_bytes, lambda: nullcontext(_copied(group, num_bytes)))


def _copied(blocks: Sequence[Block], num_bytes: int) -> memoryview:
    """One after the other: memory that blocks share may not suffice to hold them all."""
    memory = memoryview(bytearray(num_bytes))
    position = 0
    for block in blocks:
        with open_block(block) as content:
            memory[position : position + block.byte_length] = content
        position += block.byte_length
    return memory
