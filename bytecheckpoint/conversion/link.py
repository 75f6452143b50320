"""A checkpoint that is a manifest only: it points into the files of another one, of any format, where they lie."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace

from bytecheckpoint.conversion.mapped_source import MappedView
from bytecheckpoint.errors import CheckpointMismatchError, UnsafeCheckpointError
from bytecheckpoint.formats.file_reader import FileReader
from bytecheckpoint.formats.torch_save.archive import directory_offset
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.loading.links import sample_ranges, take_sample
from bytecheckpoint.loading.plain_trees import PlainData
from bytecheckpoint.loading.select import Selection, SelectionRequest, select, with_state_of_excluded
from bytecheckpoint.manifest import DataFile, Manifest, TensorRecord, decode_manifest, encode_manifest, tensor_record
from bytecheckpoint.name_maps.rewrite_manifest import refuse_zeros
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.saving.report import provenance_of
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store


def link_manifest(
    view: MappedView, request: SelectionRequest, *, source: str, target: str
) -> tuple[Manifest, Selection]:
    """Returns the manifest to write in the folder `target`, which points to files below the folder `source`, and the
    selection that it holds. For "hf", the manifest has no plain data. Both folders are paths or URLs as stores show
    them.

    Raises CheckpointMismatchError (conflict) if the request needs more than a manifest.
    """
    if request.dtype is not None:
        raise CheckpointMismatchError(
            "a link copies no data, so it cannot have another dtype; nothing was written: leave out --dtype, or --link",
            kind="conflict",
        )
    manifest = view.manifest
    refuse_zeros(manifest)
    request = with_state_of_excluded(manifest, request)
    selection = select(manifest, request, view.names_of_map)
    selection = replace(selection, left_out=[*view.left_out, *selection.left_out])
    plain = None if request.to == "hf" else PlainData(manifest, selection, request)
    inside = _below(source, target)
    prefix = "" if inside is None else inside
    used = _used_files(manifest, selection)
    numbers = {file: number for number, file in enumerate(used)}
    linked = Manifest(
        save_id=uuid.uuid4().hex[:16],
        step=manifest.step,
        foreign_format=manifest.foreign_format,
        linked_to=source if inside is None else "",
        files=[manifest.files[file]._replace(name=join_name(prefix, manifest.files[file].name)) for file in used],
        tensors=_records(manifest, selection, numbers),
        aliases=selection.aliases,
        objects=plain.objects() if plain else {},
        rank_objects=plain.rank_objects() if plain else {},
        metadata=manifest.metadata,
        provenance={**provenance_of(1), "linked_from": manifest.foreign_format or OWN_FORMAT},
    )
    return linked, selection


def with_samples(store: Store, folder: str, manifest: Manifest, *, threads: int) -> Manifest:
    """Returns the manifest with samples of those files that have neither checksums nor samples. Reads them from the
    files, which are in this folder of the store.
    """
    files = list(manifest.files)

    def take(number: int) -> None:
        file = files[number]
        name = join_name(folder, file.name)
        directory = directory_offset(FileReader(store, name, file.byte_length))
        ranges = sample_ranges(file.byte_length, directory)
        files[number] = file._replace(samples=[take_sample(store, name, *sample_range) for sample_range in ranges])

    unsampled = [number for number, file in enumerate(files) if not file.samples and not file.extent_lengths]
    if unsampled:
        run_jobs(take, unsampled, num_threads=threads)
    return replace(manifest, files=files)


def write_link(store: Store, manifest: Manifest, *, overwrite: bool) -> int:
    """Commits the manifest and returns its length in bytes. Raises the errors of `encode_manifest`, `decode_manifest`
    and `layout.commit`.
    """
    content = encode_manifest(manifest)
    decode_manifest(content)  # a manifest that no reader would accept is never written
    layout.commit(store, "", content, replace=overwrite)
    return len(content)


def check_reachable(store: Store, folder: str, manifest: Manifest, *, path: str, threads: int) -> None:
    """Checks that a link leads to all of its files, which are in this folder, and that these have their lengths and can
    be read, by a byte of each: an object store may list what it does not serve, and a link may replace a checkpoint.

    Raises CheckpointNotFoundError (missing_file), CheckpointCorruptError (truncated), UnsafeCheckpointError
    (path_escape), or StorageError.
    """

    def read_byte(file: DataFile) -> None:
        byte = bytearray(min(1, file.byte_length))
        store.read_into(join_name(folder, file.name), 0, memoryview(byte))

    try:
        layout.check_files(store, folder, manifest, range(len(manifest.files)))
        run_jobs(read_byte, manifest.files, num_threads=threads)
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"{path} cannot be a link to these files: {error.message}. Write the link into the folder that really "
            "holds the files, or into one that is not above them",
            kind=error.kind,
            path=path,
        ) from error


def _below(source: str, target: str) -> str | None:
    """Returns the path of `source` inside `target`, "" if they are the same; None if `source` is elsewhere."""
    source, target = source.rstrip("/"), target.rstrip("/")
    if source == target:
        return ""
    return source[len(target) + 1 :] if source.startswith(f"{target}/") else None


def _used_files(manifest: Manifest, selection: Selection) -> list[int]:
    if len(selection.wanted) == len(manifest.tensors):
        return list(range(len(manifest.files)))
    stored = {tensor.pieces[0].fqn for tensor in selection.wanted}
    return sorted({file for fqn in stored if fqn is not None for file in manifest.tensors[fqn].files})


def _records(manifest: Manifest, selection: Selection, numbers: Mapping[int, int]) -> Mapping[str, TensorRecord]:
    """Returns the records of the selected tensors by new name; `numbers` has the new number of each file. Each tensor
    has one piece, a whole stored tensor: `refuse_zeros` has refused zeros, whose FQN is None.
    """
    stored = {tensor.pieces[0].fqn: tensor.fqn for tensor in selection.wanted}
    if stored == {fqn: fqn for fqn in manifest.tensors}:
        return manifest.tensors  # as it is: there may be a million chunks
    records = {}
    for fqn, name in stored.items():
        if fqn is not None:
            record = manifest.tensors[fqn]
            chunks = [chunk._replace(file=numbers[chunk.file]) for chunk in record.chunks]
            records[name] = tensor_record(record.dtype, record.shape, chunks)
    return records
