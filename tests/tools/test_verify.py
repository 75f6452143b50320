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
from bytecheckpoint.storage.backends.local_store import LocalStore


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
    """Checks that verify names exactly the tensors that cannot be loaded."""
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
    from bytecheckpoint.storage.safetensors_header import HeaderEntry, chunk_name, encode_header

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
    assert ended.code == 5
    assert "without checksums, so not read: data/s-00000-0.safetensors" in ended.out
    result = call("verify", tmp_path / "c", "--json").json
    assert result["unchecked_files"] == ["data/s-00000-0.safetensors"]
    assert result["num_bytes_checked"] == 0


def test_chunks_that_do_not_tile_their_tensor(call, tmp_path) -> None:
    handmade(tmp_path / "c", chunks=[HALVES[0], HALVES[0]])
    damage = call("verify", tmp_path / "c", "--json").json["damage"]
    item = next(item for item in damage if item["kind"] == "coverage")
    assert (item["file"], item["tensors"]) == (None, ["w"])
    assert item["what"] == "two chunks hold w[0:2, 0:2] of shape [4, 2]"


def test_a_header_that_disagrees_with_the_manifest(call, tmp_path) -> None:
    from bytecheckpoint.storage.safetensors_header import HeaderEntry, encode_header

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

    from bytecheckpoint.storage.safetensors_header import HeaderEntry, encode_header

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


def said_to_be_sound(call, path) -> int:
    return call("verify", path, "--json").json["num_tensors_sound"]


def loads_alone(path, fqn: str) -> bool:
    """Returns True if a load of only this tensor succeeds."""
    try:
        bcp.open(path)[fqn][...]
    except bcp.CheckpointError:
        return False
    return True


def test_no_tensor_of_a_missing_file_is_said_to_be_sound(call, root) -> None:
    data_file(root).unlink()
    ended = call("verify", root)
    total = len(bcp.open(root).manifest.tensors)
    assert f"{total} of {total} tensors hit" in ended.out
    assert "sound" not in ended.out
    assert "Every tensor is hit." in ended.out
    assert said_to_be_sound(call, root) == 0


@pytest.mark.parametrize("change", ["half", "one byte less", "one byte more"])
def test_only_tensors_that_load_are_said_to_be_sound(call, root, change) -> None:
    path = data_file(root)
    content = path.read_bytes()
    changed = {"half": content[: len(content) // 2], "one byte less": content[:-1], "one byte more": content + b"x"}
    path.write_bytes(changed[change])
    checkpoint = bcp.open(root)
    loading = sum(loads_alone(root, fqn) for fqn in checkpoint.manifest.tensors)
    assert said_to_be_sound(call, root) == loading == 0
    assert "Tensors that are not named are sound" not in call("verify", root).out


def test_tensors_of_whole_files_are_sound_beside_a_missing_one(call, tmp_path) -> None:
    import torch

    parts = [contents_of(name, torch.ones(8, 8), [whole((8, 8))], "none") for name in "abc"]
    manifest = write_checkpoint(tmp_path / "c", [parts[0], [*parts[1], *parts[2]]])
    (tmp_path / "c" / manifest.files[1].name).unlink()
    result = call("verify", tmp_path / "c", "--json").json
    assert (result["num_tensors_hit"], result["num_tensors_sound"]) == (2, 1)
    assert "2 of 3 tensors hit" in call("verify", tmp_path / "c").out
    assert "The other 1 is sound." in call("verify", tmp_path / "c").out


def test_tensors_in_the_extent_where_a_file_is_cut_are_hit(call, root) -> None:
    """Their bytes are there, but the checksum is about more than these."""
    path = data_file(root)
    manifest = bcp.open(root).manifest
    by_place = sorted((chunk.byte_offset, fqn) for fqn, record in manifest.tensors.items() for chunk in record.chunks)
    (file,) = manifest.files
    bounds = [sum(file.extent_lengths[:number]) for number in range(len(file.extent_lengths) + 1)]
    start, end = bounds[-2:]
    inside = [fqn for at, fqn in by_place if start <= at < end]
    assert len(inside) > 2
    path.write_bytes(path.read_bytes()[: end - 1])
    damage = call("verify", root, "--json").json["damage"]
    assert set(inside) <= {fqn for item in damage for fqn in item["tensors"]}


def test_nothing_is_said_to_be_sound_after_a_read_that_failed(call, tmp_path, monkeypatch) -> None:
    """What comes later in such a file is not read at all."""
    import torch

    bcp.save(tmp_path / "c", {f"t{number}": torch.ones(3 << 20) for number in range(4)})
    refused: list[int] = []

    def refuse_once(self, name, byte_offset, buffer):
        if name.endswith(".safetensors") and byte_offset and not refused:
            refused.append(byte_offset)
            raise StorageError("cannot read", kind="unavailable")
        return read_into(self, name, byte_offset, buffer)

    read_into = LocalStore.read_into
    monkeypatch.setattr(LocalStore, "read_into", refuse_once)
    result = call("verify", tmp_path / "c", "--threads", 1, "--json").json
    assert refused
    assert len(result["damage"]) == 1
    assert result["num_bytes_checked"] <= refused[0]
    assert result["num_tensors_sound"] == 0


def test_a_sample_says_nothing_of_other_tensors(call, root) -> None:
    flip(data_file(root), 0)
    assert said_to_be_sound(call, root) == len(bcp.open(root).manifest.tensors)
    sampled = call("verify", root, "--sample", 99, "--json").json
    assert sampled["num_tensors_sound"] is None


def test_the_limit_names_more_tensors_and_faults(call, root) -> None:
    data_file(root).unlink()
    names = set(bcp.open(root).manifest.tensors)
    few, every = call("verify", root, "--limit", 3).out, call("verify", root, "--limit", 0).out
    assert f"and {len(names) - 3} more (--limit 0 names all)" in few
    assert all(name in every for name in names)
    assert " more" not in every


def test_faults_beyond_the_limit_are_counted(call, root) -> None:
    path = data_file(root)
    for at in (10, path.stat().st_size // 2, path.stat().st_size - 1):
        flip(path, at)
    ended = call("verify", root, "--limit", 1)
    assert "3 faults in 1 file" in ended.out
    assert "... and 2 more faults: --limit 0 shows all" in ended.out
