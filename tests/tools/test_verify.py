"""`bcp verify`: every kind of damage is found, all of it, with the tensors that it hits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from checkpoint_files import data_file, flip
from packed_checkpoints import codecs_in, contents_of, write_checkpoint

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, encode_manifest, tensor_record
from bytecheckpoint.region import Region, whole
from bytecheckpoint.storage.local_store import LocalStore


def test_a_sound_checkpoint_is_fine(call, saved_root) -> None:
    ended = call("verify", saved_root)
    assert ended.code == 0
    assert "all is as it was written" in ended.out
    assert ended.err == ""
    result = call("verify", saved_root, "--json", "--threads", 1).json
    assert result["ok"]
    assert result["damage"] == []
    assert result["num_bytes_checked"] == result["num_bytes"] == data_file(saved_root).stat().st_size


@pytest.mark.parametrize("place", ["first of header", "header", "first of data", "middle", "last"])
def test_one_flipped_bit_anywhere_is_found(call, root, place) -> None:
    path = data_file(root)
    chunks = [chunk for record in bcp.open(root).manifest.tensors.values() for chunk in record.chunks]
    start, size = min(chunk.byte_offset for chunk in chunks), path.stat().st_size
    at = {"first of header": 0, "header": start // 2, "first of data": start, "middle": size // 2, "last": size - 1}
    flip(path, at[place])
    result = call("verify", root, "--json")
    assert result.code == 1
    (item,) = result.json["damage"]
    assert item["kind"] == "checksum"
    assert item["file"] == f"data/{path.name}"
    assert item["byte_offset"] <= at[place] < item["byte_offset"] + item["byte_length"]
    assert not result.json["ok"]
    assert call("verify", root, "--step", 5).code == 0


def test_every_byte_has_a_tensor_or_the_header(call, root) -> None:
    """What verify names is what cannot be loaded, and nothing else."""
    flip(data_file(root), data_file(root).stat().st_size - 1)
    (item,) = call("verify", root, "--json").json["damage"]
    checkpoint = bcp.open(root)
    assert item["tensors"]
    for fqn in checkpoint.manifest.tensors:
        if fqn in item["tensors"]:
            with pytest.raises(bcp.CheckpointCorruptError):
                checkpoint[fqn][...]
        else:
            checkpoint[fqn][...]


def test_all_damage_is_listed(call, root) -> None:
    path = data_file(root)
    size = path.stat().st_size
    for at in (10, size // 2, size - 1):
        flip(path, at)
    damage = call("verify", root, "--json").json["damage"]
    assert len(damage) == 3
    assert [item["byte_offset"] for item in damage] == sorted(item["byte_offset"] for item in damage)
    text = call("verify", root).out
    assert "DAMAGED, 3 faults in 1 file" in text
    assert "no tensor, only the file's header" in text


@pytest.mark.parametrize("kept", [0, 1, 5000, -1])
def test_a_file_that_was_cut_short(call, root, kept) -> None:
    path = data_file(root)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:kept])
    result = call("verify", root, "--json")
    assert result.code == 1
    item = next(item for item in result.json["damage"] if item["kind"] == "truncated")
    assert item["byte_offset"] + item["byte_length"] == size
    assert item["byte_offset"] == (kept if kept >= 0 else size - 1)
    assert item["tensors"]


def test_a_file_that_grew(call, root) -> None:
    with data_file(root).open("ab") as file:
        file.write(b"more")
    (item,) = call("verify", root, "--json").json["damage"]
    assert (item["kind"], item["byte_length"]) == ("truncated", 4)


def test_a_missing_file_hits_all_its_tensors(call, root) -> None:
    data_file(root).unlink()
    result = call("verify", root, "--json")
    assert result.code == 1
    (item,) = result.json["damage"]
    assert item["kind"] == "missing_file"
    assert set(item["tensors"]) == set(bcp.open(root).manifest.tensors)


def test_a_file_where_the_data_folder_should_be(call, root) -> None:
    path = data_file(root)
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("x")
    assert call("verify", root, "--json").json["damage"][0]["kind"] == "missing_file"


def handmade(folder, *, chunks, header: bytes | None = None, step=None):
    """A checkpoint of a float32 tensor `w` of 4 x 2 in one file without checksums."""
    from bytecheckpoint.storage.data_file import HeaderEntry, chunk_name, encode_header

    names = [
        HeaderEntry(chunk_name("w", (4, 2), region), "float32", region.lengths, 4 * region.numel) for region in chunks
    ]
    content = (header or encode_header(names, {})) + bytes(32)
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "s-00000-0.safetensors").write_bytes(content)
    placed, at = [], len(content) - 32
    for region in chunks:
        placed.append(Chunk(region, 0, at, 4 * region.numel))
        at += 4 * region.numel
    manifest = Manifest(
        save_id="s",
        step=step,
        files=[DataFile("data/s-00000-0.safetensors", len(content))],
        tensors={"w": tensor_record("float32", (4, 2), placed)},
    )
    (folder / "manifest.bcp").write_bytes(encode_manifest(manifest))


HALVES = [Region((0, 0), (2, 2)), Region((2, 0), (2, 2))]


def test_files_without_checksums_are_said_to_be_unchecked(call, tmp_path) -> None:
    handmade(tmp_path / "c", chunks=HALVES)
    ended = call("verify", tmp_path / "c")
    assert ended.code == 0
    assert "without checksums, so not read: data/s-00000-0.safetensors" in ended.out
    result = call("verify", tmp_path / "c", "--json").json
    assert result["unchecked_files"] == ["data/s-00000-0.safetensors"]
    assert result["num_bytes_checked"] == 0


def test_chunks_that_do_not_tile_their_tensor(call, tmp_path) -> None:
    handmade(tmp_path / "c", chunks=[HALVES[0], HALVES[0]])
    damage = call("verify", tmp_path / "c", "--json").json["damage"]
    item = next(item for item in damage if item["kind"] == "coverage")
    assert (item["file"], item["tensors"]) == (None, ["w"])
    assert item["what"] == "two chunks hold w[0:2,0:2] of shape [4, 2]"


def test_a_header_that_disagrees_with_the_manifest(call, tmp_path) -> None:
    from bytecheckpoint.storage.data_file import HeaderEntry, encode_header

    swapped = encode_header(
        [HeaderEntry("w[2:4,0:2]", "float32", (2, 2), 16), HeaderEntry("w[0:2,0:2]", "float32", (2, 2), 16)], {}
    )
    handmade(tmp_path / "c", chunks=HALVES, header=swapped)
    (item,) = call("verify", tmp_path / "c", "--json").json["damage"]
    assert item["kind"] == "bad_manifest"
    assert "differ about 2 chunks" in item["what"]


def test_a_header_that_is_noise(call, tmp_path) -> None:
    handmade(tmp_path / "c", chunks=HALVES, header=b"\xff" * 4096)
    (item,) = call("verify", tmp_path / "c", "--json").json["damage"]
    assert item["file"] == "data/s-00000-0.safetensors"


def test_names_that_collide_are_no_damage(call, tmp_path) -> None:
    import torch

    bcp.save(
        tmp_path / "c",
        {"a": torch.zeros(2, 0), "b": torch.zeros(()), "__metadata__": torch.zeros(3), "c": torch.ones(2)},
    )
    assert call("verify", tmp_path / "c", "--json").json["damage"] == []


def test_a_sample_reads_a_part(call, root) -> None:
    result = call("verify", root, "--sample", 10, "--json").json
    assert result["ok"]
    assert 0 < result["num_bytes_checked"] < result["num_bytes"]
    assert "as far as the 10 % that were read can tell" in call("verify", root, "--sample", 10).out


def test_a_store_that_cannot_read_is_exit_code_4(call, saved_root, monkeypatch) -> None:
    def refuse(self, name, byte_offset, buffer):
        if name.endswith(".bcp"):
            return read_into(self, name, byte_offset, buffer)
        raise StorageError("cannot read", kind="unavailable")

    read_into = LocalStore.read_into
    monkeypatch.setattr(LocalStore, "read_into", refuse)
    ended = call("verify", saved_root, "--json")
    assert ended.code == 4
    assert {item["kind"] for item in ended.json["damage"]} == {"unavailable"}


def test_compressed_chunks_are_checked_like_others(call, tmp_path) -> None:
    import torch

    tensor = torch.randn(700, 900, generator=torch.Generator().manual_seed(0))
    chunks = contents_of("a", tensor, [Region((0, 0), (300, 900)), Region((300, 0), (400, 900))], "zstd")
    manifest = write_checkpoint(tmp_path / "c", [chunks])
    assert codecs_in(manifest) == {"a": {"zstd"}}
    assert call("verify", tmp_path / "c", "--json").json["damage"] == []
    (path,) = (tmp_path / "c" / "data").iterdir()
    flip(path, manifest.tensors["a"].chunks[1].byte_offset + 5)
    (item,) = call("verify", tmp_path / "c", "--json").json["damage"]
    assert (item["kind"], item["tensors"]) == ("checksum", ["a"])


def test_a_header_that_calls_a_compressed_chunk_a_tensor(call, tmp_path) -> None:
    """Other readers would take its bytes for numbers."""
    import torch

    from bytecheckpoint.storage.data_file import HeaderEntry, encode_header

    manifest = write_checkpoint(tmp_path / "c", [contents_of("a", torch.ones(90, 90), [whole((90, 90))], "zstd")])
    file, (chunk,) = manifest.files[0], manifest.tensors["a"].chunks
    path = tmp_path / "c" / file.name
    num_bytes = chunk.byte_length // 4 * 4
    header = encode_header([HeaderEntry("a", "float32", (num_bytes // 4,), num_bytes)], {})
    content = header + path.read_bytes()[len(header) :]
    path.write_bytes(content)
    extents = [xxhash.xxh3_64_intdigest(header), *file.extent_digests[1:]]
    changed = replace(manifest, files=[file._replace(extent_digests=extents)])
    (tmp_path / "c" / "manifest.bcp").write_bytes(encode_manifest(changed))
    (item,) = call("verify", tmp_path / "c", "--json").json["damage"]
    assert item["kind"] == "bad_manifest"
    assert "differ about 1 chunks" in item["what"]
