"""Atomic put of one object to an fsspec backend: by a multipart upload, a whole object in one call, or a temporary name
and a move, depending on the backend. It translates no errors.
"""

from __future__ import annotations

import errno
import inspect
import io
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from typing import Any, Protocol

import xxhash
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.object_io import open_block
from bytecheckpoint.storage.paths import temporary_name

_WHOLE_BYTES = 32 << 20
"""Up to this size an object is sent in one call, unless it is written under a temporary name and moved."""
_CALL_BYTES = 32 << 20
"""Bytes passed to the backend, or read back, in one call."""
_MAX_PARTS = 9000
"""S3 takes 10,000 parts an object."""
_MiB = 1 << 20

_MULTIPART = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos"})
"""Protocols whose open file is an upload that shows nothing until it is completed."""
_AZURE = frozenset({"az", "abfs", "abfss"})
_MULTIPART_CREATE = _AZURE | frozenset({"s3", "s3a"})
"""Multipart protocols that complete an upload opened as "xb" only if there is no such object."""
_CREATING_MOVE = frozenset({"webdav", "dav"})
"""Protocols whose servers can refuse to move onto an existing name."""
_MOVING = _CREATING_MOVE | frozenset({"sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs", "webHDFS", "dbfs"})
_MOVING |= {"file", "local"}
"""File systems: a half-written file is visible, and a move is atomic."""
_WEBHDFS = frozenset({"webhdfs", "webHDFS"})
_CANNOT_REPLACE = {
    **dict.fromkeys(("hdfs", "arrow_hdfs"), "pyarrow deletes the target first and moves then"),
    "smb": "an SMB rename refuses a target that exists",
    "ftp": "an FTP rename onto a target that exists does what each server pleases",
    "dbfs": "its move refuses a target that exists",
}
"""The protocols that cannot replace a file in one step, with the reason."""


class BackendContext(Protocol):
    """Makes the context for calls to the backend. The context translates their errors; with `may_be_done`, it checks
    whether a failed call was carried out all the same, and raises nothing if so.
    """

    def __call__(self, *, may_be_done: bool = False) -> AbstractContextManager[None]: ...


class FsspecUpload:
    """The path of an object to be written, and a digest of the bytes sent, to recognize it."""

    def __init__(self, path: str, num_bytes: int, *, replace: bool) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.replace = replace
        self._digest = xxhash.xxh3_128()

    def pieces(self, blocks: Sequence[Block]) -> Generator[memoryview, None, None]:
        """Yields the bytes of the blocks in order, at most _CALL_BYTES at a time, and adds them to the digest. A piece
        is valid until the next one is yielded.
        """
        for block in blocks:
            with open_block(block) as content:
                self._digest.update(content)
                yield from (content[start : start + _CALL_BYTES] for start in range(0, content.nbytes, _CALL_BYTES))

    def is_at(self, fs: Any) -> bool:
        """Returns True if the backend has exactly the bytes that were sent. Raises the backend's errors."""
        fs.invalidate_cache(self.path)
        if fs.info(self.path)["size"] != self.num_bytes:
            return False
        found = xxhash.xxh3_128()
        for start in range(0, self.num_bytes, _CALL_BYTES):
            found.update(fs.cat_file(self.path, start=start, end=min(start + _CALL_BYTES, self.num_bytes)))
        return found.digest() == self._digest.digest()


def send(fs: Any, upload: FsspecUpload, blocks: Sequence[Block], backend: BackendContext) -> None:
    """Publishes the object as a whole. If this raises, nothing is published, except perhaps by a last call that the
    backend carried out without an answer. What a block's `content` raises passes through.
    """
    protocols = _protocols(fs)
    if protocols & _MOVING:
        _send_and_move(fs, upload, blocks, backend)
    elif protocols & _MULTIPART and upload.num_bytes > _WHOLE_BYTES:
        mode = "xb" if protocols & _MULTIPART_CREATE and not upload.replace else "wb"
        with backend():
            file = fs.open(upload.path, mode, block_size=_part_bytes(upload.num_bytes))
        _fill(file, upload, blocks, backend, closing_publishes=True)
    else:
        # With an unknown backend only one call is certain to show no part of an object, so memory has to hold it all.
        data = _copy(upload, blocks)
        with backend(may_be_done=True):
            _put(fs, upload, data)


def reason_against_replacing(fs: Any) -> str:
    """Returns the reason why this backend cannot replace an object in one step; empty if it can."""
    reasons = (f"{name}://: {_CANNOT_REPLACE[name]}" for name in sorted(_protocols(fs)) if name in _CANNOT_REPLACE)
    return next(reasons, "")


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _copy(upload: FsspecUpload, blocks: Sequence[Block]) -> bytes:
    data = io.BytesIO()
    for piece in upload.pieces(blocks):
        data.write(piece)
    return data.getvalue()


def _part_bytes(num_bytes: int) -> int:
    return max(_CALL_BYTES, -(-num_bytes // (_MAX_PARTS * _MiB)) * _MiB)


def _fill(
    file: Any, upload: FsspecUpload, blocks: Sequence[Block], backend: BackendContext, *, closing_publishes: bool
) -> None:
    """Writes and closes an open file. If anything fails, its bytes are not published."""
    try:
        _write_pieces(file, upload, blocks, backend)
        with backend(may_be_done=closing_publishes):
            file.close()
    except BaseException:
        _abandon(file, backend)
        raise


def _write_pieces(file: Any, upload: FsspecUpload, blocks: Sequence[Block], backend: BackendContext) -> None:
    with closing(upload.pieces(blocks)) as pieces:  # leaves the block before an error of the backend is raised
        for piece in pieces:
            with backend():
                file.write(piece)


def _abandon(file: Any, backend: BackendContext) -> None:
    if not isinstance(file, AbstractBufferedFile):
        with suppress(CheckpointError), backend():
            file.close()
        return
    with suppress(CheckpointError), backend():
        file.discard()
    # Hazard: closing it would complete the upload with what there is, and so would its finalizer.
    file.closed = True


def _send_and_move(fs: Any, upload: FsspecUpload, blocks: Sequence[Block], backend: BackendContext) -> None:
    """Writes the object under a temporary name, then moves it to its own; deletes the temporary object on an error."""
    folder, _, name = upload.path.rpartition("/")
    temporary = f"{folder}/{temporary_name(name)}"
    with backend():
        fs.makedirs(folder, exist_ok=True)
        file = fs.open(temporary, "wb")
    try:
        _fill(file, upload, blocks, backend, closing_publishes=False)
        with backend(may_be_done=True):
            _move(fs, temporary, upload)
            _check_moved(fs, temporary, upload)
    except BaseException:
        with suppress(CheckpointError), backend():
            fs.rm_file(temporary)
        raise


def _move(fs: Any, temporary: str, upload: FsspecUpload) -> None:
    """Asks the backend to move the file. If it raises nothing, the file may still be where it was, or may have replaced
    that of another writer.
    """
    if _protocols(fs) & _CREATING_MOVE:
        fs.client.move(temporary, upload.path, overwrite=upload.replace)
    elif _protocols(fs) & _WEBHDFS:
        # `mv` ignores the answer, and asks for no replacement: HDFS then says 200, "false", and moves nothing.
        options = {"renameoptions": "OVERWRITE"} if upload.replace else {}
        fs._call("RENAME", method="put", path=temporary, destination=fs._strip_protocol(upload.path), **options)
    else:
        # Hazard: this replaces. If two writers found the name free, the later one wins.
        fs.mv(temporary, upload.path)


def _check_moved(fs: Any, temporary: str, upload: FsspecUpload) -> None:
    """Raises OSError if the backend reported success and did not move the file; FileExistsError if another writer's is
    there and must not be replaced.
    """
    for path in (temporary, upload.path):
        fs.invalidate_cache(path)
    if not fs.exists(temporary) and fs.info(upload.path)["size"] == upload.num_bytes:
        return
    if not upload.replace and fs.exists(upload.path):
        raise FileExistsError(errno.EEXIST, "another writer was faster", upload.path)
    cannot = ", and it cannot replace a file" if upload.replace else ""
    raise OSError(errno.EIO, f"the storage answered that it has moved the written file here, but it has not{cannot}")


def _put(fs: Any, upload: FsspecUpload, data: bytes) -> None:
    """Sends the whole object in one call. Unless it replaces, raises FileExistsError or the backend's error if the name
    is taken and the backend can check that in the same call.
    """
    if upload.replace:
        fs.pipe_file(upload.path, data)
    elif type(fs) is MemoryFileSystem:
        # Its create-only mode checks first and stores later: two threads may both succeed.
        file = MemoryFile(fs, "/" + upload.path.lstrip("/"), data)
        if fs.store.setdefault(file.path, file) is not file:
            raise FileExistsError(errno.EEXIST, "another writer was faster", upload.path)
    elif takes(fs, "pipe_file", "mode") or _protocols(fs) & _AZURE:  # adlfs has the parameter, and does not name it
        _put_if_absent(fs, upload.path, data)
    else:
        fs.pipe_file(upload.path, data)  # the check before the write is all there is


def _put_if_absent(fs: Any, path: str, data: bytes) -> None:
    """Sends the object in a call that fails if the name is taken. Hazard: a server without conditional writes gets a
    call that replaces.
    """
    try:
        fs.pipe_file(path, data, mode="create")
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        fs.pipe_file(path, data)  # a server that knows no conditional write: the check before it is all there is


def takes(fs: Any, method: str, parameter: str) -> bool:
    """Returns True if the method has the parameter; asynchronous backends declare it on their coroutine."""
    return parameter in inspect.signature(getattr(fs, f"_{method}", None) or getattr(fs, method)).parameters
