"""A store in a folder of a file system. It builds the store's guarantees on posix_files.py: an object exists whole and
durably or not at all, names stay inside the root, and every failure is one of this library's errors.
"""

# ruff: noqa: PTH100, PTH108, PTH116, PTH118, PTH120 - calls of `os` by name, in an order that tests record

from __future__ import annotations

import errno
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.runtime.threads import map_jobs, run_jobs
from bytecheckpoint.storage.backends.direct_io import DirectFile
from bytecheckpoint.storage.backends.posix_errors import (
    already_exists,
    describe,
    is_a_file,
    missing_file,
    no_links,
    read_error,
    too_long,
    truncated,
    write_error,
)
from bytecheckpoint.storage.backends.posix_files import (
    file_in_the_way,
    free_bytes,
    has_file,
    link,
    make_folders,
    publish,
    read_fully,
    read_pieces,
    remove_empty_folders,
    remove_quietly,
    sync_folder,
)
from bytecheckpoint.storage.inventory import StoredObject
from bytecheckpoint.storage.object_io import count_bytes, take_blocks
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, check_name, path_escape, temporary_name
from bytecheckpoint.storage.store import Access, FillHook, PiecesHook

_FOLDER_SIZE = -1
_LOOKERS = 16
_LOOKUPS_PER_JOB = 64
_UNLINKERS = 8
"""Threads. benchmarks/ranks.py removes 8,192 files of a disk in 0.65 s with eight, and in 1.2 s with this set to 1."""
_UNLINKS_PER_JOB = 64
_MAX_LOST_FOLDERS = 8
_ACCESS = Access(latency_s=50e-6, bytes_per_s=2.5e9)
"""A file is found and opened for every read, and its bytes may be in the page cache."""


class LocalStore:
    """Objects as files below `root`, which need not exist yet. `str()` gives the root, for messages."""

    def __init__(self, root: str, *, writer_threads: int) -> None:
        if "\0" in root:
            raise path_escape(root, "a path has no NUL")
        self._root = os.path.abspath(root)
        self._writer_threads = writer_threads

    def __str__(self) -> str:
        return self._root

    @property
    def access(self) -> Access:
        return _ACCESS

    @property
    def free_bytes(self) -> int | None:
        """Free space for an ordinary user; None if unknown."""
        return free_bytes(self._root)

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        """Implements `Store`. Up to `writer_threads` threads write the blocks, one of which is the caller's."""
        path = self._path_of_name(name)
        if not replace and os.path.lexists(path):
            raise already_exists(path)
        writing = _WriteErrors(path, count_bytes(blocks))
        temporary = ""
        try:
            with writing:
                temporary, fd = self._create_temporary(path)
            self._fill(DirectFile(temporary, fd), blocks, writing)
            with writing:
                publish(temporary, path, replace=replace)
        except BaseException as error:
            remove_quietly(temporary)
            if temporary or getattr(error, "kind", "") != "permission":  # else it has made none
                remove_empty_folders(os.path.dirname(path), self._root)
            raise
        with _WriteErrors(path, writing.num_bytes, may_be_done=replace):
            self._make_name_durable(path, replace=replace)

    def duplicate(self, source: str, name: str, *, num_bytes: int) -> None:
        """Implements `SupportsDuplicate` by a hard link."""
        path, linked = self._path_of_name(name), self.file_path(source)
        with _reading(linked), _opened(linked) as (_, found_bytes):
            if found_bytes != num_bytes:
                raise missing_file(linked)
        with _WriteErrors(path, 0):
            make_folders(os.path.dirname(path))
            if not link(linked, path):
                raise no_links(path)
            with suppress(OSError):
                os.utime(path)  # garbage collection takes a save whose objects are all old for a dead one
            self._make_name_durable(path, replace=False)

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None) -> None:
        path = self._resolve(check_name(name))
        flat = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        with _reading(path), _opened(path) as (fd, _):
            filled = read_fully(fd, byte_offset, flat, on_filled)
        if filled < flat.nbytes:
            raise truncated(path, wanted_end=byte_offset + flat.nbytes, found_end=byte_offset + filled)

    def read_pieces(self, name: str, byte_offset: int, buffers: Sequence[memoryview], *, on_filled: PiecesHook) -> None:
        """Implements `SupportsReadPieces`."""
        path, end = self._resolve(check_name(name)), byte_offset + sum(map(len, buffers))
        with _reading(path), _opened(path) as (fd, _):
            found_end = byte_offset + read_pieces(fd, byte_offset, buffers, on_filled)
        if found_end < end:
            raise truncated(path, wanted_end=end, found_end=found_end)

    def read_whole(self, name: str, *, max_bytes: int) -> bytes:
        """Implements `SupportsReadWhole`: the open file gives the length."""
        path = self._resolve(check_name(name))
        with _reading(path), _opened(path) as (fd, num_bytes):
            if num_bytes > max_bytes:
                raise too_long(path, num_bytes, max_bytes)
            content = bytearray(num_bytes)
            filled = read_fully(fd, 0, memoryview(content))
        if filled < num_bytes:
            raise truncated(path, wanted_end=num_bytes, found_end=filled)
        return bytes(content)

    def file_path(self, name: str) -> str:
        """Implements `SupportsFilePath`."""
        return self._resolve(check_name(name))

    def byte_length(self, name: str) -> int | None:
        """Implements `SupportsByteLength`."""
        path = self._resolve(check_name(name))
        with suppress(CheckpointNotFoundError), _reading(path), _opened(path) as (_, num_bytes):
            return num_bytes
        return None

    def in_folders(self, folders: Sequence[str], name: str) -> Sequence[bool | None]:
        """Implements `SupportsInFolders`."""
        check_name(name)
        batches = [folders[start : start + _LOOKUPS_PER_JOB] for start in range(0, len(folders), _LOOKUPS_PER_JOB)]
        looks = map_jobs(lambda batch: [self._is_in(folder, name) for folder in batch], batches, num_threads=_LOOKERS)
        return [is_there for batch in looks for is_there in batch]

    def _is_in(self, folder: str, name: str) -> bool | None:
        """Returns True if an ordinary file of this name is in the folder, False if not, None if only a listing can
        tell.
        """
        if folder:
            check_name(folder)
        try:
            self._resolve(os.path.dirname(folder))
        except OSError:  # a link that was removed meanwhile
            return None
        return has_file(f"{self._root}/{folder}", name)

    def list(self, folder: str) -> Mapping[str, int | None]:
        path = self._resolve(check_name(folder) if folder else "")
        try:
            with os.scandir(path) as entries:
                # A folder is known without asking the file system: a root may have thousands of steps.
                found = [
                    (entry.name, _FOLDER_SIZE if entry.is_dir(follow_symlinks=False) else _size(entry))
                    for entry in entries
                    if not entry.name.startswith(TEMPORARY_PREFIX)
                ]
        except FileNotFoundError:
            return {}
        except NotADirectoryError as error:
            raise is_a_file(file_in_the_way(path)) from error
        except OSError as error:
            raise read_error(error, path, reason=describe(error), doing="list") from error
        return {name: None if size == _FOLDER_SIZE else size for name, size in found if size is not None}

    def delete(self, name: str) -> None:
        """Implements `Store`. Removes folders that become empty as well: a store has no empty folders."""
        self.delete_many([name])

    def delete_many(self, names: Sequence[str]) -> None:
        """Implements `SupportsDeleteMany`: each folder is synchronised once."""
        folders: dict[str, None] = {}

        def unlink(some: Sequence[str]) -> None:
            for path in map(self._path_of_name, some):
                folders[os.path.dirname(path)] = None  # also of a missing file, whose deletion was interrupted
                with _reading(path, doing="delete"), suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)

        blocks = [names[at : at + _UNLINKS_PER_JOB] for at in range(0, len(names), _UNLINKS_PER_JOB)]
        try:
            run_jobs(unlink, blocks, num_threads=_UNLINKERS)
        finally:
            for folder in list(folders):  # threads may still add some where the caller was interrupted twice
                self._finish_deletions(folder)

    def _finish_deletions(self, folder: str) -> None:
        with _reading(folder, doing="delete"), suppress(FileNotFoundError, NotADirectoryError):
            # Deletions must keep their order after a power cut too: a manifest before its data.
            sync_folder(folder)
        remove_empty_folders(folder, self._root)

    def inventory(self, folder: str) -> Iterator[StoredObject]:
        """Implements `HasInventory`. Only warns of a folder below this one that may not be listed, as lost+found."""
        top = os.path.join(self._root, folder)

        def on_error(error: OSError) -> None:
            if isinstance(error, PermissionError) and error.filename != top:
                warnings.warn(f"{error.filename} was not looked into: {describe(error)}", stacklevel=2)
            elif not isinstance(error, FileNotFoundError):
                raise read_error(error, error.filename, reason=describe(error), doing="list") from error

        self._resolve(check_name(folder) if folder else "")
        for path, _, names in os.walk(top, onerror=on_error):
            for file in (os.path.join(path, name) for name in names):
                with suppress(FileNotFoundError), _reading(file, doing="list"):  # deleted since it was listed
                    status = os.stat(file, follow_symlinks=False)
                    yield StoredObject(file[len(self._root) :].lstrip("/"), status.st_size, status.st_mtime)

    def _path_of_name(self, name: str) -> str:
        """Returns root joined with name. Raises like `_resolve` for its folder; the last part may be any link."""
        folder, _, last = check_name(name).rpartition("/")
        self._resolve(folder)
        return os.path.join(self._root, folder, last)

    def _resolve(self, name: str) -> str:
        """Returns a path inside the root: the name below the root if no part of the name is a link, else the path that
        the links lead to.

        Raises UnsafeCheckpointError (path_escape) if they lead out of the root.
        """
        path = self._root
        for part in name.split("/") if name else ():
            path = f"{path}/{part}"
            try:
                if stat.S_ISLNK(os.lstat(path).st_mode):
                    break
            except OSError:  # there is no such part, so no later part is a link
                return f"{self._root}/{name}"
        else:
            return path
        resolved = os.path.realpath(os.path.join(self._root, name))
        root = os.path.realpath(self._root)
        if resolved != root and not resolved.startswith(root.rstrip("/") + "/"):
            raise path_escape(name, f"a link leads from {self._root} to {resolved}, outside of it")
        return resolved

    def _create_temporary(self, path: str) -> tuple[str, int]:
        """Makes a new file in the folder of `path`, and missing folders. Returns the file's path and descriptor."""
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, temporary_name(name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(_MAX_LOST_FOLDERS):
            with suppress(FileNotFoundError):  # a writer that deletes or fails took a folder while it was still empty
                make_folders(folder)
                return temporary, os.open(temporary, flags, 0o666)
        make_folders(folder)
        return temporary, os.open(temporary, flags, 0o666)

    def _fill(self, file: DirectFile, blocks: Sequence[Block], writing: _WriteErrors) -> None:
        """Writes the blocks, makes them durable and closes the file in any case."""

        def write(content: memoryview, byte_offset: int) -> None:
            with writing:
                file.write(content, byte_offset)

        try:
            with writing:
                file.prepare(writing.num_bytes)
            take_blocks(blocks, write, num_threads=self._writer_threads)
            with writing:
                file.sync()
        except BaseException:
            with suppress(OSError):
                file.close()
            raise
        with writing:
            file.close()  # NFS reports a full disk here

    def _make_name_durable(self, path: str, *, replace: bool) -> None:
        """Syncs the folders from the file's up to the root, and the root's parent if this process may open it: a dead
        process may have made some of them. If that fails, raises OSError, and without `replace` removes the file first.
        """
        folder = os.path.dirname(path)
        try:
            sync_folder(folder)
            while folder != self._root:
                folder = os.path.dirname(folder)
                sync_folder(folder)
            with suppress(PermissionError):  # it may belong to someone else
                sync_folder(os.path.dirname(self._root))
        except OSError:
            if not replace:
                remove_quietly(path)  # a write that fails leaves nothing; it was not there before
                remove_empty_folders(os.path.dirname(path), self._root)
            raise


class _WriteErrors:
    """A context that translates the errors of writing one object. Stateless: several threads are in it at once.

    It encloses system calls only, so that an OSError of a block's `content` passes through.
    """

    def __init__(self, path: str, num_bytes: int, *, may_be_done: bool = False) -> None:
        self._path, self._may_be_done = path, may_be_done
        self.num_bytes = num_bytes
        self._free_bytes = free_bytes(os.path.dirname(path))

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CheckpointError):
            return
        if isinstance(error, FileExistsError):
            raise already_exists(self._path) from error
        if isinstance(error, OSError):
            reason, free, done = _reason(error, self._path), self._free_bytes, self._may_be_done
            raise write_error(
                error, self._path, reason=reason, needed_bytes=self.num_bytes, free_bytes=free, may_be_done=done
            ) from error


@contextmanager
def _reading(path: str, *, doing: str = "read") -> Iterator[None]:
    """Translates an OSError into the result of `read_error`."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise read_error(error, path, reason=describe(error), doing=doing) from error


@contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """Gives the descriptor of an ordinary file, and its length in bytes. Raises OSError if it cannot be opened, and
    CheckpointNotFoundError if it is no ordinary file (missing_file) or a folder of its path is a file (not_found).
    """
    try:
        # Without O_NONBLOCK, opening a pipe that someone put there would wait for its writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except NotADirectoryError as error:
        raise is_a_file(file_in_the_way(path)) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise missing_file(path)
        yield fd, status.st_size
    finally:
        os.close(fd)


def _size(entry: os.DirEntry[str]) -> int | None:
    """Returns the size in bytes of an ordinary file, or of the one that a link leads to; _FOLDER_SIZE for a link to a
    folder, or to where this process may not look; None for anything else, such as a pipe, a vanished entry, or a link
    to nothing or to itself.
    """
    try:
        status = entry.stat()
    except (FileNotFoundError, NotADirectoryError):  # the latter for a link to a name below a file
        return None
    except OSError as error:
        if error.errno == errno.EACCES and entry.is_symlink():
            return _FOLDER_SIZE
        if error.errno != errno.ELOOP:
            raise
        return None
    if stat.S_ISDIR(status.st_mode):
        return _FOLDER_SIZE
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _reason(error: OSError, path: str) -> str:
    """Returns the error's message. If there are no inodes left, the one for ENOSPC says so: bytes may still be free."""
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            status = os.statvfs(os.path.dirname(path))
            if status.f_files and not status.f_favail:
                return f"{describe(error)}: the file system has no inodes left for new files (`df -i`); delete files"
    return describe(error)
