"""`bcp ls`."""

from __future__ import annotations

import fractions
import io
import math
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_files import flip
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.manager import step_records
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.tools.analysis import checkpoint_list


def test_it_lists_steps_in_order(call, saved_root) -> None:
    ended = call("ls", saved_root)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].startswith(f"{saved_root}: 2 checkpoints, ")
    assert [line.split()[0] for line in lines[3:]] == ["5", "1000"]
    assert all(line.endswith("committed") for line in lines[3:])


def test_json_has_the_facts_of_the_manifests(call, saved_root) -> None:
    listed = call("ls", saved_root, "--json").json
    assert listed["root"] == str(saved_root)
    for item, step in zip(listed["checkpoints"], (5, 1000), strict=True):
        info = bcp.open(saved_root, step=step).info
        assert item == {
            "path": info.path,
            "run": None,
            "step": step,
            "committed": True,
            "num_bytes": info.num_bytes,
            "num_tensors": info.num_tensors,
            "world_size": 1,
            "created_at": info.created_at.isoformat(),
            "save_id": info.save_id,
            "format": "bytecheckpoint",
            "metrics": {},
            "pinned": False,
            "leased_until": None,
            "problem": None,
        }


def test_metrics_pins_and_leases_are_listed(call, tmp_path) -> None:
    for step, loss in ((5, 0.25), (10, 0.125), (15, 1 / 3)):
        bcp.save(tmp_path, {"x": 1}, step=step, metadata={"metrics": {"val_loss": loss}})
    store = open_store(tmp_path, storage_options=None, writer_threads=1)
    step_records.report(store, "step_00000010", {"bleu": 30.0, "val_loss": math.nan}, time=9e9)
    step_records.pin(store, "step_00000010", time=0.0)
    step_records.lease(store, "step_00000015", until=5e9)
    step_records.lease(store, "step_00000005", until=5.0)
    lines = call("ls", tmp_path).out.splitlines()[2:]
    assert lines[0].split() == [
        "step",
        "size",
        "saved",
        "age",
        "tensors",
        "ranks",
        "bleu",
        "val_loss",
        "folder",
        "state",
    ]
    assert [line.split()[-4:] for line in lines[1:]] == [
        ["-", "0.25", "step_00000005", "committed"],
        ["30", "nan", "step_00000010", "pinned"],
        ["-", "0.333333", "step_00000015", "leased"],
    ]
    items = call("ls", tmp_path, "--json").json["checkpoints"]
    assert [item["metrics"] for item in items] == [
        {"val_loss": 0.25},
        {"val_loss": None, "bleu": 30.0},
        {"val_loss": 1 / 3},
    ]
    assert [item["pinned"] for item in items] == [False, True, False]
    assert [item["leased_until"] for item in items] == [None, None, "2128-06-11T08:53:20+00:00"]


def test_more_metrics_than_fit_are_named_below(call, tmp_path) -> None:
    bcp.save(tmp_path, {"x": 1}, step=5, metadata={"metrics": {f"m{number}": 1.0 for number in range(8)}})
    lines = call("ls", tmp_path).out.splitlines()
    assert "m5" in lines[2]
    assert "m6" not in lines[2]
    assert lines[-1] == "  more metrics, with --json: m6, m7"


def test_a_step_that_was_not_committed_is_listed_as_such(call, root) -> None:
    (root / "step_00001000" / "manifest.bcp").unlink()
    (root / "step_00002000").mkdir()
    ended = call("ls", root)
    assert ended.code == 0
    assert "1 checkpoint and 2 not committed" in ended.out
    assert ended.out.count("not committed\n") == 2
    items = call("ls", root, "--json").json["checkpoints"]
    assert [(item["step"], item["committed"]) for item in items] == [(5, True), (1000, False), (2000, False)]
    assert items[1]["num_bytes"] == items[0]["num_bytes"]
    assert items[2]["num_bytes"] == 0


def test_the_checkpoint_at_the_path_itself_is_listed(call, saved_root) -> None:
    (item,) = call("ls", saved_root / "step_00001000", "--json").json["checkpoints"]
    assert item["step"] == 1000
    assert item["path"] == str(saved_root / "step_00001000")


def test_an_uncommitted_folder_given_itself_is_listed(call, root) -> None:
    (root / "step_00001000" / "manifest.bcp").unlink()
    (item,) = call("ls", root / "step_00001000", "--json").json["checkpoints"]
    assert not item["committed"]


def test_checkpoints_with_names_are_listed_after_steps(call, tmp_path) -> None:
    bcp.save(tmp_path / "best", {"x": 1})
    bcp.save(tmp_path, {"x": 1})
    bcp.save(tmp_path / "steps", {"x": 1}, step=3)
    (tmp_path / "steps" / "step_00000003").rename(tmp_path / "step_00000003")  # as earlier versions let it be saved
    items = call("ls", tmp_path, "--json").json["checkpoints"]
    assert [item["path"] for item in items] == [
        str(tmp_path / name) if name else str(tmp_path) for name in ("", "step_00000003", "best")
    ]


def test_a_damaged_manifest_does_not_hide_the_others(call, root) -> None:
    flip(root / "step_00001000" / "manifest.bcp", 50)
    ended = call("ls", root)
    assert ended.code == 1
    assert "damaged" in ended.out
    items = call("ls", root, "--json").json["checkpoints"]
    assert [item["problem"] is None for item in items] == [True, False]


@pytest.fixture(params=["folder", "memory"])
def runs(request, tmp_path) -> str:
    """Two runs with steps, a plain checkpoint, files of others and noise beside them."""
    root = str(tmp_path / "runs") if request.param == "folder" else f"memory://runs-{tmp_path.name}"
    for run, steps in (("exp1", (5, 10)), ("exp2", (7,))):
        for step in steps:
            bcp.save(f"{root}/{run}", {"x": torch.ones(4)}, step=step)
    bcp.save(f"{root}/best", {"x": 1})
    put(f"{root}/plain.pt", saved({"w": torch.ones(3)}))
    put(f"{root}/exp2/export.pt", saved({"w": torch.ones(3)}))
    put(f"{root}/notes.txt", b"hello")
    put(f"{root}/empty.bin", b"")
    put(f"{root}/noise.bin", b"noise" * 9)
    put(f"{root}/logs/today/log.txt", b"hello")
    return root


def saved(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb", auto_mkdir=True) as file:
        file.write(content)


def test_a_folder_of_runs_is_listed_run_by_run(call, runs) -> None:
    items = call("ls", runs, "--json").json["checkpoints"]
    assert [(item["run"], item["step"], item["format"]) for item in items] == [
        (None, None, "bytecheckpoint"),
        (None, None, "torch.save"),
        ("exp1", 5, "bytecheckpoint"),
        ("exp1", 10, "bytecheckpoint"),
        ("exp2", 7, "bytecheckpoint"),
        ("exp2", None, "torch.save"),
    ]
    assert [item["path"].removeprefix(runs) for item in items] == [
        "/best",
        "/plain.pt",
        "/exp1/step_00000005",
        "/exp1/step_00000010",
        "/exp2/step_00000007",
        "/exp2/export.pt",
    ]
    for item in items:
        assert call("show", item["path"]).code == 0


def test_each_run_has_a_heading_with_its_totals(call, runs) -> None:
    lines = call("ls", runs).out.splitlines()
    assert f"{runs}: 6 checkpoints, " in lines[0]
    assert [line.split(",")[0] for line in lines if line.startswith("exp")] == [
        "exp1: 2 checkpoints",
        "exp2: 2 checkpoints",
    ]
    folders = [line.split()[-2] for line in lines if line.startswith("  ") and "folder" not in line]
    assert folders == ["best", "plain.pt", "step_00000005", "step_00000010", "step_00000007", "export.pt"]


def test_a_folder_with_nothing_but_a_file_of_another_format_is_listed(call, tmp_path) -> None:
    put(str(tmp_path / "plain.pt"), saved({"w": torch.ones(3)}))
    (item,) = call("ls", tmp_path, "--json").json["checkpoints"]
    assert (item["path"], item["format"]) == (str(tmp_path / "plain.pt"), "torch.save")


def test_files_of_a_checkpoint_of_another_format_are_not_listed_again(call, tmp_path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    put(str(tmp_path / "training_args.bin"), saved({"lr": 1.0}))
    (item,) = call("ls", tmp_path, "--json").json["checkpoints"]
    assert item["path"] == str(tmp_path)


def test_a_file_that_is_never_loaded_is_refused_and_no_damage(call, tmp_path) -> None:
    bcp.save(tmp_path, {"x": 1}, step=5)
    put(str(tmp_path / "arguments.bin"), saved(fractions.Fraction(1, 3)))
    ended = call("ls", tmp_path)
    assert ended.code == 0
    assert ended.out.count("refused") >= 1
    items = call("ls", tmp_path, "--json").json["checkpoints"]
    assert [item["problem"] is None for item in items] == [True, False]


def test_a_damaged_step_of_a_run_is_exit_code_1(call, runs) -> None:
    if "://" in runs:
        return
    flip(Path(runs) / "exp1" / "step_00000005" / "manifest.bcp", 50)
    ended = call("ls", runs)
    assert ended.code == 1
    assert "damaged" in ended.out


def test_data_of_a_run_is_no_unfinished_save(call, tmp_path) -> None:
    bcp.save(tmp_path / "exp", {"x": 1}, step=5)
    put(str(tmp_path / "exp" / "data" / "train.bin"), b"tokens")
    (item,) = call("ls", tmp_path, "--json").json["checkpoints"]
    assert (item["run"], item["step"]) == ("exp", 5)


def test_it_looks_two_folders_deep_and_no_deeper(call, tmp_path, monkeypatch) -> None:
    bcp.save(tmp_path / "a" / "b", {"x": 1})
    bcp.save(tmp_path / "a" / "c" / "d", {"x": 1})
    listed: list[str] = []
    monkeypatch.setattr(LocalStore, "list", lambda self, folder: listed.append(folder) or list_folder(self, folder))
    assert [item["path"] for item in call("ls", tmp_path, "--json").json["checkpoints"]] == [str(tmp_path / "a" / "b")]
    assert max(folder.removesuffix("/data").count("/") for folder in listed) == 1


list_folder = LocalStore.list


def test_more_folders_than_are_looked_into_are_named(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_list, "MAX_RUN_FOLDERS", 3)
    for run in ("a", "b"):
        for step in (1, 2):
            bcp.save(tmp_path / run, {"x": 1}, step=step)
    result = call("ls", tmp_path, "--json").json
    assert [item["run"] for item in result["checkpoints"]] == ["a", "a"]
    assert result["not_listed"] == [str(tmp_path / "b")]
    assert "not looked into: b" in call("ls", tmp_path).out


def test_a_folder_that_may_not_be_listed_is_named(call, tmp_path, monkeypatch) -> None:
    def refuse(self, folder):
        if folder == "private":
            raise StorageError("not allowed", kind="permission")
        return list_folder(self, folder)

    bcp.save(tmp_path / "a", {"x": 1})
    (tmp_path / "private").mkdir()
    monkeypatch.setattr(LocalStore, "list", refuse)
    result = call("ls", tmp_path, "--json").json
    assert len(result["checkpoints"]) == 1
    assert result["not_listed"] == [str(tmp_path / "private")]


def test_a_list_of_many_steps_opens_each_manifest_once_and_checks_no_chunk(call, tmp_path, monkeypatch) -> None:
    for step in range(12):
        bcp.save(tmp_path, {"w": torch.ones(4)}, step=step)
    looks: list[str] = []
    for method in ("list", "read_whole", "byte_length"):
        real = getattr(LocalStore, method)
        monkeypatch.setattr(
            LocalStore, method, lambda self, name, real=real, **given: looks.append(name) or real(self, name, **given)
        )
    monkeypatch.setattr(layout, "decode_manifest", None)
    assert call("ls", tmp_path).code == 0
    assert len(looks) == 1 + 2 * 12


def test_what_the_store_of_the_root_does_not_read_hides_nothing_else(call, tmp_path) -> None:
    """A run named by a time, or a link to another disk, made `bcp ls` of the whole folder fail."""
    root, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    for folder in (root, root / "2026-11-29_10:30:00", root / "exp", elsewhere):
        bcp.save(folder, {"w": torch.zeros(2)}, step=1)
    (root / "linked").symlink_to(elsewhere)
    (root / "exp" / "step_00000002").symlink_to(elsewhere / "step_00000001")
    torch.save({"w": torch.zeros(2)}, root / "model_10:30.pt")
    ended = call("ls", root, "--json")
    assert ended.code == 0
    result = ended.json
    listed = {item["path"]: item["problem"] for item in result["checkpoints"]}
    assert set(listed) == {f"{root}/{name}" for name in ("step_00000001", "exp/step_00000001", "model_10:30.pt")}
    assert "rename the file" in listed[f"{root}/model_10:30.pt"]
    names = ("linked", "2026-11-29_10:30:00", "exp/step_00000002")
    assert set(result["not_listed"]) == {f"{root}/{name}" for name in names}
    assert "not looked into: linked" in call("ls", root).out
    assert call("ls", root / "2026-11-29_10:30:00").code == 0
    assert call("report", root, "--out", tmp_path / "page.html").code == 0
    assert len(call("watch", root, "--once", "--json").json["checkpoints"]) == 2
    ended = call("du", root, "--json")
    assert ended.code == 0  # as for any file that is refused
    assert {item["path"] for item in ended.json["checkpoints"]} == set(listed)
