"""Arguments of the manager: wrong ones are refused with what to pass, and on several ranks all raise the same."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import api, keep_policies, save_policies
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, StorageError
from bytecheckpoint.manager.agreement.memory_steps import with_memory
from distributed.workers import WorkerPool

EVERY = save_policies.EverySteps(1)


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save": keep_policies.Latest(3)}, r"save takes a save policy, .* not Latest\(3\): .* pass it as keep="),
        ({"save": save_policies.Preempted}, "save takes a save policy, .* this is the class; call it"),
        ({"save": 500}, r"save takes a save policy, such as bcp.save_policies.EverySteps\(500\), not 500$"),
        (
            {"keep": save_policies.EverySteps(3)},
            r"keep takes a keep policy, .* not EverySteps\(3\): .* pass it as save=",
        ),
        ({"keep": keep_policies.All}, "keep takes a keep policy, .* this is the class; call it"),
        ({"keep": None}, "keep takes a keep policy, .* not None"),
        ({"options": bcp.SaveOptions()}, r"options takes ManagerOptions, .* ManagerOptions\(save="),
    ],
)
def test_what_is_no_policy_and_no_options_is_refused_with_what_to_pass(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        bcp.CheckpointManager(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def threads_of_managers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bcp-manager"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"memory_every": 0}, ValueError),
        ({"memory_every": 5}, ValueError),
        ({"memory_every": "often"}, TypeError),
        ({"memory": bcp.Memory(), "memory_every": save_policies.EverySteps}, TypeError),
        ({"options": bcp.ManagerOptions(cool_down="nosuch://bucket/run")}, StorageError),
    ],
    ids=["no step", "without memory", "no policy", "class of a policy", "second root"],
)
def test_what_is_refused_claims_nothing_and_starts_nothing(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        managers = threads_of_managers()
        with pytest.raises(error):
            bcp.CheckpointManager(tmp_path, **arguments)
        assert set(threads_of_managers()) <= set(managers)  # those of earlier managers may just have ended
        manager.save(1, state_at(1))
    assert bcp.steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cool_down", 5),
        ("cool_down", ""),
        ("cool_down_keep", keep_policies.All),
        ("cool_down_keep", EVERY),
        ("on_failed_save", []),
        ("signals", [["SIGTERM"]]),
        ("signals", ["SIGKILL"]),
        ("signals", "SIGTERM"),
        ("max_failed_saves", True),
    ],
)
def test_an_option_that_is_none_is_refused_with_its_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"ManagerOptions\.{name} takes"):
        bcp.ManagerOptions(**{name: value})  # type: ignore[arg-type]


def test_a_signal_that_no_process_can_catch_is_refused_for_that_reason() -> None:
    with pytest.raises(ValueError, match=r"signals that can be caught, .*, not \('SIGKILL',\)"):
        bcp.ManagerOptions(signals=("SIGKILL",))


def test_without_policies_a_manager_saves_often_and_keeps_all(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path) as manager:
        assert [step for step in (1, 499, 500, 501) if manager.due(step)] == [500]
        for step in (500, 1000, 1500, 2000, 2500):
            manager.save(step, state_at(step))
    assert bcp.steps(tmp_path) == [500, 1000, 1500, 2000, 2500]


def test_steps_are_integers_of_any_kind_and_nothing_else(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(np.int64(3), state_at(3))
        manager.pin(np.int64(3))
        restored = state_at(0)
        report = manager.restore(restored, step=np.int64(3))
        assert report is not None
        assert (report.step, manager.next_step, restored["weight"][0].item()) == (3, 4, 3.0)
        assert type(manager.next_step) is int
        for wrong in (True, -1, None, 3.0, "3", "newest"):
            for call in (
                manager.due,
                lambda step: manager.save(step, restored),
                manager.pin,
                lambda step: manager.restore(restored, step=step),
            ):
                with pytest.raises(CheckpointMismatchError, match="step") as raised:
                    call(wrong)  # type: ignore[operator]
                assert isinstance(raised.value, ValueError)
                assert f"and not {wrong!r}; nothing was changed" in str(raised.value)
        with pytest.raises(CheckpointNotFoundError):
            manager.restore(restored, step=7)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, True, "100", None])
def test_a_lease_is_for_a_number_of_seconds(tmp_path: Path, seconds: Any) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(1, state_at(1))
        with pytest.raises(CheckpointMismatchError, match=r"lease\(step, seconds\) takes a number of seconds above 0"):
            manager.lease(1, seconds)
    assert not (tmp_path / "step_00000001" / "leases").exists()


def test_a_manager_that_only_reads_has_nothing_due(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY, options=bcp.ManagerOptions(read_only=True)) as reader:
        assert not reader.due(1)
        assert reader.save(1, state_at(1), force=True) is None
        reader.request_stop("maintenance")
        assert not reader.due(2)
        assert reader.save(2, state_at(2)) is None
        assert reader.should_stop()


def raised_by_marks(rank: int, world_size: int, path: str) -> list[str]:
    """Returns the errors of calls that are wrong on rank 0, or on all ranks."""
    is_first = rank == 0
    errors = []
    with bcp.CheckpointManager(path, save=EVERY) as manager:
        manager.save(1, state_at(1))
        for call in (
            lambda: manager.pin(7),
            lambda: manager.lease(1, -1 if is_first else 5),
            lambda: manager.report(1, {"loss": "low" if is_first else 0.5}),
            lambda: manager.report(7, {"loss": 0.5}),
            lambda: manager.save(2, state_at(2), metrics={"loss": "low" if is_first else 0.5}),
            lambda: manager.save(2, state_at(2), metadata=None if is_first else {"metrics": 1}),
        ):
            with pytest.raises(CheckpointError) as raised:
                call()
            errors.append(f"{type(raised.value).__name__}: {raised.value}")
        manager.save(3, state_at(3), metrics={"loss": 0.5} if is_first else {"loss": "not looked at"})
        manager.pin(3)
        manager.report(3, {"loss": 0.25} if is_first else {})
        manager.wait()
    return errors


def test_what_is_wrong_on_rank_0_is_raised_by_all_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    first, second = workers.run(raised_by_marks, str(tmp_path), world_size=2)
    assert first == second
    no_step, seconds, metric, no_step_again, metric_of_save, metadata = first
    assert no_step.startswith("CheckpointNotFoundError")
    assert no_step_again.startswith("CheckpointNotFoundError")
    assert seconds.startswith("CheckpointMismatchError: lease(step, seconds) takes")
    assert metric.startswith("CheckpointMismatchError: metrics are numbers by name")
    assert metric_of_save.startswith("CheckpointMismatchError: metrics are numbers by name")
    assert metadata.startswith("CheckpointMismatchError: rank 1 on")
    assert bcp.steps(tmp_path) == [1, 3]
    with bcp.CheckpointManager(tmp_path, save=EVERY, keep=keep_policies.Latest(1)) as manager:
        best = manager.best("loss")
        assert best is not None
        assert (best.step, best.metrics) == (3, {"loss": 0.25})
        manager.save(4, state_at(4))
    assert bcp.steps(tmp_path) == [3, 4]


@pytest.mark.parametrize("number", [np.float32(120), np.float64(120), np.int64(120), np.uint8(120)])
def test_numbers_of_numpy_count_as_numbers(tmp_path: Path, number: Any) -> None:
    for policy in (
        save_policies.EverySeconds(number),
        save_policies.Continuous(number),
        keep_policies.EverySeconds(number),
        keep_policies.Within(number),
    ):
        assert repr(policy) in {
            f"{type(policy).__name__}{end}" for end in ("(120)", "(120.0)", "(minimum_s=120.0)")
        } | {"Continuous(minimum_s=120)"}
    assert save_policies.Overhead(number / np.float32(1024)).fraction == 120 / 1024
    deadline = save_policies.Deadline(number, number)
    assert (deadline.at_s, type(deadline.at_s), deadline.margin_s) == (120.0, float, 120)
    assert bcp.ManagerOptions(max_failed_saves=np.int64(2)).max_failed_saves == 2
    every_second: Any = np.int64(2)
    assert with_memory(bcp.ManagerOptions(), bcp.Memory(), every_second)[1] == save_policies.EverySteps(2)
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(np.int32(1), state_at(1))
        manager.lease(1, number)
        manager.request_stop("spot", deadline_s=number)
        assert manager._requests.reason == ""
        manager.request_stop("spot", deadline_s=number - number)
        assert manager._requests.reason == "spot"
        with pytest.raises(ValueError, match="deadline_s takes"):
            manager.request_stop("spot", deadline_s=np.float32("nan"))


def test_seconds_of_single_precision_are_taken(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.request_stop("spot", deadline_s=np.float32(1000))
        assert 990 < manager._requests._deadlines[-1][1] - time.monotonic() <= 1000


@pytest.mark.parametrize(
    "join",
    [
        lambda: save_policies.EverySteps(5) | save_policies.Preempted,
        lambda: save_policies.Preempted | save_policies.EverySteps(5),
        lambda: save_policies.EverySteps(5) & save_policies.First,
        lambda: save_policies.First & save_policies.EverySteps(5),
        lambda: keep_policies.Latest(1) | keep_policies.All,
        lambda: keep_policies.All | keep_policies.Latest(1),
    ],
)
def test_a_class_of_policies_is_refused_when_it_is_joined(join: Any) -> None:
    with pytest.raises(ValueError, match="is the class of one: call it"):
        join()


def test_two_classes_that_are_joined_are_refused_when_a_manager_gets_them(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="save takes a save policy"):
        bcp.CheckpointManager(tmp_path, save=save_policies.First | save_policies.Preempted)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cool_down_keep takes a keep policy"):
        bcp.ManagerOptions(cool_down_keep=keep_policies.All | keep_policies.Latest)  # type: ignore[arg-type]


def test_the_options_of_another_store_are_those_of_initial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], api.load

    def load(path: Any, *arguments: Any, storage_options: Any, **others: Any) -> Any:
        seen.append((Path(path).name, storage_options))
        return real(path, *arguments, storage_options=None, **others)

    bcp.save(tmp_path / "pretrained", state_at(9))
    monkeypatch.setattr(api, "load", load)
    for _ in range(2):  # the same call after a restart, when the root has a checkpoint
        with bcp.CheckpointManager(tmp_path / "run", save=EVERY) as manager:
            manager.restore(state_at(0), initial=tmp_path / "pretrained", storage_options={"key": "another"})
            manager.save(1, state_at(1))
    assert seen == [("pretrained", {"key": "another"}), ("run", None)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"storage_options": {}}, "storage_options of restore are those of initial"),
        ({"process_group": None}, "restore takes no process_group: it is that of the manager"),
        ({"role": "actor"}, "restore takes no role"),
        ({"framework": "fsdp"}, "restore takes no framework"),
    ],
)
def test_an_argument_of_load_that_the_manager_has_is_refused_with_its_place(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(1, state_at(1))
        for _ in range(4):
            with pytest.raises(TypeError, match=message):
                manager.restore(state_at(0), **arguments)
        report = manager.restore(state_at(0))
        assert report is not None
        assert not report.passed_over


def test_the_root_stays_where_it_was_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with bcp.CheckpointManager("run", save=bcp.save_policies.EverySteps(1)) as manager:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        manager.save(1, {"x": torch.ones(3)})
        manager.wait()
        assert manager.latest() == 1
        assert manager.restore({"x": torch.zeros(3)}) is not None
    assert list((tmp_path / "elsewhere").iterdir()) == []
