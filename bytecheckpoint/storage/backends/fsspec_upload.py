"""How the bytes of one object reach an fsspec backend so that no reader sees a part of them. What does that differs:
multipart uploads, a whole object in one call, or a temporary name and a move. It translates no errors.
"""

from __future__ import annotations

import errno
import inspect
import io
import secrets
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from typing import Any, Protocol

import xxhash
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage.object_io import open_block
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX
from bytecheckpoint.storage.store import Block

_WHOLE_BYTES = 32 << 20
"""Up to this size an object is sent in one call, whatever the backend."""
_CALL_BYTES = 32 << 20
"""Handed over, or read back, in one call."""
_MAX_PARTS = 9000
"""S3 takes 10,000 parts an object."""
_MiB = 1 << 20

_MULTIPART = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos"})
"""Their open file is an upload that shows nothing until it is completed."""
_AZURE = frozenset({"az", "abfs", "abfss"})
_MULTIPART_CREATE = _AZURE | frozenset({"s3", "s3a"})
"""Of those, the ones that complete an upload opened as "xb" only where there is no such object."""
_CREATING_MOVE = frozenset({"webdav", "dav"})
"""Whose servers move something only where nothing is, if they are asked to."""
_MOVING = _CREATING_MOVE | frozenset({"sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs", "webHDFS", "dbfs"})
_MOVING |= {"file", "local"}
"""File systems: a half-written file is visible, and a move is atomic."""
_WEBHDFS = frozenset({"webhdfs", "webHDFS"})
_KEEPING_TARGETS = {
    **dict.fromkeys(("hdfs", "arrow_hdfs"), "pyarrow deletes the target first and moves then"),
    "smb": "an SMB rename refuses a target that exists",
    "ftp": "an FTP rename onto a target that exists does what each server pleases",
    "dbfs": "its move refuses a target that exists",
}
"""The protocols that cannot replace a file in one step, with the reason."""


class Calling(Protocol):
    """Makes the context in which the backend is called; `may_be_done` where an error may mean a lost answer."""

    def __call__(self, *, may_be_done: bool = False) -> AbstractContextManager[None]: ...


class Upload:
    """One object on its way: where to, and a digest of what was sent, to know it again."""

    def __init__(self, path: str, num_bytes: int, *, replace: bool) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.replace = replace
        self._digest = xxhash.xxh3_128()

    def pieces(self, blocks: Sequence[Block]) -> Generator[memoryview, None, None]:
        """The bytes of the blocks in order, at most _CALL_BYTES at a time. Each holds until the next is taken."""
        for block in blocks:
            with open_block(block) as content:
                self._digest.update(content)
                yield from (content[start : start + _CALL_BYTES] for start in range(0, content.nbytes, _CALL_BYTES))

    def is_at(self, fs: Any) -> bool:
        """Whether the backend has exactly the bytes that were sent. Raises what the backend raises."""
        fs.invalidate_cache(self.path)
        if fs.info(self.path)["size"] != self.num_bytes:
            return False
        found = xxhash.xxh3_128()
        for start in range(0, self.num_bytes, _CALL_BYTES):
            found.update(fs.cat_file(self.path, start=start, end=min(start + _CALL_BYTES, self.num_bytes)))
        return found.digest() == self._digest.digest()


def send(fs: Any, upload: Upload, blocks: Sequence[Block], calling: Calling) -> None:
    """Publishes the object, or raises and publishes nothing. What a block's `content` raises passes through."""
    protocols = _protocols(fs)
    if protocols & _MOVING:
        _send_and_move(fs, upload, blocks, calling)
    elif protocols & _MULTIPART and upload.num_bytes > _WHOLE_BYTES:
        mode = "xb" if protocols & _MULTIPART_CREATE and not upload.replace else "wb"
        with calling():
            file = fs.open(upload.path, mode, block_size=_part_bytes(upload.num_bytes))
        _fill(file, upload, blocks, calling, closing_publishes=True)
    else:
        # Of an unknown backend nothing else is certain to show no part of an object, so memory has to hold it all.
        data = _copy(upload, blocks)
        with calling(may_be_done=True):
            _put(fs, upload, data)


def reason_against_replacing(fs: Any) -> str:
    """The reason why this backend cannot replace an object in one step; empty where it can."""
    reasons = (f"{name}://: {_KEEPING_TARGETS[name]}" for name in sorted(_protocols(fs)) if name in _KEEPING_TARGETS)
    return next(reasons, "")


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _copy(upload: Upload, blocks: Sequence[Block]) -> bytes:
    data = io.BytesIO()
    for piece in upload.pieces(blocks):
        data.write(piece)
    return data.getvalue()


def _part_bytes(num_bytes: int) -> int:
    return max(_CALL_BYTES, -(-num_bytes // (_MAX_PARTS * _MiB)) * _MiB)


def _fill(file: Any, upload: Upload, blocks: Sequence[Block], calling: Calling, *, closing_publishes: bool) -> None:
    """Writes and closes an open file; where anything fails, what it has is not published."""
    try:
        _write_pieces(file, upload, blocks, calling)
        with calling(may_be_done=closing_publishes):
            file.close()
    except BaseException:
        _abandon(file, calling)
        raise


def _write_pieces(file: Any, upload: Upload, blocks: Sequence[Block], calling: Calling) -> None:
    with closing(upload.pieces(blocks)) as pieces:  # so that a block is left before an error of the backend is raised
        for piece in pieces:
            with calling():
                file.write(piece)


def _abandon(file: Any, calling: Calling) -> None:
    if not isinstance(file, AbstractBufferedFile):
        with suppress(CheckpointError), calling():
            file.close()
        return
    with suppress(CheckpointError), calling():
        file.discard()
    # Hazard: closing it would complete the upload with what there is, and so would its finalizer.
    file.closed = True


def _send_and_move(fs: Any, upload: Upload, blocks: Sequence[Block], calling: Calling) -> None:
    folder, _, name = upload.path.rpartition("/")
    temporary = f"{folder}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{name[:200]}"
    with calling():
        fs.makedirs(folder, exist_ok=True)
        file = fs.open(temporary, "wb")
    try:
        _fill(file, upload, blocks, calling, closing_publishes=False)
        with calling(may_be_done=True):
            _move(fs, temporary, upload)
            _check_moved(fs, temporary, upload)
    except BaseException:
        with suppress(CheckpointError), calling():
            fs.rm_file(temporary)
        raise


def _move(fs: Any, temporary: str, upload: Upload) -> None:
    if _protocols(fs) & _CREATING_MOVE:
        fs.client.move(temporary, upload.path, overwrite=upload.replace)
    elif _protocols(fs) & _WEBHDFS:
        # `mv` ignores the answer, and asks for no replacement: HDFS then says 200, "false", and moves nothing.
        options = {"renameoptions": "OVERWRITE"} if upload.replace else {}
        fs._call("RENAME", method="put", path=temporary, destination=fs._strip_protocol(upload.path), **options)
    else:
        # Hazard: it replaces. Of two writers that both found the name free the later one wins.
        fs.mv(temporary, upload.path)


def _check_moved(fs: Any, temporary: str, upload: Upload) -> None:
    """Raises OSError where the backend reported success and did not move the file."""
    for path in (temporary, upload.path):
        fs.invalidate_cache(path)
    if not fs.exists(temporary) and fs.info(upload.path)["size"] == upload.num_bytes:
        return
    if not upload.replace and fs.exists(upload.path):
        raise FileExistsError(errno.EEXIST, "another writer was faster", upload.path)
    cannot = ", and it cannot replace a file" if upload.replace else ""
    raise OSError(errno.EIO, f"the storage answered that it has moved the written file here, but it has not{cannot}")


def _put(fs: Any, upload: Upload, data: bytes) -> None:
    if upload.replace:
        fs.pipe_file(upload.path, data)
    elif type(fs) is MemoryFileSystem:
        # Its own create-only mode looks first and stores later: of two threads both may succeed.
        file = MemoryFile(fs, "/" + upload.path.lstrip("/"), data)
        if fs.store.setdefault(file.path, file) is not file:
            raise FileExistsError(errno.EEXIST, "another writer was faster", upload.path)
    elif takes(fs, "pipe_file", "mode") or _protocols(fs) & _AZURE:  # adlfs has the parameter, and does not name it
        _put_if_absent(fs, upload.path, data)
    else:
        fs.pipe_file(upload.path, data)  # the check before the write is all there is


def _put_if_absent(fs: Any, path: str, data: bytes) -> None:
    try:
        fs.pipe_file(path, data, mode="create")
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        fs.pipe_file(path, data)  # a server that knows no conditional write: the check before it is all there is


def takes(fs: Any, method: str, parameter: str) -> bool:
    """Whether the method has the parameter; asynchronous backends declare it on the coroutine behind the method."""
    return parameter in inspect.signature(getattr(fs, f"_{method}", None) or getattr(fs, method)).parameters
