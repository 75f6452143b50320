"""`bcp keep`: a dry run unless told otherwise, and what is newest, pinned, leased or of others stays."""

from __future__ import annotations

import math
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import flip
from faults.seams import Seam, before, files_under, raising
from manager.steps import read_steps

import bytecheckpoint as bcp
from bytecheckpoint.manager import abandoned_steps, retention, step_records
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store

LOSSES = {500: 0.9, 1000: 0.5, 1500: 0.1, 2000: math.nan, 2500: 0.3}


def store_at(root: object) -> Store:
    return open_store(str(root), storage_options=None, writer_threads=1)


def folder(step: int) -> str:
    return layout.step_folder(step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps with a metric each, as a program without a manager saves them."""
    for step, loss in LOSSES.items():
        metrics = {"metrics": {"val_loss": loss}} if math.isfinite(loss) else {}
        bcp.save(tmp_path / "run", {"w": torch.ones(100)}, step=step, metadata=metrics)
    step_records.report(store_at(tmp_path / "run"), folder(2000), {"val_loss": math.nan}, time=time.time())
    return tmp_path / "run"


def kept_steps(ended) -> list[int]:
    return [item["step"] for item in ended.json["checkpoints"] if item["kept"]]


def test_a_dry_run_deletes_nothing_and_says_what_would_go(call, run) -> None:
    before_it = files_under(run)
    ended = call("keep", run, "--latest", 1, "--every", 1000, "--best", "val_loss")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert re.fullmatch(rf"{run}: 4 kept; 1 checkpoint, 4.4 KiB, to be deleted with --delete", lines[0])
    assert lines[2].split() == ["step", "saved", "age", "size", "val_loss", "why"]
    words = [re.split(r" {2,}", line.strip()) for line in lines[3:]]
    assert [(row[0], *row[-3:]) for row in words] == [
        ("500", "0.9", "goes", "no policy keeps it"),
        ("1000", "0.5", "kept", "EverySteps(1000)"),
        ("1500", "0.1", "kept", "Best(1, 'val_loss')"),
        ("2000", "nan", "kept", "EverySteps(1000)"),
        ("2500", "0.3", "kept", "newest, Latest(1)"),
    ]
    assert files_under(run) == before_it


def test_delete_does_what_the_dry_run_said(call, run) -> None:
    args = ("keep", run, "--latest", 2, "--best", "val_loss:min:1", "--json")
    said, done = call(*args).json, call(*args, "--delete").json
    assert not said["deleted"]
    assert said["deleted_num_bytes"] == 0
    assert done["deleted"]
    assert [item["kept"] for item in said["checkpoints"]] == [item["kept"] for item in done["checkpoints"]]
    gone = [item for item in done["checkpoints"] if item["deleted"]]
    assert [item["step"] for item in gone] == [500, 1000]
    assert done["deleted_num_bytes"] == sum(item["num_bytes"] for item in gone) > 800
    assert bcp.steps(run) == [1500, 2000, 2500]
    assert sorted(path.name for path in run.iterdir()) == [folder(step) for step in (1500, 2000, 2500)]
    assert "0 checkpoints, 0 B, deleted" in call("keep", run, "--latest", 3, "--delete").out


def test_the_newest_pinned_and_leased_stay_whatever_the_policy(call, run) -> None:
    store = store_at(run)
    step_records.pin(store, folder(500), time=time.time())
    step_records.lease(store, folder(1000), until=time.time() + 1000)
    step_records.lease(store, folder(2000), until=time.time() - 1000)
    ended = call("keep", run, "--best", "val_loss", "--delete", "--json")
    assert kept_steps(ended) == [500, 1000, 1500, 2500] == bcp.steps(run)
    whys = [item["why"] for item in ended.json["checkpoints"]]
    assert whys[0] == "pinned"
    assert whys[1].startswith("leased until ")
    assert whys[4] == "newest"


def test_one_that_is_pinned_while_others_are_deleted_stays(call, run) -> None:
    pin = before(Seam(retention, "delete_steps"), lambda: step_records.pin(store_at(run), folder(1000), time=0.0))
    with pin:
        ended = call("keep", run, "--latest", 3, "--delete", "--json")
    assert bcp.steps(run) == [1000, 1500, 2000, 2500]
    assert [(item["kept"], item["why"]) for item in ended.json["checkpoints"]][1] == (True, "pinned")


def test_nan_is_the_worst(call, run) -> None:
    assert kept_steps(call("keep", run, "--best", "val_loss:max:4", "--json")) == [500, 1000, 1500, 2500]
    assert kept_steps(call("keep", run, "--best", "val_loss:min:5", "--json")) == list(LOSSES)


def test_what_is_young_is_kept(call, run) -> None:
    assert kept_steps(call("keep", run, "--within", "7d", "--json")) == list(LOSSES)
    time.sleep(0.01)
    assert kept_steps(call("keep", run, "--within", "0.001s", "--json")) == [2500]


def test_files_of_others_stay(call, run) -> None:
    (run / folder(500) / "notes.txt").write_text("of the user")
    (run / "config.json").write_text("{}")
    (run / folder(9000)).mkdir()
    assert call("keep", run, "--latest", 1, "--delete").code == 0
    assert sorted(path.name for path in run.iterdir()) == ["config.json", folder(500), folder(2500), folder(9000)]
    assert files_under(run / folder(500)) == ["notes.txt"]


def test_a_metric_that_no_step_has_is_refused(call, run) -> None:
    before_it = files_under(run)
    ended = call("keep", run, "--best", "val_los", "--delete")
    assert ended.code == 2
    assert "has the metric 'val_los', they have val_loss; nothing was changed" in ended.err
    assert files_under(run) == before_it


@pytest.mark.parametrize(
    "options",
    [[], ["--delete"], ["--best", "val_loss:mni"], ["--best", "val_loss:2"], ["--best", "a:min:0"], ["--within", "0"]],
)
def test_policies_that_are_none_are_refused(call, run, options) -> None:
    assert call("keep", run, *options).code == 2
    assert bcp.steps(run) == list(LOSSES)


@pytest.mark.parametrize(("given", "n"), [("eval:loss:min", 1), ("eval:loss:min:2", 2)])
def test_a_metric_may_have_a_colon_in_its_name(call, tmp_path, given, n) -> None:
    for step in (1, 2, 3):
        bcp.save(tmp_path, {"x": 1}, step=step, metadata={"metrics": {"eval:loss": step}})
    assert call("keep", tmp_path, "--best", given, "--json").json["policy"] == f"Best({n}, 'eval:loss')"


def test_a_checkpoint_that_is_no_root_is_refused(call, tmp_path) -> None:
    bcp.save(tmp_path, {"x": 1})
    ended = call("keep", tmp_path, "--latest", 1, "--delete")
    assert ended.code == 2
    assert "is one checkpoint, not a root of steps" in ended.err


def test_a_damaged_step_is_named_and_left_alone(call, run) -> None:
    flip(run / folder(500) / "manifest.bcp", 50)
    ended = call("keep", run, "--latest", 1, "--delete", "--json")
    assert (ended.json["unreadable"], ended.err) == ([str(run / folder(500))], "")
    assert (run / folder(500) / "manifest.bcp").exists()
    assert "their manifest is damaged or data is missing: step_00000500" in call("keep", run, "--latest", 1).out


def test_a_damaged_newest_step_does_not_count_as_the_newest(call, run) -> None:
    store = store_at(run)
    step_records.write_record(store, folder(2500), read_steps(store)[-1])
    flip(run / folder(2500) / "manifest.bcp", 50)
    ended = call("keep", run, "--best", "val_loss", "--delete", "--json")
    assert ended.json["unreadable"] == [str(run / folder(2500))]
    assert kept_steps(ended) == [1500, 2000]


def test_a_step_that_another_program_has_replaced_counts_as_it_is_now(call, run) -> None:
    store = store_at(run)
    step_records.write_record(store, folder(1500), read_steps(store)[2])
    options = bcp.SaveOptions(overwrite=True)
    bcp.save(run, {"x": 1}, step=1500, metadata={"metrics": {"val_loss": 7.0}}, options=options)
    assert kept_steps(call("keep", run, "--best", "val_loss", "--json")) == [2500]
    assert call("keep", run, "--best", "val_loss", "--delete").code == 0
    assert bcp.steps(run) == [2500]


def test_what_cannot_be_deleted_is_told_and_the_rest_deleted(call, run) -> None:
    refusal = raising(bcp.StorageError("you may not", kind="permission"))
    with before(Seam(retention, "delete_steps"), refusal):
        ended = call("keep", run, "--latest", 4, "--delete", "--json")
    assert ended.code == 4
    assert ended.json["failures"] == ["step 500: you may not"]


def test_a_deletion_that_was_interrupted_is_finished(call, run) -> None:
    def interrupt(*_args):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "_delete_all", interrupt)
        ended = call("keep", run, "--latest", 1, "--delete")
    assert ended.code == 130
    assert "the same command deletes the rest" in ended.err
    assert bcp.steps(run) == [1000, 1500, 2000, 2500]
    ended = call("keep", run, "--latest", 1, "--delete")
    assert "1 deletion that an earlier process had begun: finished" in ended.out
    assert [path.name for path in run.iterdir()] == [folder(2500)]


def test_times_beyond_all_calendars_end_well(call, run) -> None:
    (run / folder(500) / "leases").mkdir()
    (run / folder(500) / "leases" / f"{'9' * 200}-00000000").write_text("")
    info = read_steps(store_at(run))[1]
    step_records.write_record(store_at(run), folder(1000), replace(info, time=1e300))
    ended = call("keep", run, "--latest", 1, "--json")
    assert ended.json["checkpoints"][0]["why"].startswith("leased until 9892-")
    assert ended.json["checkpoints"][1]["created_at"] is None
    assert call("ls", run).code == 0


def test_it_sees_what_a_manager_has_written_and_the_manager_goes_on(call, tmp_path) -> None:
    state = {"w": torch.ones(10)}
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1)) as manager:
        for step in range(1, 5):
            manager.save(step, state, metrics={"loss": 1.0 / step})
            manager.wait()
        manager.report(1, {"loss": 0.01})
        manager.pin(3)
        ended = call("keep", tmp_path, "--best", "loss", "--delete", "--json")
        assert [(item["step"], item["kept"], item["why"]) for item in ended.json["checkpoints"]] == [
            (1, True, "Best(1, 'loss')"),
            (2, False, "no policy keeps it"),
            (3, True, "pinned"),
            (4, True, "newest"),
        ]
        manager.save(5, state)
    assert bcp.steps(tmp_path) == [1, 3, 4, 5]
    listed = call("ls", tmp_path, "--json").json["checkpoints"]
    assert [(item["step"], item["metrics"], item["pinned"]) for item in listed] == [
        (1, {"loss": 0.01}, False),
        (3, {"loss": 1 / 3}, True),
        (4, {"loss": 0.25}, False),
        (5, {}, False),
    ]


def test_it_works_on_a_url(call) -> None:
    url = "memory://keep"
    for step in (1, 2, 3):
        bcp.save(url, {"x": 1}, step=step)
    assert call("keep", url, "--latest", 1, "--delete").code == 0
    assert bcp.steps(url) == [3]


def test_steps_that_training_left_behind_go_first(call, run) -> None:
    store = store_at(run)
    abandoned = {step: layout.committed_save_id(store, folder(step)) for step in (2000, 2500)}
    abandoned_steps.write_branch(store, abandoned_steps.Branch(abandoned))
    ended = call("keep", run, "--latest", 2, "--json")
    assert kept_steps(ended) == [1000, 1500]
    assert [item["step"] for item in ended.json["checkpoints"] if item["abandoned"]] == [2000, 2500]
    assert "abandoned; no policy keeps it" in call("keep", run, "--latest", 2).out


def test_a_deletion_of_an_earlier_process_that_cannot_be_finished_is_told_and_the_rest_is_done(call, run) -> None:
    refusing = raising(bcp.StorageError("no permission", kind="permission"))
    with before(Seam(retention, "finish_deletions"), refusing):
        ended = call("keep", run, "--latest", 1, "--delete")
    assert ended.code == 4
    assert "not deleted: no permission" in ended.out
    assert kept_steps(call("keep", run, "--latest", 1, "--json")) == [2500]


def test_a_step_whose_data_is_missing_does_not_take_the_place_of_a_good_one(call, run) -> None:
    (lost,) = (run / folder(2500) / "data").iterdir()
    lost.unlink()
    ended = call("keep", run, "--latest", 2, "--delete", "--json")
    assert kept_steps(ended) == [1500, 2000]
    assert ended.json["unreadable"] == [f"{run}/{folder(2500)}"]
    assert bcp.steps(run) == [1500, 2000, 2500]


@pytest.mark.parametrize("num_kept", [1, 5])
def test_several_manifests_are_read_at_once(call, run, num_kept, monkeypatch) -> None:
    """Of the steps that stay, and of those that go: over a network, a root of hundreds took as many times as long."""
    steps = step_records.list_steps(store_at(run), reads_manifests=True)
    alike = {folder(step) for step in LOSSES if num_kept == 5 or step != 2500}
    together, read = threading.Barrier(len(alike), timeout=60), layout.read_manifest

    def read_with_others(store: Store, name: str) -> Manifest:
        if name in alike:
            together.wait()
        return read(store, name)

    monkeypatch.setattr(step_records, "list_steps", lambda *_, **__: steps)
    monkeypatch.setattr(layout, "read_manifest", read_with_others)
    assert len(kept_steps(call("keep", run, "--latest", num_kept, "--json"))) == num_kept


def test_files_that_a_link_points_to_are_not_counted_as_deleted(call, run, tmp_path) -> None:
    bcp.save(tmp_path / "large", {"w": torch.ones(100_000)})
    call("convert", tmp_path / "large", run / folder(500), "--to", "bcp", "--link", "--overwrite")
    ended = call("keep", run, "--latest", 4, "--delete", "--json")
    assert (kept_steps(ended), ended.json["deleted_num_bytes"]) == ([1000, 1500, 2000, 2500], 0)
    assert bcp.open(tmp_path / "large")["w"][0] == 1


def test_a_step_to_which_one_that_stays_is_a_link_stays(call, run) -> None:
    call("convert", run / folder(500), run / folder(3000), "--to", "bcp", "--link")
    ended = call("keep", run, "--latest", 1, "--delete", "--json")
    assert kept_steps(ended) == [500, 3000]
    assert ended.json["checkpoints"][0]["why"] == "step 3000 links to it"


def test_a_link_to_a_step_that_is_gone_does_not_take_the_place_of_a_good_one(call, run) -> None:
    call("convert", run / folder(500), run / folder(3000), "--to", "bcp", "--link")
    shutil.rmtree(run / folder(500))
    ended = call("keep", run, "--latest", 1, "--delete", "--json")
    assert (kept_steps(ended), ended.json["unreadable"]) == ([2500], [f"{run}/{folder(3000)}"])
