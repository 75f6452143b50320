"""`bcp convert --link`: a checkpoint that is a manifest only, and who is led where by it."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.manifest import DataFile, Manifest, Sample, decode_manifest, encode_manifest
from bytecheckpoint.storage.backends.fsspec_store import FsspecStore
from bytecheckpoint.storage.backends.local_store import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FOLLOW = bcp.LoadOptions(follow_links=True)
STATE = {f"layers.{number}.weight": torch.full((64, 512), float(number)) for number in range(8)}


def write_hf(path: Path) -> None:
    path.mkdir(parents=True)
    save_file(STATE, path / "model.safetensors")


def write_dcp(path: Path) -> None:
    dcp.save(STATE, checkpoint_id=path, no_dist=True)


def write_own(path: Path | str) -> None:
    bcp.save(path, STATE)


def write_torch(path: Path) -> None:
    path.mkdir(parents=True)
    torch.save(STATE, path / "pytorch_model.bin")


SOURCES = {"bcp": write_own, "hf": write_hf, "dcp": write_dcp, "torch": write_torch}


def assert_loads(path: Path, options: bcp.LoadOptions | None = None) -> None:
    state = {name: torch.zeros(64, 512) for name in STATE}
    bcp.load(path, state, options=options)
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("source", ["hf", "dcp", "torch"])
def test_a_link_in_the_folder_itself_needs_no_option(call, tmp_path, source) -> None:
    SOURCES[source](tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    result = call("convert", tmp_path / "run", tmp_path / "run", "--to", "bcp", "--link", "--json").json
    assert result["is_link"]
    assert result["num_bytes"] < sum(map(len, before.values())) / 100
    assert {path: path.read_bytes() for path in files} == before
    assert (tmp_path / "run" / "manifest.bcp").stat().st_size == result["num_bytes"]
    assert_loads(tmp_path / "run")
    assert call("verify", tmp_path / "run").code == (0 if source == "bcp" else 5)  # without checksums
    assert call("convert", tmp_path / "run", tmp_path / "run", "--to", "bcp", "--link").code == 2  # it stands
    assert call("convert", tmp_path / "run", tmp_path / "hf", "--to", "hf").code == 0


@pytest.mark.parametrize("source", SOURCES)
def test_a_link_in_a_folder_above_needs_no_option_and_moves_with_it(call, tmp_path, source) -> None:
    SOURCES[source](tmp_path / "root" / "run")
    assert call("convert", tmp_path / "root" / "run", tmp_path / "root", "--to", "bcp", "--link").code == 0
    (tmp_path / "root").rename(tmp_path / "moved")
    assert_loads(tmp_path / "moved")


@pytest.mark.parametrize("source", SOURCES)
def test_a_link_elsewhere_is_followed_only_by_who_asks_for_it(call, tmp_path, source) -> None:
    SOURCES[source](tmp_path / "run")
    link = tmp_path / "link"
    assert call("convert", tmp_path / "run", link, "--to", "bcp", "--link").code == 0
    for attempt in (lambda: assert_loads(link), lambda: bcp.open(link)):
        with pytest.raises(bcp.UnsafeCheckpointError, match=r"follow_links=True") as caught:
            attempt()
        assert caught.value.kind == "path_escape"
        assert str(tmp_path / "run") in str(caught.value)
    assert_loads(link, FOLLOW)
    assert torch.equal(bcp.open(link, options=FOLLOW)["layers.3.weight"][5:7], STATE["layers.3.weight"][5:7])
    for command in (("verify", link), ("show", link, "--stats"), ("diff", link, tmp_path / "run")):
        refused = call(*command, "--json")
        assert (refused.code, refused.json["error"]["kind"]) == (2, "path_escape")
        assert "--follow-links" in refused.json["error"]["message"]
        assert "no file was looked at" in refused.json["error"]["message"]
        has_checksums = source == "bcp" or command[0] != "verify"
        assert call(*command, "--follow-links").code == (0 if has_checksums else 5)
    assert call("show", link).code == 0  # reads the manifest only
    assert call("convert", link, tmp_path / "hf", "--to", "hf").code == 2
    assert call("convert", link, tmp_path / "hf", "--to", "hf", "--follow-links").code == 0


def test_a_link_that_replaces_a_checkpoint_removes_its_files_but_none_of_the_source(call, tmp_path) -> None:
    """They stayed for good: `bcp gc` does not find them either."""
    write_hf(tmp_path / "hf")
    for source, num_files in (("hf", 0), ("own", 1)):
        shutil.rmtree(tmp_path / "own", ignore_errors=True)
        write_own(tmp_path / "own")
        call("convert", tmp_path / source, tmp_path / "own", "--to", "bcp", "--link", "--overwrite")
        assert len(list((tmp_path / "own").rglob("*.safetensors"))) == num_files
        assert_loads(tmp_path / "own", FOLLOW)


def test_a_link_removes_no_file_that_has_the_name_of_one_of_the_source(call, tmp_path) -> None:
    """It may be the same file, in a folder that is mounted twice: paths do not tell."""
    write_own(tmp_path / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "mounted")
    call("convert", tmp_path / "mounted", tmp_path / "own", "--to", "bcp", "--link", "--overwrite")
    assert len(list((tmp_path / "own").rglob("*.safetensors"))) == 1
    assert_loads(tmp_path / "own", FOLLOW)


def test_a_part_of_a_checkpoint_under_other_names(call, tmp_path) -> None:
    write_own(tmp_path / "run")
    arguments = ("--link", "--include", "layers.[0-3].*", "--rename", "^layers=blocks")
    assert call("convert", tmp_path / "run", tmp_path / "run" / "part", "--to", "bcp", *arguments).code == 0
    found = bcp.open(tmp_path / "run" / "part", options=FOLLOW)
    assert sorted(found.keys()) == [f"blocks.{number}.weight" for number in range(4)]
    assert torch.equal(found["blocks.2.weight"][...], STATE["layers.2.weight"])


def test_what_the_link_points_to_is_looked_at(call, tmp_path) -> None:
    write_hf(tmp_path / "run")
    assert call("convert", tmp_path / "run", tmp_path / "link", "--to", "bcp", "--link").code == 0
    data = tmp_path / "run" / "model.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(bcp.CheckpointCorruptError, match="wrong size") as caught:
        assert_loads(tmp_path / "link", FOLLOW)
    assert caught.value.kind == "truncated"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(bcp.CheckpointNotFoundError, match="misses 1 of 1"):
        assert_loads(tmp_path / "link", FOLLOW)


def test_files_that_are_listed_and_cannot_be_read_do_not_replace_a_checkpoint(call, tmp_path, monkeypatch) -> None:
    """As objects of an archive: a bucket lists them, and serves them hours after they were asked for."""
    url = f"memory://{uuid.uuid4().hex}"
    write_own(url)
    write_own(tmp_path / "link")

    def refuse(store: FsspecStore, name: str, *arguments: Any, **options: Any) -> None:
        if "data/" in name:
            raise StorageError(f"{name} is in an archive", kind="permission")
        read_into(store, name, *arguments, **options)

    read_into = FsspecStore.read_into
    monkeypatch.setattr(FsspecStore, "read_into", refuse)
    ended = call("convert", url, tmp_path / "link", "--to", "bcp", "--link", "--overwrite")
    assert ended.code == 4
    assert "is in an archive" in ended.err
    assert_loads(tmp_path / "link")


def test_a_source_that_lacks_files_is_not_linked_to(call, tmp_path) -> None:
    write_own(tmp_path / "run")
    for path in (tmp_path / "run" / "data").iterdir():
        path.unlink()
    ended = call("convert", tmp_path / "run", tmp_path / "link", "--to", "bcp", "--link", "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (3, "missing_file")
    assert not (tmp_path / "link").exists()


def test_a_snapshot_of_the_hugging_face_cache(call, tmp_path) -> None:
    """Its files are links into another folder of the cache."""
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    save_file(STATE, model / "blobs" / "beef")
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    assert call("convert", snapshot, tmp_path / "link", "--to", "bcp", "--link").code == 0
    assert_loads(tmp_path / "link", FOLLOW)
    refused = call("convert", snapshot, snapshot, "--to", "bcp", "--link", "--json")
    assert (refused.code, refused.json["error"]["kind"]) == (1, "path_escape")
    assert not (snapshot / "manifest.bcp").exists()


@pytest.mark.parametrize("place", ["run", "../run", "/../etc", "/a/../etc", "/a\0b", "\\\\host\\share", "C:/x"])
def test_a_manifest_that_leads_nowhere_sensible_is_refused_before_any_look(tmp_path, place) -> None:
    write_own(tmp_path / "run")
    path = tmp_path / "run" / "manifest.bcp"
    path.write_bytes(encode_manifest(replace(decode_manifest(path.read_bytes()), linked_to=place)))
    with pytest.raises(bcp.UnsafeCheckpointError, match="link to another folder") as caught:
        assert_loads(tmp_path / "run", FOLLOW)
    assert caught.value.kind == "path_escape"


def test_credentials_in_the_place_that_a_manifest_names_are_not_shown(call, tmp_path) -> None:
    write_hf(tmp_path / "run")
    path = tmp_path / "run" / "manifest.bcp"
    assert call("convert", tmp_path / "run", tmp_path / "run", "--to", "bcp", "--link").code == 0
    manifest = replace(decode_manifest(path.read_bytes()), linked_to="s3://user:s3cr3t@bucket/x")
    path.write_bytes(encode_manifest(manifest))
    ended = call("verify", tmp_path / "run")
    assert ended.code == 2
    assert "s3cr3t" not in ended.err + json.dumps(call("show", tmp_path / "run", "--json").json)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of client libraries
def test_a_link_on_a_local_path_leads_to_a_bucket_with_the_options_for_it(call, s3, s3_prefix, tmp_path) -> None:
    options = [f"--storage-option={key}={json.dumps(value)}" for key, value in s3.options.items()]
    bucket, link = f"s3://{s3.bucket}/{s3_prefix}/run", tmp_path / "link"
    bcp.save(bucket, STATE, storage_options=s3.options)
    assert call("convert", bucket, link, "--to", "bcp", "--link", *options).code == 0
    state = {name: torch.zeros(64, 512) for name in STATE}
    bcp.load(link, state, options=FOLLOW, storage_options=s3.options)
    assert torch.equal(state["layers.3.weight"], STATE["layers.3.weight"])
    found = bcp.open(f"file://{link}", options=FOLLOW, storage_options=s3.options)
    assert torch.equal(found["layers.3.weight"][5:7], STATE["layers.3.weight"][5:7])
    write_hf(tmp_path / "hf")
    for command in (
        ("verify", link),
        ("show", link, "--stats"),
        ("diff", link, tmp_path / "hf"),
        ("diff", bucket, link),
        ("convert", link, tmp_path / "again", "--to", "hf"),
        ("convert", link, f"{bucket}-again", "--to", "hf"),
    ):
        ended = call(*command, "--follow-links", *options)
        assert ended.code == 0, ended.err
        assert s3.secret not in ended.out + ended.err
    with pytest.raises(bcp.CheckpointMismatchError, match=r"local path .*, which takes none"):
        bcp.load(link, state, storage_options=s3.options)
    assert "takes none" in call("verify", link, *options).err


OTHER = {name: tensor + 1 for name, tensor in STATE.items()}


@pytest.mark.parametrize("source", ["hf", "dcp", "torch"])
def test_a_file_that_was_written_again_is_not_loaded_through_a_link_to_it(call, tmp_path, monkeypatch, source) -> None:
    SOURCES[source](tmp_path / "run")
    assert call("convert", tmp_path / "run", tmp_path / "run", "--to", "bcp", "--link").code == 0
    assert_loads(tmp_path / "run")
    sizes = {path: path.stat().st_size for path in (tmp_path / "run").iterdir()}
    monkeypatch.setitem(globals(), "STATE", OTHER)
    manifest = (tmp_path / "run" / "manifest.bcp").read_bytes()
    shutil.rmtree(tmp_path / "run")
    SOURCES[source](tmp_path / "run")
    (tmp_path / "run" / "manifest.bcp").write_bytes(manifest)
    data = [path for path in sizes if path.name not in {".metadata", "manifest.bcp"}]
    assert all(path.stat().st_size == sizes[path] for path in data)
    for attempt in (lambda: assert_loads(tmp_path / "run"), lambda: bcp.open(tmp_path / "run")["layers.3.weight"][:1]):
        with pytest.raises(bcp.CheckpointCorruptError) as caught:
            attempt()
        assert caught.value.kind == "checksum"
        assert "written again after a link to them was made" in caught.value.message
        assert data[0].name in caught.value.message
    assert call("verify", tmp_path / "run").code == 1
    assert call("convert", tmp_path / "run", tmp_path / "other", "--to", "hf").code == 1


def test_a_linked_file_that_cannot_be_read_is_damage_beside_the_rest(call, tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number, name in enumerate("ab", start=1):
        save_file({name: torch.ones(100_000)}, run / f"model-{number:05d}-of-00002.safetensors")
    weight_map = {name: f"model-{number:05d}-of-00002.safetensors" for number, name in enumerate("ab", start=1)}
    (run / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert call("convert", run, run, "--to", "bcp", "--link").code == 0

    def refuse(self, name, byte_offset, buffer, **options):
        if name == weight_map["a"]:
            raise bcp.StorageError("cannot read", kind="unavailable")
        read_into(self, name, byte_offset, buffer, **options)

    read_into = LocalStore.read_into
    monkeypatch.setattr(LocalStore, "read_into", refuse)
    (run / weight_map["b"]).write_bytes(b"short")
    ended = call("verify", run, "--threads", 1, "--json")
    assert [(item["file"], item["kind"]) for item in ended.json["damage"]] == [
        (weight_map["a"], "unavailable"),
        (weight_map["b"], "truncated"),
    ]
    assert ended.json["num_tensors_sound"] == 0


def test_one_number_that_changed_in_a_file_of_torch_is_seen(call, tmp_path) -> None:
    state = {"large": torch.zeros(2_000_003), "small": torch.ones(5)}
    torch.save(state, tmp_path / "x.pt")
    assert call("convert", tmp_path / "x.pt", tmp_path, "--to", "bcp", "--link").code == 0
    state["large"][1_234_567] = 1
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(bcp.CheckpointCorruptError) as caught:
        bcp.load(tmp_path, {"small": torch.ones(5), "large": torch.zeros(2_000_003)})
    assert caught.value.kind == "checksum"
    bcp.load(tmp_path, state, options=bcp.LoadOptions(verify=False))


def test_a_link_to_a_link_keeps_its_samples(call, tmp_path) -> None:
    write_torch(tmp_path / "root" / "run")
    assert call("convert", tmp_path / "root" / "run", tmp_path / "root" / "run", "--to", "bcp", "--link").code == 0
    assert call("convert", tmp_path / "root" / "run", tmp_path / "root", "--to", "bcp", "--link").code == 0
    manifests = [decode_manifest(path.read_bytes()) for path in tmp_path.rglob("manifest.bcp")]
    assert len({file.samples for manifest in manifests for file in manifest.files}) == 1


def test_a_link_of_an_earlier_release_has_no_samples_and_loads(call, tmp_path) -> None:
    write_torch(tmp_path / "run")
    assert call("convert", tmp_path / "run", tmp_path / "run", "--to", "bcp", "--link").code == 0
    path = tmp_path / "run" / "manifest.bcp"
    manifest = decode_manifest(path.read_bytes())
    path.write_bytes(encode_manifest(replace(manifest, files=[file._replace(samples=()) for file in manifest.files])))
    assert_loads(tmp_path / "run")


@pytest.mark.parametrize("sample", [Sample(0, 0, 1), Sample(0, 1 << 30, 1), Sample(1 << 40, 8, 1)])
def test_a_sample_outside_of_its_file_is_refused(sample) -> None:
    manifest = Manifest(save_id="x", foreign_format="torch.save", files=[DataFile("f", 100, samples=[sample])])
    with pytest.raises(bcp.CheckpointCorruptError) as caught:
        decode_manifest(encode_manifest(manifest))
    assert caught.value.kind == "bad_manifest"
