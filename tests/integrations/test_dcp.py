"""The drop-in for torch.distributed.checkpoint in one process: what is saved, what a load asks for, what is refused."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from click.testing import CliRunner
from early_loader import EarlyLoader
from faults.seams import Seam, before
from frameworks.going_on import go_on
from integrations.dcp_programs import AppState, RandomNumbers, digest, mlp, replicated, step
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import save as save_with_torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import bytecheckpoint as bcp
from bytecheckpoint.integrations import dcp
from bytecheckpoint.integrations.dcp import calls, storage
from bytecheckpoint.saving import commit
from bytecheckpoint.tools.main import cli

STAGES_ON = StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False)
BLOCKS = StagingOptions(False, False, use_async_staging=False, use_non_blocking_copy=False)


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = replicated(seed)
    step(model, optimizer, torch.ones(3, 10))
    return model, optimizer


def test_an_app_state_and_plain_values_come_back_to_the_bit(tmp_path: Path) -> None:
    source, target = AppState(*trained(0)), AppState(*replicated(1))
    dcp.save({"app": source, "step": 7, "notes": {"names": ["a", "b"], "sizes": (1, 2)}}, checkpoint_id=tmp_path)
    state = {"app": target, "step": 0, "notes": {"names": [], "sizes": (0,)}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert digest(target.state_dict()) == digest(source.state_dict())
    assert (state["step"], state["notes"]) == (7, {"names": ["a", "b"], "sizes": (1, 2)})


def test_modules_and_optimizers_are_saved_as_they_are_and_need_no_state_of_their_own(tmp_path: Path) -> None:
    """DCP asks an optimizer for its state, which a new one does not have, and then loads nothing."""
    model, optimizer = trained(0)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path)
    fresh, new = replicated(1)
    go_on(tmp_path, "calls of torch.distributed.checkpoint", state={"model": fresh, "optim": new})
    assert digest(AppState(fresh, new).state_dict()) == digest(AppState(model, optimizer).state_dict())


def test_a_flattened_optimizer_goes_through_torchs_own_functions(tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    (model, optimizer), (fresh, new) = trained(0), trained(1)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"optim": saved, "model": get_model_state_dict(model)}, checkpoint_id=tmp_path)
    state = {"optim": get_optimizer_state_dict(fresh, new, options=options), "model": get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(fresh, new, state["optim"], options=options)
    assert digest(AppState(fresh, new).state_dict()) == digest(AppState(model, optimizer).state_dict())


def test_what_the_drop_in_saves_loads_with_the_library_and_shows_in_its_commands(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optim": optimizer_state}, checkpoint_id=tmp_path)
    fresh, new = replicated(1)
    bcp.load(tmp_path, {"model": fresh})
    assert digest(fresh.state_dict()) == digest(model.state_dict())
    bcp.load(tmp_path, {"model": fresh, "optim": new})
    assert digest(AppState(fresh, new).state_dict()) == digest(AppState(model, optimizer).state_dict())
    shown = CliRunner().invoke(cli, ["show", str(tmp_path), "--tree"])
    assert shown.exit_code == 0
    assert "model" in shown.output
    assert "optim" in shown.output


def test_a_folder_of_torchs_own_loads_through_the_drop_in(tmp_path: Path) -> None:
    source, target = AppState(*trained(0)), AppState(*replicated(1))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save_with_torch({"app": source, "step": 3}, checkpoint_id=tmp_path)
    state = {"app": target, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["step"] == 3
    assert digest(target.state_dict()) == digest(source.state_dict())


@pytest.mark.parametrize("key", ["a/b c", "ü.é", "x\n\t\0y", "*[glob]?", "..", " ", "日本", "state.0", "-1", "'\"\\"])
def test_keys_may_hold_any_character(tmp_path: Path, key: str) -> None:
    dcp.save({key: {key: torch.arange(3)}, "n": {key: 5}, "t": {"other": 1}}, checkpoint_id=tmp_path)
    state = {key: {key: torch.zeros(3, dtype=torch.int64)}, "n": {key: 0}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state[key][key].tolist() == [0, 1, 2]
    assert state["n"] == {key: 5}


class Shown:
    """A Stateful of any state, which keeps what a load gives it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = {"loaded": state_dict}


def test_a_loader_goes_on_though_its_state_dict_makes_an_iterator(tmp_path: Path) -> None:
    source, target = EarlyLoader(), EarlyLoader()
    assert next(iter(source)) == 1
    dcp.save({"loader": source}, checkpoint_id=tmp_path)
    dcp.load({"loader": target}, checkpoint_id=tmp_path)
    assert next(iter(target)) == 2


def test_keys_that_are_not_asked_for_are_ignored_at_any_depth(tmp_path: Path) -> None:
    full = {"a": {"b": {"c": torch.ones(2), "d": 1}, "e": 2}, "f": torch.ones(1)}
    dcp.save({"app": Shown(full), "other": 3, "model": mlp(0)}, checkpoint_id=tmp_path)
    app, part = Shown({"a": {"b": {"d": 0}}, "f": torch.zeros(1)}), mlp(1)[:1]
    dcp.load({"app": app, "model": part}, checkpoint_id=tmp_path)
    assert digest(app.state) == digest({"loaded": {"a": {"b": {"d": 1}}, "f": torch.ones(1)}})
    assert torch.equal(part[0].weight, mlp(0)[0].weight)


@pytest.mark.parametrize("state", [{"a": {"new": 0}}, {"a": {"w": torch.zeros(2), "x": torch.zeros(1)}}, {"b": 0}])
def test_a_missing_key_raises_and_nothing_is_changed(tmp_path: Path, state: dict[str, Any]) -> None:
    dcp.save({"a": {"w": torch.ones(2)}}, checkpoint_id=tmp_path)
    earlier = digest(state)
    with pytest.raises(bcp.CheckpointMismatchError) as raised:
        dcp.load(state, checkpoint_id=tmp_path)
    assert raised.value.kind == "missing_key"
    assert "unexpected" not in str(raised.value)
    assert "or for a partial load" in str(raised.value)
    assert digest(state) == earlier


def test_a_partial_load_leaves_what_the_checkpoint_lacks_and_still_refuses_other_shapes(tmp_path: Path) -> None:
    dcp.save({"a": {"w": torch.ones(2), "n": 1}}, checkpoint_id=tmp_path)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    state = {"a": {"w": torch.zeros(2), "n": 0, "new": torch.full((1,), 4.0)}}
    dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    assert digest(state) == digest({"a": {"w": torch.ones(2), "n": 1, "new": torch.full((1,), 4.0)}})
    with pytest.raises(bcp.CheckpointMismatchError) as raised:
        dcp.load({"a": {"w": torch.zeros(3)}}, checkpoint_id=tmp_path, planner=planner)
    assert raised.value.kind == "shape"


def test_tensors_are_converted_to_the_dtype_of_the_state_as_dcp_does(tmp_path: Path) -> None:
    dcp.save({"w": torch.tensor([1.5, 2.0])}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["w"].dtype == torch.bfloat16
    assert state["w"].tolist() == [1.5, 2.0]


def test_an_existing_checkpoint_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        dcp.save({"n": value}, checkpoint_id=tmp_path)
    state = {"n": 0}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state == {"n": 2}


def test_save_returns_metadata_under_the_names_of_dcp(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(3, 2)}, "groups": [{"lr": 0.1}], "rng": RandomNumbers()}
    found = dcp.save(state, checkpoint_id=tmp_path)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        expected = save_with_torch(state, checkpoint_id=tmp_path / "torch")
    assert type(found) is Metadata
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    assert found.planner_data == expected.planner_data
    assert isinstance(found.state_dict_metadata["groups.0.lr"], BytesStorageMetadata)
    tensor = found.state_dict_metadata["model.w"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert (tensor.size, tensor.chunks) == (torch.Size([3, 2]), expected.state_dict_metadata["model.w"].chunks)
    assert found.storage_meta is not None
    assert found.storage_meta.save_id == bcp.open(tmp_path).info.save_id


def test_an_asynchronous_save_has_the_state_of_the_call(tmp_path: Path) -> None:
    tensor, notes = torch.ones(1000), {"epoch": 1}
    with before(Seam(commit, "write_files"), lambda: release.wait(30)):
        release = threading.Event()
        future = dcp.async_save({"w": tensor, "notes": notes}, checkpoint_id=tmp_path)
        tensor.zero_()
        notes["epoch"] = 2
        assert isinstance(future, Future)
        assert not future.done()
        assert not future.cancel()
        release.set()
        info = future.result(timeout=30)
    assert wait([future], timeout=30).done == {future}
    assert isinstance(info, bcp.CheckpointInfo)
    state = {"w": torch.zeros(1000), "notes": {"epoch": 0}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert digest(state) == digest({"w": torch.ones(1000), "notes": {"epoch": 1}})


def test_with_a_stager_the_two_completions_come_back(tmp_path: Path) -> None:
    stager = DefaultStager(STAGES_ON)
    for snapshot in ("auto", "copy", "lazy"):
        response = dcp.async_save(
            {"w": torch.ones(3)},
            checkpoint_id=tmp_path / snapshot,
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            options=bcp.SaveOptions(snapshot=snapshot),
        )
        assert isinstance(response, AsyncSaveResponse)
        assert wait([response.staging_completion], timeout=30).not_done == set()
        assert response.staging_completion.result() is None
        assert response.upload_completion.result(timeout=30).path == str(tmp_path / snapshot)
    stager.close()


@pytest.mark.parametrize("timeout", [None, 30])
def test_with_a_stager_the_state_may_change_once_staging_has_ended(tmp_path: Path, timeout: float | None) -> None:
    tensor = torch.ones(1000)
    stager = DefaultStager(STAGES_ON)
    for number in range(2):  # the plan of the second is known, so that the call stages nothing
        response = dcp.async_save({"w": tensor}, checkpoint_id=tmp_path, async_stager=stager)
        assert isinstance(response, AsyncSaveResponse)
        response.staging_completion.result(timeout)
        tensor += 1
        response.upload_completion.result()
        assert bcp.open(tmp_path)["w"][...].tolist() == [number + 1] * 1000


@pytest.mark.parametrize("stager", [DefaultStager(BLOCKS), BlockingAsyncStager(cache_staged_state_dict=True)])
def test_with_a_stager_that_blocks_the_state_may_change_at_once_and_a_future_comes_back(
    tmp_path: Path, stager: AsyncStager
) -> None:
    tensor = torch.ones(1000)
    for number in range(2):  # the plan of the second is known, so that a lazy save would copy later
        future = dcp.async_save({"w": tensor}, checkpoint_id=tmp_path, async_stager=stager)
        tensor += 1
        assert isinstance(future, Future)
        future.result()
        assert bcp.open(tmp_path)["w"][...].tolist() == [number + 1] * 1000


class Replicating(DefaultStager):
    """Stages elsewhere."""


def test_the_calls_take_the_keywords_of_torchs() -> None:
    for ours, theirs in (
        (dcp.save, torch_dcp.save),
        (dcp.async_save, torch_dcp.async_save),
        (dcp.load, torch_dcp.load),
    ):
        given, wanted = (inspect.signature(call).parameters for call in (ours, theirs))
        assert [name for name in given if name in wanted] == list(wanted)
        assert all(given[name].default == wanted[name].default for name in wanted)


def test_a_program_that_names_torchs_classes_changes_the_import_alone(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(
        tmp_path,
        single_file_per_rank=True,
        sync_files=False,
        thread_count=5,
        per_thread_copy_ahead=1,
        cache_staged_state_dict=True,
    )
    assert writer.options.writer_threads == 5
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True, enable_plan_caching=True)
    for value in (1, 2):
        future = dcp.async_save({"n": value}, storage_writer=writer, planner=planner)
        assert isinstance(future, Future)
        future.result()
    state = {"n": 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), planner=dcp.DefaultLoadPlanner())
    assert state == {"n": 2}


def test_a_writer_that_may_not_overwrite_keeps_what_is_there(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path, overwrite=False)
    dcp.save({"n": 1}, storage_writer=writer)
    for options in (None, bcp.SaveOptions()):
        with pytest.raises(bcp.CheckpointExistsError):
            dcp.save({"n": 2}, storage_writer=writer, options=options)
    with (
        pytest.warns(UserWarning, match="torch.distributed is disabled"),
        pytest.raises(torch_dcp.CheckpointException, match="CheckpointExistsError"),
    ):
        torch_dcp.save({"n": 2}, storage_writer=writer)
    assert bcp.load_tree(tmp_path) == {"n": 1}


def test_options_of_a_call_leave_the_keywords_of_the_writer_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bcp.SaveOptions] = []

    def begin_save(*args: Any, options: bcp.SaveOptions, **keywords: Any) -> bcp.SaveHandle:
        used.append(options)
        return storage.begin_save(*args, options=options, **keywords)

    monkeypatch.setattr(calls, "begin_save", begin_save)
    writer = dcp.FileSystemWriter(tmp_path, thread_count=5, overwrite=False)
    dcp.save({"n": 1}, storage_writer=writer, options=bcp.SaveOptions(timeout_s=77, writer_threads=2))
    assert used == [bcp.SaveOptions(timeout_s=77, writer_threads=5, overwrite=False)]
    assert bcp.load_tree(tmp_path) == {"n": 1}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: dcp.FileSystemWriter("x", single_file_per_rank=False), "single_file_per_rank=False .*: files hold"),
        (lambda: dcp.FileSystemWriter("x", _extensions=[1]), "_extensions=.* SaveOptions.codec"),
        (lambda: dcp.FileSystemReader("x", _extension_registry={1}), "_extension_registry="),
        (
            lambda: dcp.async_save({}, checkpoint_id="x", async_stager=Replicating(BLOCKS)),
            "Replicating .* DefaultStager",
        ),
    ],
)
def test_keywords_that_would_change_what_is_saved_are_refused_with_a_reason(make: Any, reason: str) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match=reason) as raised:
        make()
    assert raised.value.kind == "conflict"


@pytest.mark.parametrize("kind", [dcp.FileSystemWriter, dcp.FileSystemReader])
def test_other_keywords_are_no_ones(kind: type) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'threads'"):
        kind("x", threads=1)


def test_a_failed_asynchronous_save_raises_from_its_future_and_else_at_the_next_save(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    with before(Seam(commit, "write_files"), fail):
        seen = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "seen")
        wait([seen])
        with pytest.raises(bcp.CheckpointSaveError, match="the disk is gone"):
            seen.result()
        unseen = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "unseen")
        wait([unseen])
    with pytest.raises(bcp.CheckpointSaveError, match="the disk is gone"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "next")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "next")


class OtherSavePlanner(DefaultSavePlanner):
    """Changes what is saved."""


class OtherLoadPlanner(DefaultLoadPlanner):
    """Changes what is loaded."""


@pytest.mark.parametrize(
    ("call", "arguments", "named"),
    [
        (dcp.save, {"planner": OtherSavePlanner()}, "OtherSavePlanner"),
        (dcp.async_save, {"planner": OtherSavePlanner()}, "OtherSavePlanner"),
        (dcp.load, {"planner": OtherLoadPlanner()}, "OtherLoadPlanner"),
        (dcp.save, {"storage_writer": FileSystemWriter("x")}, "FileSystemWriter"),
        (dcp.async_save, {"storage_writer": FileSystemWriter("x")}, "FileSystemWriter"),
        (dcp.load, {"storage_reader": FileSystemReader("x")}, "FileSystemReader"),
        (dcp.save, {"checkpoint_id": None}, "checkpoint_id"),
        (dcp.load, {"checkpoint_id": None}, "checkpoint_id"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path, call: Any, arguments: dict[str, Any], named: str) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "there")
    with pytest.raises(bcp.CheckpointMismatchError, match=named) as raised:
        call({"w": torch.zeros(3)}, **{"checkpoint_id": tmp_path / "there", **arguments})
    assert raised.value.kind == "conflict"
    assert bcp.open(tmp_path / "there")["w"][...].tolist() == [1, 1, 1]


@pytest.mark.parametrize("arguments", [{"planner": OtherSavePlanner()}, {"on_conflict": "warn"}])
@pytest.mark.parametrize("call", [dcp.save, dcp.async_save])
def test_an_argument_is_refused_before_a_state_dict_is_asked_for(
    tmp_path: Path, call: Any, arguments: dict[str, Any]
) -> None:
    class Gathered(Shown):
        def state_dict(self) -> dict[str, Any]:
            pytest.fail("the model was gathered for a save that is refused")

    with pytest.raises(ValueError, match=r"OtherSavePlanner|on_conflict takes"):
        call({"app": Gathered({})}, checkpoint_id=tmp_path, **arguments)


@pytest.mark.parametrize("is_flat", [True, False])
def test_options_of_the_default_planners_are_taken(tmp_path: Path, is_flat: bool) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=is_flat, flatten_sharded_tensors=is_flat)
    dcp.save({"a": {"w": torch.ones(3)}}, checkpoint_id=tmp_path, planner=planner)
    state = {"a": {"w": torch.zeros(3)}}
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(flatten_state_dict=is_flat))
    assert state["a"]["w"].tolist() == [1, 1, 1]


def test_on_conflict_takes_what_it_says(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'per_rank' or 'error'"):
        dcp.save({"n": 1}, checkpoint_id=tmp_path, on_conflict="rank0")


def test_the_package_of_integrations_imports_no_framework() -> None:
    code = "import sys, bytecheckpoint.integrations; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
