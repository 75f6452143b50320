"""Two workers of Ray Train on this machine: one is killed, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_programs import run_ranks
from torch import nn

import bytecheckpoint as bcp

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]
PROGRAM = Path(__file__).parent / "ray_program.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_train.py"
PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "ray.md"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    run_ranks(PROGRAM, ["--storage", folder, "--report", folder / "report.json"], timeout_s=1500)
    results: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return results


@pytest.mark.parametrize("again", [0, 1], ids=["in a run", "in a run begun anew"])
def test_a_step_reported_twice_is_refused_and_not_deleted_by_ray(runs: dict[str, Any], again: int) -> None:
    error, value = runs["repeated"][again]
    assert "step_00000000 was reported in this run before" in error
    assert value in ([1.0, 2.0], [2.0, 3.0])[again]  # the save went on beside the refusal


def progress(run: dict[str, Any], name: str) -> list[Any]:
    """A value of the training loop on each worker."""
    by_rank = bcp.open(run["checkpoint"]).rank_values("extra_state")
    return [by_rank[rank][name] for rank in range(2)]


@pytest.mark.parametrize("name", ["killed", "resumed"])
def test_a_run_whose_worker_was_killed_or_stopped_gives_the_same_losses_and_parameters(
    runs: dict[str, Any], name: str
) -> None:
    whole, interrupted = (bcp.open(runs[each]["checkpoint"]) for each in ("whole", name))
    assert (Path(runs[name]["checkpoint"]).parent / "hit").exists()
    losses = progress(runs["whole"], "losses")
    assert len(losses[0]) == len(losses[1]) == 10
    assert losses[0] != losses[1]
    assert progress(runs[name], "losses") == losses
    assert runs[name]["metrics"] == runs["whole"]["metrics"]
    assert "data" in interrupted.objects
    assert sorted(interrupted) == sorted(whole)
    for fqn, tensor in whole.items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(interrupted[fqn])), fqn


def test_sigterm_of_one_worker_ends_the_run_with_the_step_saved(runs: dict[str, Any]) -> None:
    stopped = int(Path(runs["stopped"]["checkpoint"]).name.removeprefix("step_"))
    assert stopped in {6, 7}
    assert runs["stopped"]["metrics"]["step"] == stopped
    assert progress(runs["resumed"], "starts") == [[0, stopped + 1]] * 2


def test_the_run_went_on_from_a_checkpoint_and_not_anew(runs: dict[str, Any]) -> None:
    starts = progress(runs["killed"], "starts")[0]
    assert starts[0] == 0
    assert starts[-1] in {2, 4, 6}


@pytest.mark.parametrize("name", ["whole", "killed"])
def test_ray_keeps_as_many_as_it_is_told(runs: dict[str, Any], name: str) -> None:
    newest = Path(runs[name]["checkpoint"])
    assert newest.name == "step_00000009"
    assert bcp.steps(newest.parent) == [7, 9]
    assert sorted(path.name for path in newest.parent.glob("step_*")) == ["step_00000007", "step_00000009"]


def test_ray_keeps_the_best_by_a_metric_and_the_newest(runs: dict[str, Any]) -> None:
    best, newest = (Path(runs["scored"][name]) for name in ("best", "newest"))
    assert (best.name, newest.name) == ("step_00000001", "step_00000003")
    assert bcp.steps(best.parent) == [1, 3]
    assert bcp.load_tree(best)["weight"].tolist() == [3.0] * 4


def test_the_checkpoint_loads_into_a_plain_model(runs: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8))
    bcp.load(runs["whole"]["checkpoint"], {"model": model})
    saved = bcp.open(runs["whole"]["checkpoint"])
    assert torch.equal(model[0].weight, torch.as_tensor(saved["model.0.weight"]))


@dataclass(eq=False)
class Storage:
    """Stands for Ray's object of this name."""

    storage_filesystem: Any
    experiment_fs_path: str


class Reported:
    """Stands for the worker's side of Ray: its storage, and what was reported to it."""

    def __init__(self, root: Path) -> None:
        filesystem = pytest.importorskip("pyarrow.fs").LocalFileSystem()
        self.storage = Storage(filesystem, str(root))
        self.calls: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.kept: list[str] = []
        """Paths that Ray has received and has not deleted."""
        self.num_waits = 0

    def report(self, metrics: dict[str, Any], **arguments: Any) -> None:
        self.calls.append((metrics, arguments))

    def all_kept(self, **_: Any) -> list[SimpleNamespace]:
        self.num_waits += 1
        return [SimpleNamespace(checkpoint=SimpleNamespace(path=path)) for path in self.kept]

    def upload(self) -> Callable[[], Any]:
        arguments = self.calls[-1][1]
        return lambda: arguments["checkpoint_upload_fn"](arguments["checkpoint"], "a name of Ray's")


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reported:
    train = pytest.importorskip("ray.train")
    reported = Reported(tmp_path / "run")
    monkeypatch.setattr(train, "report", reported.report)
    monkeypatch.setattr(train, "get_all_reported_checkpoints", reported.all_kept)
    context = SimpleNamespace(get_storage=lambda: reported.storage)
    monkeypatch.setattr(train, "get_context", lambda: context)
    return reported


def test_the_upload_function_may_be_called_again(reported: Reported, tmp_path: Path) -> None:
    from bytecheckpoint.integrations.ray import checkpoint_path, report, run_path

    handle = bcp.save(run_path(), {"weight": torch.arange(3)}, step=4, async_save=True)
    report({"loss": 1.0}, handle)
    found = reported.upload()()
    assert bcp.load_tree(checkpoint_path(found))["weight"].tolist() == [0, 1, 2]
    assert reported.upload()() == found
    assert found.path == str(tmp_path / "run" / "step_00000004")


def test_the_upload_function_waits_for_the_commit(reported: Reported) -> None:
    from bytecheckpoint.integrations.ray import report, run_path

    outcome: Future[None] = Future()
    handle: Any = SimpleNamespace(_progress=SimpleNamespace(path=f"{run_path()}/step_1"), result=outcome.result)
    report({}, handle)
    assert reported.calls[-1][1]["checkpoint_upload_mode"].name == "ASYNC"
    outcome.set_exception(bcp.CheckpointSaveError("the disk is full", kind="no_space"))
    for _ in range(2):
        with pytest.raises(bcp.CheckpointSaveError, match="the disk is full"):
            reported.upload()()


def test_metrics_alone_are_reported_as_they_are(reported: Reported) -> None:
    from bytecheckpoint.integrations.ray import report

    report({"loss": 1.0}, validation=True)
    assert reported.calls == [({"loss": 1.0}, {"validation": True})]


def test_a_checkpoint_outside_of_the_run_is_refused(reported: Reported, tmp_path: Path) -> None:
    from bytecheckpoint.integrations.ray import report

    handle = bcp.save(tmp_path / "elsewhere", {"weight": torch.arange(3)})
    with pytest.raises(ValueError, match=r"elsewhere is not below .*run, .* save to .*run_path"):
        report({}, handle)
    assert reported.calls == []


def test_a_path_is_refused_while_ray_keeps_an_older_report_of_it(reported: Reported) -> None:
    from bytecheckpoint.integrations.ray import report, run_path

    def report_step(step: int) -> None:
        options = bcp.SaveOptions(overwrite=True)
        report({}, bcp.save(run_path(), {"weight": torch.arange(3)}, step=step, options=options))

    reported.kept = [f"{run_path()}/step_00000009"]  # of the same run, before this worker
    for step in range(3):
        report_step(step)
    assert reported.num_waits == 1
    with pytest.raises(ValueError, match=r"step_00000009 was reported in this run before.*nothing was reported"):
        report_step(9)
    reported.kept = [f"{run_path()}/step_00000002"]
    report_step(9)
    report_step(0)
    with pytest.raises(ValueError, match="step_00000002 was reported"):
        report_step(2)
    assert len(reported.calls) == 5


def test_arguments_about_the_upload_are_refused(reported: Reported) -> None:
    from bytecheckpoint.integrations.ray import report, run_path

    handle = bcp.save(run_path(), {"weight": torch.arange(3)})
    with pytest.raises(ValueError, match="leave out checkpoint_upload_mode"):
        report({}, handle, checkpoint_upload_mode="SYNC")
    assert reported.calls == []


def test_a_filesystem_without_a_url_is_refused(reported: Reported) -> None:
    from bytecheckpoint.integrations.ray import run_path

    reported.storage.storage_filesystem = SimpleNamespace(type_name="mock")
    with pytest.raises(ValueError, match="is a mock filesystem"):
        run_path()
    reported.storage.storage_filesystem = SimpleNamespace(type_name="s3")
    reported.storage.experiment_fs_path = "bucket/run"
    assert run_path() == "s3://bucket/run"


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80


def test_the_block_of_the_page_runs(reported: Reported, monkeypatch: pytest.MonkeyPatch) -> None:
    train = pytest.importorskip("ray.train")
    found: list[Any] = [None]
    monkeypatch.setattr(train, "get_checkpoint", lambda: found[0])

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"ray": pytest.importorskip("ray"), "build": build, "train_one_step": lambda *_: 0.5}
    exec(compile(block, str(PAGE), "exec"), names)
    names["train"]({"steps": 2})
    found[0] = reported.upload()()
    names["train"]({"steps": 3})
    assert [metrics for metrics, _ in reported.calls] == [{"loss": 0.5}] * 3
    assert reported.upload()().path.endswith("step_00000002")


def test_a_forked_child_of_a_worker_does_not_outlive_sigterm() -> None:
    from bytecheckpoint.integrations.ray import _WorkerSignal

    old = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        handler = _WorkerSignal()
        handler.stop = SimpleNamespace(request=lambda _: None)  # as that of a worker that trains
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writable, b"1")
            time.sleep(60)
            os._exit(0)
        os.read(readable, 1)  # Python forgets a signal that comes before the child's first line
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert os.WTERMSIG(status) == signal.SIGTERM
