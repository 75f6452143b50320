"""What is fuzzed: each target reads bytes that somebody else may have written, as far as a load would, and may raise a
CheckpointError of a documented kind and nothing else. What it accepts has to be as it promises.

    python tests/fuzz/targets.py TARGET FILE...     reads these inputs, and says what came of each
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import xxhash

from bytecheckpoint.adapters.plain.plain_data import decode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.formats.detect import find_file, find_folder
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint, manifest_bytes
from bytecheckpoint.formats.frameworks.dcp_metadata import read_metadata
from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.formats.torch_save.file import chunks_of, translated, unpickle
from bytecheckpoint.formats.torch_save.sharded_tensors import (
    ShardedReader,
    find_sharded_value,
    is_sharded,
    refuse_others,
)
from bytecheckpoint.formats.torch_save.unpickler_globals import StoredView, find_value
from bytecheckpoint.manifest import Manifest, decode_manifest, encode_manifest, open_manifest, read_outline
from bytecheckpoint.manifest.envelope import seal
from bytecheckpoint.manifest.frames import CODECS
from bytecheckpoint.manifest.validation import MAX_SAMPLE_BYTES
from bytecheckpoint.planner.load_plan import Want, plan_load
from bytecheckpoint.region import whole
from bytecheckpoint.storage.compression import decode_frame
from bytecheckpoint.storage.paths import check_name
from bytecheckpoint.storage.safetensors_header import decode_header
from fuzz.commands import mutate_command, read_command
from fuzz.memory_store import MemoryStore, unpack
from fuzz.mutations import (
    Mutate,
    mutate_archive,
    mutate_bytes,
    mutate_folder,
    mutate_header,
    mutate_msgpack,
    mutate_pickle,
)

CORPUS = Path(__file__).parent / "corpus"
_FEW = 8
_MAX_COMPARED = 200
_STORAGE_BYTES = 1 << 16


def read_manifest_body(data: bytes) -> None:
    """What is inside the envelope of a manifest, msgpack."""
    sealed = seal(data)
    use_manifest(open_manifest(sealed))
    read_outline(sealed)
    check_manifest_is_sound(decode_manifest(sealed))


def read_manifest_file(data: bytes) -> None:
    """A manifest without the checksum at its end, which nobody who wants to do harm would forget."""
    sealed = data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
    use_manifest(open_manifest(sealed))
    read_outline(sealed)
    check_manifest_is_sound(decode_manifest(sealed))


def use_manifest(manifest: Manifest) -> None:
    """Looks at few tensors, as a load does, before anything has checked all of them."""
    fqns = list(islice(manifest.tensors, _FEW))
    wants = [
        Want(fqn, whole(shape), is_flat=bool(number % 2))
        for number, (fqn, (_, shape)) in enumerate(zip(fqns, manifest.describe_each(fqns), strict=True))
    ]
    plan_load(manifest, wants, verify=True, max_gap_bytes=1 << 16, max_fetch_bytes=1 << 24)
    for want in wants:
        _ = manifest.tensors[want.fqn].chunks


def check_manifest_is_sound(manifest: Manifest) -> None:
    """What the decoder promises of what it accepts, looked at in another way: with Python's integers, one by one."""
    for file in manifest.files:
        check_name(file.name)
        assert not file.extent_lengths or sum(file.extent_lengths) == file.byte_length, file.name
        for sample in file.samples:
            assert 0 <= sample.byte_offset < sample.byte_offset + sample.byte_length <= file.byte_length, file.name
            assert sample.byte_length <= MAX_SAMPLE_BYTES, file.name
    taken: dict[int, list[tuple[int, int]]] = {}
    for fqn, record in manifest.tensors.items():
        assert all(length >= 0 for length in record.shape), fqn
        for chunk in record.chunks:
            assert len(chunk.region.offsets) == len(record.shape), fqn
            assert all(
                0 <= start <= end <= length
                for start, end, length in zip(chunk.region.offsets, chunk.region.ends, record.shape, strict=True)
            ), fqn
            assert 0 <= chunk.byte_offset <= chunk.byte_offset + chunk.byte_length, fqn
            assert chunk.byte_offset + chunk.byte_length <= manifest.files[chunk.file].byte_length, fqn
            if chunk.codec == "none":
                assert chunk.byte_length == chunk.region.numel * itemsize(record.dtype), fqn
            if chunk.byte_length:
                taken.setdefault(chunk.file, []).append((chunk.byte_offset, chunk.byte_offset + chunk.byte_length))
        assert sum(chunk.region.numel for chunk in record.chunks) == prod(record.shape), fqn
    for spans in taken.values() if not manifest.foreign_format else ():
        ends = [end for _, end in sorted(spans)]
        assert all(start >= end for (start, _), end in zip(sorted(spans)[1:], ends, strict=False)), "bytes are shared"
    assert encode_manifest(decode_manifest(encode_manifest(manifest))) == encode_manifest(manifest)


def read_header(data: bytes) -> None:
    """The header of a data file, or of any safetensors file."""
    header = decode_header(data)
    end = header.data_offset
    for entry in header.entries:
        assert entry.byte_offset == end, entry
        assert entry.byte_length >= 0, entry
        end += entry.byte_length


def read_plain_data(data: bytes) -> None:
    """A value in a manifest."""
    value = decode_plain(data)
    with suppress(CheckpointSaveError):  # of names that meet
        leaves(value, "x")


def read_frame(data: bytes) -> None:
    """A frame of a compressed chunk. The first bytes say how long it claims to be: item size, then raw bytes."""
    if len(data) >= 4:
        into = bytearray(int.from_bytes(data[1:4], "little") % ((1 << 20) + 1))
        decode_frame(CODECS[1], memoryview(data)[4:], (1, 2, 4, 8, 16)[data[0] % 5], memoryview(into))


def read_pickle(data: bytes) -> None:
    """The pickle of a torch.save file, whose storages all have as many bytes."""
    value = unpickle(data, "memory", find_value)
    builder = ManifestBuilder("memory")
    file = builder.add_file("file", _STORAGE_BYTES)

    def add(fqn: str, view: StoredView) -> None:
        chunks = chunks_of(view, fqn, file=file, byte_offset=0, byte_length=_STORAGE_BYTES, path="memory")
        builder.add_tensor(fqn, view.dtype, view.shape, chunks)

    builder.take_apart(value, on_tensor=add)


def read_distcp_metadata(data: bytes) -> None:
    """The pickle that describes a folder of torch.distributed.checkpoint."""
    read_metadata(data, "memory")


def read_torch_file(data: bytes) -> None:
    """A whole file of torch.save."""
    store = MemoryStore({"file.pt": data})
    _read_found(FoundCheckpoint(store, "", find_file(store, "", "file.pt", len(data))))


def read_sharded_values(data: bytes) -> None:
    """The pickle in the file of a rank, with torch's sharded tensors in it."""
    value = unpickle(data, "memory", find_sharded_value)
    reader = ShardedReader("memory")

    def read(leaf: Any) -> None:
        refuse_others(leaf)
        if is_sharded(leaf):
            regions = list(islice(reader.read(leaf).all_regions(), _MAX_COMPARED))
            assert len(set(regions)) == len(regions)
            assert all(region.numel for region in regions)

    for leaf in value.values() if isinstance(value, dict) else [value]:
        translated("memory", "torch.save", read, leaf)


def read_folder(data: bytes) -> None:
    """A folder that another program wrote."""
    store = MemoryStore(unpack(data) or {})
    place = find_folder(store, "", store.list(""))
    if place is not None:
        _read_found(FoundCheckpoint(store, "", place))


def _read_found(found: FoundCheckpoint) -> None:
    manifest = decode_manifest(manifest_bytes(found))
    if sum(record.num_chunks for record in manifest.tensors.values()) <= _MAX_COMPARED:
        check_manifest_is_sound(manifest)
    use_manifest(manifest)
    for value in manifest.objects.values():
        decode_plain(value)


def mutate_manifest_file(data: bytes, rng: Random) -> bytes:
    """Mostly the header and the start of the frame, which say how much there is."""
    if rng.random() < 0.6:
        return mutate_bytes(data[:40], rng) + data[40:]
    return mutate_bytes(data, rng)


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    """That of its folder in the corpus."""
    read: Callable[[bytes], None]
    mutate: Mutate

    def corpus(self) -> list[Path]:
        return sorted(path for path in (CORPUS / self.name).iterdir() if path.is_file())


TARGETS = {
    target.name: target
    for target in (
        Target("manifest", read_manifest_body, mutate_msgpack),
        Target("manifest-file", read_manifest_file, mutate_manifest_file),
        Target("header", read_header, mutate_header),
        Target("plain-data", read_plain_data, mutate_msgpack),
        Target("frame", read_frame, mutate_bytes),
        Target("pickle", read_pickle, mutate_pickle),
        Target("distcp-metadata", read_distcp_metadata, mutate_pickle),
        Target("torch-file", read_torch_file, mutate_archive),
        Target("safetensors", read_folder, mutate_folder),
        Target("trainer", read_folder, mutate_folder),
        Target("distcp", read_folder, mutate_folder),
        Target("deepspeed", read_folder, mutate_folder),
        Target("megatron", read_folder, mutate_folder),
        Target("rank-files", read_folder, mutate_folder),
        Target("folder-groups", read_folder, mutate_folder),
        Target("sharded-values", read_sharded_values, mutate_pickle),
        Target("command", read_command, mutate_command),
    )
}


@cache
def inputs(name: str) -> tuple[bytes, ...]:
    """The kept inputs of a target, in the order of their names."""
    return tuple(path.read_bytes() for path in TARGETS[name].corpus())


def draw(target: Target, rng: Random) -> bytes:
    """A kept input with one to three rounds of changes."""
    data = rng.choice(inputs(target.name))
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = target.mutate(data, rng)
    return data


def repeat_command(target: str, path: Path) -> str:
    return f"python tests/fuzz/targets.py {target} {path}"


def main(arguments: list[str]) -> int:
    from fuzz.watch import Watch

    target = TARGETS[arguments[0]]
    found: list[Any] = []
    with Watch() as watch:
        for name in arguments[1:]:
            found.append(watch.attempt(target.read, Path(name).read_bytes()))
            sys.stdout.write(f"{name}: {found[-1] or 'read, or refused as it should be'}\n")
    return any(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
