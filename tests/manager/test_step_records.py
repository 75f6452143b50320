from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from faults.seams import files_under
from manager.steps import read_steps, step_info

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError
from bytecheckpoint.manager import abandoned_steps, step_records
from bytecheckpoint.manager.step_records import list_steps
from bytecheckpoint.storage import deletion
from bytecheckpoint.storage.layout import committed_save_id, step_folder
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    for step in (1, 2):
        bcp.save(tmp_path, {"w": torch.ones(5)}, step=step, metadata={"metrics": {"loss": 1.0 / step}})
    return open_store(tmp_path, storage_options=None, writer_threads=1)


def folder(step):
    return step_folder(step)


def test_a_step_without_a_record_is_read_from_its_manifest(store: Store) -> None:
    first, second = list_steps(store)
    info = bcp.open(str(store), step=2).info
    assert (first.info.step, second.info.step) == (1, 2)
    assert second.info.metrics == {"loss": 0.5}
    assert (second.info.time, second.info.num_bytes) == (info.created_at.timestamp(), info.num_bytes)
    assert (second.info.save_id, second.info.committed, second.has_record) == (info.save_id, True, False)


def test_a_record_comes_back(store: Store) -> None:
    save_id = committed_save_id(store, folder(1))
    metrics = {"loss": math.nan, "up": math.inf, "down": -math.inf, "accuracy": 0.25}
    written = step_info(
        1, time=123.5, metrics=metrics, seconds={"stall": 0.5, "total": 2.0}, save_id=save_id, num_bytes=9
    )
    step_records.write_record(store, folder(1), written)
    step_records.write_record(store, folder(1), written)
    first = list_steps(store)[0]
    assert first.has_record
    assert str(first.info) == str(written)


def test_the_newest_report_of_a_metric_counts(store: Store) -> None:
    step_records.report(store, folder(2), {"loss": 3.0, "bleu": 7.0}, time=9e9 + 2)
    step_records.report(store, folder(2), {"loss": math.nan}, time=9e9 + 3)
    step_records.report(store, folder(2), {"loss": 5.0}, time=9e9 + 1)
    assert str(read_steps(store)[1].metrics) == "{'loss': nan, 'bleu': 7.0}"


def test_a_report_counts_where_the_clock_of_the_host_that_saved_is_ahead(store: Store) -> None:
    found = read_steps(store)[1]
    early = found.time - 3600  # by the clock of the storage
    step_records.report(store, folder(2), {"loss": 7.0}, time=early)
    assert read_steps(store)[1].metrics == {"loss": 7.0}
    step_records.write_record(store, folder(2), found)
    assert [step.info.metrics for step in list_steps(store, reads_manifests=True)][1] == {"loss": 7.0}


def test_metrics_of_a_replaced_checkpoint_count_for_nothing(store: Store, tmp_path: Path) -> None:
    step_records.write_record(store, folder(1), read_steps(store)[0])
    step_records.report(store, folder(1), {"bleu": 7.0}, time=9e9)
    options = bcp.SaveOptions(overwrite=True)
    bcp.save(tmp_path, {"w": torch.ones(5)}, step=1, metadata={"metrics": {"loss": 8.0}}, options=options)
    assert read_steps(store)[0].metrics == {"loss": 8.0}


def test_pins_come_and_go(store: Store) -> None:
    step_records.pin(store, folder(1), time=5.0)
    step_records.pin(store, folder(1), time=6.0)
    assert [info.pinned for info in read_steps(store)] == [True, False]
    step_records.unpin(store, folder(1))
    step_records.unpin(store, folder(1))
    assert [info.pinned for info in read_steps(store)] == [False, False]


def test_the_longest_lease_counts(store: Store) -> None:
    step_records.lease(store, folder(2), until=500.5)
    name = step_records.lease(store, folder(2), until=900.0)
    assert [step.leased_until for step in list_steps(store)] == [0.0, 900.0]
    store.delete(name)
    assert list_steps(store)[1].leased_until == 501.0


@pytest.mark.parametrize("act", [step_records.pin, step_records.report, step_records.lease])
def test_only_a_committed_step_is_pinned_leased_or_measured(store: Store, act, tmp_path: Path) -> None:
    before = sorted(files_under(tmp_path))
    arguments = {"pin": {"time": 1.0}, "report": {"metrics": {"a": 1.0}, "time": 1.0}, "lease": {"until": 1.0}}
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"no checkpoint is committed at .*nothing was changed"):
        act(store, folder(7), **arguments[act.__name__])
    assert sorted(files_under(tmp_path)) == before


@pytest.mark.parametrize("content", ["{", '{"x": ' + "[" * 100_000])
def test_a_damaged_record_is_named_and_counts_as_absent(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    step_records.write_record(store, folder(1), read_steps(store)[0])
    (path,) = (tmp_path / folder(1) / "metrics").iterdir()
    path.write_text(content)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        assert read_steps(store)[0].metrics == {"loss": 1.0}
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]


def test_thousands_of_metrics_of_a_save_are_read_again(tmp_path: Path) -> None:
    metrics = {
        f"gradient_norm/layers.{layer}.self_attention.query_key_value.weight": layer / 7 for layer in range(20_000)
    }
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1)) as manager:
        manager.save(1, {"w": torch.ones(5)}, metrics=metrics)
        manager.report(1, metrics)
    with bcp.CheckpointManager(tmp_path) as manager:
        assert read_steps(manager._store)[0].metrics == metrics


def test_a_record_that_is_too_long_is_named_and_counts_as_absent(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_records.report(store, folder(1), {"loss": 3.0}, time=9e9)
    monkeypatch.setattr(step_records, "MAX_RECORD_BYTES", 10)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        assert read_steps(store)[0].metrics == {"loss": 1.0}
    assert ["it may have 10" in record.getMessage() for record in caplog.records] == [True]


def test_a_record_behind_a_link_out_of_the_root_is_refused_and_not_absent(store: Store, tmp_path: Path) -> None:
    step_records.report(store, folder(1), {"loss": 0.125}, time=9e9)
    (record,) = (tmp_path / folder(1) / "metrics").iterdir()
    with TemporaryDirectory() as elsewhere:
        shutil.move(record, elsewhere)
        record.symlink_to(f"{elsewhere}/{record.name}")
        with pytest.raises(UnsafeCheckpointError, match="a link leads from"):
            list_steps(store)


def test_abandoned_steps_whose_record_is_too_long_do_not_count_as_good(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned_steps.write_branch(store, abandoned_steps.Branch({2: committed_save_id(store, folder(2))}))
    assert list(abandoned_steps.newest_steps(store)) == [1]
    monkeypatch.setattr(abandoned_steps, "MAX_RECORD_BYTES", 10)
    for read in (abandoned_steps.read_branch, list_steps, lambda it: list(abandoned_steps.newest_steps(it))):
        with pytest.raises(UnsafeCheckpointError, match="it may have 10"):
            read(store)


@pytest.mark.parametrize(
    "content",
    ["", '{"abandoned": {"2', "[]", '{"abandoned": {"' + "9" * 5000 + '": "a"}}', '{"x":' + "[" * 100_000],
    ids=["empty", "cut off", "another form", "a huge step", "deep"],
)
def test_abandoned_steps_whose_record_is_damaged_do_not_count_as_good(
    store: Store, tmp_path: Path, content: str
) -> None:
    abandoned_steps.write_branch(store, abandoned_steps.Branch({2: committed_save_id(store, folder(2))}))
    (tmp_path / abandoned_steps.BRANCH_NAME).write_text(content)
    for read in (abandoned_steps.read_branch, list_steps, lambda it: list(abandoned_steps.newest_steps(it))):
        with pytest.raises(CheckpointCorruptError, match=r"branch\.json.* is damaged .* no step was restored") as error:
            read(store)
        assert error.value.kind == "bad_manifest"


def test_a_run_whose_list_of_abandoned_steps_is_damaged_restores_and_deletes_nothing(tmp_path: Path) -> None:
    def manager_at(keep: Any) -> bcp.CheckpointManager:
        return bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1), keep=keep)

    with manager_at(bcp.keep_policies.All()) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, {"step": step})
        manager.restore({"step": 0}, step=1)
        manager.save(2, {"step": 20})
    record = tmp_path / abandoned_steps.BRANCH_NAME
    sound = record.read_bytes()
    record.write_bytes(sound[:-3])
    with pytest.raises(CheckpointCorruptError, match="is damaged"), manager_at(bcp.keep_policies.Latest(1)) as manager:
        manager.restore({"step": 0})
    assert bcp.steps(tmp_path) == [1, 2, 3, 4]
    record.write_bytes(sound)
    with manager_at(bcp.keep_policies.All()) as running:
        record.write_bytes(sound[:-3])
        with pytest.raises(CheckpointCorruptError, match="is damaged"):
            manager_at(bcp.keep_policies.All())
        record.write_bytes(sound)
        running.save(5, {"step": 50})  # the root still is its own
    bcp.delete(tmp_path, 5)
    with manager_at(bcp.keep_policies.All()) as manager:
        state = {"step": 0}
        manager.restore(state)
    assert state == {"step": 20}


def test_the_record_of_a_save_without_tensors_is_found_beside_its_manifest(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1)) as manager:
        manager.save(1, {"step": 1})
    found = step_records.read_step(manager._store, 1, reads_manifest=True)
    assert found == step_records.read_step(manager._store, 1)
    assert found is not None
    assert (found.has_record, found.info.num_bytes, set(found.info.seconds)) == (True, 0, {"stall", "total"})


def test_files_of_others_are_no_records(store: Store, tmp_path: Path) -> None:
    for name in ("metrics/notes.json", "metrics/0123456789abcdef.txt", "leases/mine"):
        (tmp_path / folder(1) / name).parent.mkdir(exist_ok=True)
        (tmp_path / folder(1) / name).write_text("of the user")
    assert deletion.side_objects(store, folder(1)) == []
    assert list_steps(store)[0].leased_until == 0.0


def test_abandoned_steps_come_first(store: Store) -> None:
    abandoned_steps.write_branch(
        store, abandoned_steps.Branch({2: committed_save_id(store, folder(2)), 1: "of another save"})
    )
    assert [step.info.step for step in list_steps(store)] == [2, 1]
    assert list(abandoned_steps.newest_steps(store)) == [1]
    assert list(abandoned_steps.present_abandoned(store)) == [2]


def test_metrics_are_numbers() -> None:
    given = {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": math.nan}
    assert str(step_records.checked_metrics(given)) == "{'a': 1.0, 'b': 0.5, 'c': 2.0, 'd': nan}"
    for wrong in ({"loss": "low"}, {"loss": None}, {"loss": [1, 2]}, {3: 1.0}):
        with pytest.raises(ValueError, match="metrics are numbers by name"):
            step_records.checked_metrics(wrong)


@pytest.mark.parametrize("given", [np.ones(3), torch.ones(2), [1.0], "low"], ids=["array", "tensor", "list", "text"])
def test_what_is_no_mapping_of_metrics_is_refused_as_such(store: Store, given: Any) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="metrics are a mapping, not ") as raised:
        step_records.report(store, folder(2), given, time=1.0)
    assert raised.value.kind == "conflict"
    assert list_steps(store)[1].info.metrics == {"loss": 0.5}


def test_a_loss_that_requires_grad_is_a_metric_without_a_warning() -> None:
    assert step_records.checked_metrics({"loss": torch.tensor(0.5, requires_grad=True)}) == {"loss": 0.5}


def test_a_number_of_another_library_is_a_metric_whatever_else_it_has() -> None:
    class Meter:
        item = "loss"

        def __float__(self) -> float:
            return 0.5

    assert step_records.checked_metrics({"loss": Meter()}) == {"loss": 0.5}


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.ones((), device="meta"), 10**400], ids=["two values", "no values", "too large"]
)
def test_a_metric_that_has_no_value_as_a_float_is_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"not 'loss': .*nothing was saved"):
        step_records.checked_metrics({"loss": value})
