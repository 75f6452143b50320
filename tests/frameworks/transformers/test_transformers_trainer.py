"""Hugging Face's Trainer with the mixin, in one process."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_programs import run_ranks

import bytecheckpoint as bcp

transformers = pytest.importorskip("transformers")

from bytecheckpoint.integrations.transformers import BcpTrainerMixin, last_checkpoint  # noqa: E402
from bytecheckpoint.integrations.transformers import folders as folders_module  # noqa: E402
from bytecheckpoint.integrations.transformers.saves import Limit, TrainerSaves  # noqa: E402
from bytecheckpoint.integrations.transformers.train_loader import PassOrder  # noqa: E402
from bytecheckpoint.storage import layout  # noqa: E402
from bytecheckpoint.storage.paths import temporary_name  # noqa: E402
from bytecheckpoint.tools.analysis.diagnosis.checkpoint_diagnosis import diagnose  # noqa: E402
from frameworks.going_on import go_on  # noqa: E402
from frameworks.transformers.trainer_runs import (  # noqa: E402
    AtStep,
    BcpTrainer,
    are_equal,
    folders,
    losses,
    parameters,
    small_model,
    terminate,
    trainer,
    wait_for_commit,
)

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]  # of the packages


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of 10 steps with the Trainer's own checkpoints left out."""
    run = trainer(tmp_path_factory.mktemp("uninterrupted"), kind=transformers.Trainer, save_strategy="no")
    run.train()
    return run


def is_same_run(resumed: Any, whole: Any) -> bool:
    """Both ended with the same parameters, bit for bit, and the same losses at all steps."""
    return are_equal(parameters(resumed), parameters(whole)) and losses(resumed) == losses(whole)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, uninterrupted: Any) -> None:
    program = Path(__file__).with_name("killed_run.py")
    run_ranks(program, [tmp_path], exit_codes=[-signal.SIGKILL], environment={"PYTHONPATH": "tests"})
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert is_same_run(resumed, uninterrupted)


@pytest.mark.parametrize("step", [4, 6], ids=["in the middle of an epoch", "at the end of an epoch"])
def test_a_run_goes_on_from_a_given_path(tmp_path: Path, uninterrupted: Any, step: int) -> None:
    first = trainer(tmp_path)
    first.train()
    assert is_same_run(first, uninterrupted)
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert is_same_run(resumed, uninterrupted)


def test_loads_have_the_timeout_of_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []
    load = bcp.api.load

    def noting(*given: Any, options: bcp.LoadOptions | None = None, **named: Any) -> Any:
        timeouts.append((options or bcp.LoadOptions()).timeout_s)
        return load(*given, options=options, **named)

    monkeypatch.setattr(bcp.api, "load", noting)
    monkeypatch.setattr(BcpTrainer, "bcp_options", bcp.SaveOptions(timeout_s=77))
    trainer(tmp_path, max_steps=4, **BEST).train()
    assert timeouts == [77]  # the best model
    trainer(tmp_path, max_steps=6, **BEST).train(resume_from_checkpoint=True)
    assert timeouts == [77, 77, 77]


def test_gradient_accumulation_and_epochs_go_on(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_strategy": "epoch",
        "lr_scheduler_type": "cosine",
    }
    whole = trainer(tmp_path, **given)
    whole.train()
    assert folders(tmp_path) == ["checkpoint-12", "checkpoint-6"]
    resumed = trainer(tmp_path, **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert is_same_run(resumed, whole)


@pytest.mark.parametrize("step", [4, 6, 8], ids=["first epoch", "between", "second epoch"])
def test_an_order_that_a_sampler_draws_from_the_random_state_goes_on(tmp_path: Path, step: int) -> None:
    whole = trainer(tmp_path, train_sampling_strategy="group_by_length")
    whole.train()
    resumed = trainer(tmp_path, train_sampling_strategy="group_by_length")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert is_same_run(resumed, whole)


def test_such_an_order_goes_on_in_a_pass_that_began_at_a_folder_of_the_trainer(tmp_path: Path) -> None:
    sampling = {"train_sampling_strategy": "group_by_length"}
    trainer(tmp_path, kind=transformers.Trainer, max_steps=6, **sampling).train()
    whole = trainer(tmp_path, **sampling)
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    resumed = trainer(tmp_path, **sampling)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert is_same_run(resumed, whole)


def test_the_order_of_a_pass_leaves_the_random_numbers_of_a_rank_that_has_none_saved() -> None:
    torch.manual_seed(1)
    order = PassOrder()
    torch.manual_seed(2)
    order.restore()
    assert torch.initial_seed() == 1
    order.put_back()
    assert torch.initial_seed() == 2
    torch.manual_seed(3)
    order.put_back()
    assert torch.initial_seed() == 3


def test_a_checkpoint_is_complete_and_loads_without_the_trainer(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=2)
    run.train()
    folder = tmp_path / "checkpoint-2"
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    model = small_model()
    bcp.load(folder, {"model": model})
    assert are_equal(dict(model.named_parameters()), parameters(run))
    top_level = {name.partition(".")[0] for name in bcp.open(folder)}
    assert {"model", "optimizer"} <= top_level


def test_the_final_model_loads_with_from_pretrained(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=2)
    run.train()
    run.save_model()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert are_equal(dict(loaded.named_parameters()), parameters(run))


@pytest.mark.parametrize("is_async", [True, False])
def test_saves_are_committed_when_train_returns(tmp_path: Path, *, is_async: bool) -> None:
    run = trainer(tmp_path)
    run.bcp_async_save = is_async
    run.train()
    assert all((tmp_path / name / "manifest.bcp").exists() for name in folders(tmp_path))
    assert len(folders(tmp_path)) == 5


class Failing(BcpTrainer):
    """Its checkpoints cannot be written: there is a file where the folder of data has to be."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step == 4:
            folder = Path(self.args.output_dir, "checkpoint-4")
            folder.mkdir()
            (folder / "data").write_text("in the way")
        super()._save_checkpoint(model, trial)


@pytest.mark.parametrize("max_steps", [4, 10], ids=["the last save", "one in the middle"])
def test_a_save_that_failed_is_raised_by_train(tmp_path: Path, max_steps: int) -> None:
    with pytest.raises(bcp.CheckpointError):
        trainer(tmp_path, kind=Failing, max_steps=max_steps).train()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


def test_training_again_after_an_exception_waits_for_the_save_in_flight_and_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_commit, commit, finish = threading.Event(), layout.commit, TrainerSaves.finish

    def commit_when_awaited(store: Any, *given: Any, **named: Any) -> Any:
        assert not str(store).endswith("checkpoint-4") or may_commit.wait(60)
        return commit(store, *given, **named)

    def finish_awaited(saves: TrainerSaves) -> None:
        may_commit.set()
        finish(saves)

    monkeypatch.setattr(layout, "commit", commit_when_awaited)
    monkeypatch.setattr(TrainerSaves, "finish", finish_awaited)

    interrupts = [KeyboardInterrupt]

    def interrupt() -> None:
        if interrupts:
            raise interrupts.pop()

    run = trainer(tmp_path, save_total_limit=1, at_step={5: interrupt})
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train(resume_from_checkpoint=True)
    assert run._bcp_resume.path == str(tmp_path / "checkpoint-4")
    assert folders(tmp_path) == ["checkpoint-10"]


def test_as_many_committed_checkpoints_stay_as_save_total_limit_says(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1" / "data").mkdir(parents=True)  # of a save that died: it does not count
    trainer(tmp_path, save_total_limit=2).train()
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-10", "checkpoint-8"]


def test_files_of_others_in_a_folder_stay_when_its_checkpoint_is_deleted(tmp_path: Path) -> None:
    class Noting(BcpTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "note.txt").write_text("mine")

    trainer(tmp_path, kind=Noting, save_total_limit=1, max_steps=4).train()
    assert [path.name for path in (tmp_path / "checkpoint-2").iterdir()] == ["note.txt"]
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


class Scored(BcpTrainer):
    """Its evaluations give these losses, after a real evaluation."""

    scores = (1.0, 0.5, 2.0, 3.0, 4.0)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        return metrics | {"eval_loss": self.scores[self.state.global_step // 2 - 1]}


BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


@pytest.mark.parametrize(("limit", "left"), [(2, ["checkpoint-10", "checkpoint-4"]), (1, ["checkpoint-4"])])
def test_the_best_checkpoint_stays_and_is_loaded_at_the_end(tmp_path: Path, limit: int, left: list[str]) -> None:
    parameters_at: dict[int, Any] = {}
    run = trainer(tmp_path, kind=Scored, save_total_limit=limit, **BEST)
    for step in (4, 10):
        run.add_callback(AtStep(step, lambda step=step: parameters_at.update({step: parameters(run)})))
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert folders(tmp_path) == left
    assert are_equal(parameters(run), parameters_at[4])
    assert not are_equal(parameters(run), parameters_at[10])


def test_the_best_checkpoint_is_known_after_a_resume(tmp_path: Path) -> None:
    trainer(tmp_path, kind=Scored, save_total_limit=2, at_step={7: terminate}, **BEST).train()
    resumed = trainer(tmp_path, kind=Scored, save_total_limit=2, **BEST)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert folders(tmp_path) == ["checkpoint-10", "checkpoint-4"]


def test_a_preempted_run_saves_ends_and_goes_on(tmp_path: Path, uninterrupted: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    first = trainer(tmp_path, at_step={5: terminate})
    first.train()
    assert (first.bcp_stop_reason, first.state.global_step) == ("SIGTERM", 5)
    assert signal.getsignal(signal.SIGTERM) == before
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.bcp_stop_reason == ""
    assert is_same_run(resumed, uninterrupted)


def test_a_run_that_was_stopped_after_its_last_step_takes_no_step_more(tmp_path: Path, uninterrupted: Any) -> None:
    first = trainer(tmp_path, at_step={10: terminate})
    first.train()
    assert (first.bcp_stop_reason, first.state.global_step) == ("SIGTERM", 10)
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 10
    assert is_same_run(resumed, uninterrupted)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_a_stop_does_not_delete_its_own_checkpoint_in_favour_of_the_best(tmp_path: Path) -> None:
    run = trainer(tmp_path, kind=Scored, save_total_limit=1, at_step={7: terminate}, **BEST)
    run.train()
    assert folders(tmp_path) == ["checkpoint-4", "checkpoint-7"]
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-7")


def test_nothing_is_deleted_in_favour_of_a_best_checkpoint_that_another_folder_has(tmp_path: Path) -> None:
    trainer(tmp_path / "old", kind=Scored, save_total_limit=1, at_step={7: terminate}, **BEST).train()
    shutil.copytree(tmp_path / "old" / "checkpoint-7", tmp_path / "new" / "checkpoint-7")
    moved = trainer(tmp_path / "new", kind=Scored, save_total_limit=1, **BEST)
    moved.train(resume_from_checkpoint=True)
    assert moved.state.best_model_checkpoint == str(tmp_path / "old" / "checkpoint-4")
    assert last_checkpoint(tmp_path / "new") == str(tmp_path / "new" / "checkpoint-10")


def test_the_flag_of_the_trainer_for_preemption_is_taken_over(tmp_path: Path) -> None:
    run = trainer(tmp_path, enable_jit_checkpoint=True, save_strategy="no", at_step={3: terminate})
    run.train()
    assert (folders(tmp_path), run.bcp_stop_reason) == (["checkpoint-3"], "SIGTERM")


def test_a_callback_can_request_a_stop(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="no")
    run.add_callback(AtStep(4, lambda: run.bcp_request_stop("spot notice")))
    run.train()
    assert (folders(tmp_path), run.bcp_stop_reason) == (["checkpoint-4"], "spot notice")


def test_resuming_goes_by_commits_and_not_by_the_highest_number(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=8).train()
    # Training goes back to step 2, and is stopped at 4: step 8 belongs to what it left.
    again = trainer(tmp_path, at_step={4: terminate})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-9" / "data").mkdir(parents=True)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert bcp.open(tmp_path / "checkpoint-4").metadata["trainer"]["sequence"] == 4
    assert bcp.open(tmp_path / "checkpoint-6").metadata["trainer"]["sequence"] == 5


def test_checkpoints_that_training_left_go_first(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=8).train()
    again = trainer(tmp_path, max_steps=4, save_total_limit=3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-8"]


def test_the_newest_stays_where_deletions_after_an_earlier_save_are_late(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=6, save_steps=2).train()
    saves = TrainerSaves(str(tmp_path), resumed="", timeout_s=60)
    limit = Limit(num_kept=1, best=str(tmp_path / "checkpoint-2"))
    assert [folder.number for folder in saves._beyond(limit, str(tmp_path / "checkpoint-4"))] == []
    assert [folder.number for folder in saves._beyond(limit, str(tmp_path / "checkpoint-6"))] == [4]
    saves.close()


def test_a_checkpoint_that_was_to_go_stays_once_it_is_saved_again(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=8).train()
    again = trainer(tmp_path, max_steps=8, save_total_limit=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-8"]
    for name in folders(tmp_path):
        assert {"config.json", "trainer_state.json"} <= {path.name for path in (tmp_path / name).iterdir()}
    resumed = trainer(tmp_path, max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert are_equal(parameters(resumed), parameters(again))


def test_resuming_without_a_committed_checkpoint_names_the_incomplete_ones(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2" / "data").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"No valid checkpoint found in output directory.*checkpoint-2"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_fresh_start_beside_checkpoints_that_cannot_be_taken_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert last_checkpoint(tmp_path) is None
    assert not caplog.records
    (tmp_path / "checkpoint-2" / "data").mkdir(parents=True)
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path) is None
    assert all(f"checkpoint-{step}" in caplog.text for step in (2, 4))


def test_an_incomplete_checkpoint_is_refused_and_no_other_one_taken(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=4).train()
    (tmp_path / "checkpoint-4" / "manifest.bcp").unlink()
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"checkpoint-4 is not committed.*checkpoint-2") as refused:
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert refused.value.kind == "not_committed"
    with pytest.raises(bcp.CheckpointNotFoundError, match="there is no folder"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-40"))


def test_a_run_of_the_trainer_itself_goes_on_with_the_mixin(tmp_path: Path, uninterrupted: Any) -> None:
    trainer(tmp_path, kind=transformers.Trainer).train()
    for number in (6, 8, 10):
        shutil.rmtree(tmp_path / f"checkpoint-{number}")
    with pytest.raises(ValueError, match=r"the Trainer itself wrote .*checkpoint-4"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert are_equal(parameters(resumed), parameters(uninterrupted))


def test_only_the_model_is_saved_if_the_arguments_say_so(tmp_path: Path) -> None:
    first = trainer(tmp_path, max_steps=4, save_only_model=True)
    first.train()
    assert bcp.open(tmp_path / "checkpoint-4").metadata["trainer"]["entries"] == ["model"]
    resumed = trainer(tmp_path, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert sorted(losses(resumed)) == [1, 2, 3, 4, 5, 6]


def test_uploads_of_checkpoints_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"call trainer\.push_to_hub\(\) after train"):
        trainer(tmp_path, push_to_hub=True)


def test_an_output_folder_that_is_a_url_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/run", "file:///bucket/run", "s3:/bucket/run"):
        with pytest.raises(ValueError, match=r"output_dir is the URL .*bucket/run.*give a folder"):
            trainer(tmp_path, output_dir=url)
    assert list(tmp_path.iterdir()) == []


class UnderDeepSpeed(BcpTrainer):
    """A Trainer whose accelerate runs DeepSpeed, as it says itself: that package is not in this environment."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_deepspeed_enabled = True


def test_deepspeed_under_the_trainer_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bytecheckpoint\.integrations\.deepspeed"):
        trainer(tmp_path, kind=UnderDeepSpeed)


def test_another_dtype_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    other = trainer(tmp_path, model=small_model().bfloat16(), max_steps=4)
    before = parameters(other)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"dtype.*nothing was loaded"):
        other.train(resume_from_checkpoint=True)
    assert are_equal(parameters(other), before)


def test_a_checkpoint_of_another_optimizer_is_refused_before_training(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    resumed = trainer(tmp_path, optim="adafactor")  # that of transformers
    with pytest.raises(bcp.CheckpointMismatchError, match="another kind of optimizer"):
        resumed.train(resume_from_checkpoint=True)


def test_a_save_of_a_subclass_that_is_not_called_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Averaging(transformers.Trainer):
        def _save_checkpoint(self, *_: Any) -> None:
            raise AssertionError

    class OfLibrary(transformers.Trainer):
        __module__ = "trl.trainer.sft_trainer"  # adds a model card, and users cannot move that

        def _save_checkpoint(self, *_: Any) -> None:
            raise AssertionError

    for theirs in (Averaging, Averaging, OfLibrary):
        trainer(tmp_path, kind=type("Mine", (BcpTrainerMixin, theirs), {}), max_steps=2).train()
    warned = [each.getMessage() for each in caplog.records if "is not called" in each.getMessage()]
    assert [text.split()[0] for text in warned] == ["Averaging._save_checkpoint"]  # once in a process


def test_training_leaves_no_thread_that_deletes(tmp_path: Path) -> None:
    before = threading.enumerate()  # training that failed in other tests leaves some
    trainer(tmp_path, save_total_limit=1).train()
    threads = [each for each in threading.enumerate() if each.name == "bcp-retention" and each not in before]
    for each in threads:
        each.join(30)
    assert folders(tmp_path) == ["checkpoint-10"]
    assert not any(each.is_alive() for each in threads)


def test_doctor_says_what_a_folder_of_the_trainer_is_and_its_line_loads_the_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=2)
    run.train()
    found = diagnose(str(tmp_path / "checkpoint-2"), {})
    assert {part.name for part in found.parts} == {"model", "optimizer", "scheduler", "rng", "order"}
    (alone,) = (code for code in found.code if code.does == "load the model alone")
    names: dict[str, Any] = {"bcp": bcp, "model": small_model()}
    exec("\n".join(alone.lines), names)
    assert are_equal(dict(names["model"].named_parameters()), parameters(run))
    again = trainer(tmp_path, max_steps=3)
    go_on(tmp_path / "checkpoint-2", "the Trainer of transformers", trainer=again)
    assert again.state.global_step == 3
    beside = diagnose(str(tmp_path), {})
    assert [(Path(each.path).name, each.committed) for each in beside.neighbours] == [
        ("checkpoint-2", True),
        ("checkpoint-3", True),
    ]


def test_a_lost_trainer_state_comes_back_from_the_checkpoint(tmp_path: Path, uninterrupted: Any) -> None:
    trainer(tmp_path, at_step={4: terminate}).train()
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert is_same_run(resumed, uninterrupted)


def test_a_model_is_loaded_for_evaluation_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=2)
    run.train()
    other = trainer(tmp_path / "other", model=transformers.GPT2LMHeadModel(small_model().config))
    other._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert are_equal(parameters(other), parameters(run))


def test_a_step_that_is_saved_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=4).train()
    ids = bcp.open(tmp_path / "checkpoint-4").info.save_id
    again = trainer(tmp_path, max_steps=4, learning_rate=2e-2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert bcp.open(tmp_path / "checkpoint-4").info.save_id != ids
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["log_history"] == again.state.log_history[: len(state["log_history"])]
    model = small_model()
    bcp.load(tmp_path / "checkpoint-4", {"model": model})
    assert are_equal(dict(model.named_parameters()), parameters(again))


def test_a_folder_of_a_killed_deletion_is_cleared(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    folder = tmp_path / "checkpoint-2"
    save_id = bcp.open(folder).info.save_id
    names = [f"data/{path.name}" for path in (folder / "data").iterdir()]
    journal = folder / "manager" / "deleting" / f"root-{save_id}.json"
    journal.parent.mkdir(parents=True)
    journal.write_text(json.dumps({"folder": "", "save_id": save_id, "names": names}))
    (folder / "manifest.bcp").unlink()
    shutil.rmtree(folder / "telemetry")
    trainer(tmp_path, max_steps=4, save_steps=4).train()
    assert folders(tmp_path) == ["checkpoint-4"]


def test_a_folder_goes_with_a_file_that_a_killed_process_has_not_written_whole(tmp_path: Path) -> None:
    def leave() -> None:
        (tmp_path / "checkpoint-2" / temporary_name("trainer_state.json")).write_text("{")

    trainer(tmp_path, save_total_limit=1, max_steps=4, at_step={3: leave}).train()
    assert folders(tmp_path) == ["checkpoint-4"]


def test_a_file_that_is_gone_meanwhile_keeps_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, left = tmp_path / "config.json", tmp_path / "trainer_state.json"
    left.write_text("{}")
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([gone, left]))
    folders_module._remove_beside(str(tmp_path))
    assert not left.exists()


def test_parameters_are_those_of_the_save_and_not_of_later_steps(tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}
    run = trainer(tmp_path)
    run.add_callback(AtStep(6, lambda: kept.update(parameters(run))))
    run.train()
    wait_for_commit(tmp_path / "checkpoint-6")
    model = small_model()
    bcp.load(tmp_path / "checkpoint-6", {"model": model})
    assert are_equal(dict(model.named_parameters()), kept)


def test_evaluations_beside_saves_do_not_change_a_resumed_run(tmp_path: Path) -> None:
    whole = trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    whole.train()
    resumed = trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert is_same_run(resumed, whole)
    evaluated = [each["eval_loss"] for each in resumed.state.log_history if "eval_loss" in each]
    assert evaluated == [each["eval_loss"] for each in whole.state.log_history if "eval_loss" in each]


def test_the_scale_of_gradients_goes_on(tmp_path: Path) -> None:
    first = trainer(tmp_path, max_steps=4)
    first.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    first.train()
    resumed = trainer(tmp_path, max_steps=4)
    resumed.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.accelerator.scaler.get_scale() == first.accelerator.scaler.get_scale() == 16.0


@pytest.mark.parametrize("wanted", ["newest", "given"])
def test_a_damaged_neighbour_does_not_stop_a_run_and_stays(
    tmp_path: Path, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, max_steps=6).train()
    (tmp_path / "checkpoint-6" / "manifest.bcp").write_bytes(b"damaged")
    run = trainer(tmp_path, max_steps=8, save_steps=4, save_total_limit=1)
    with pytest.raises(bcp.CheckpointCorruptError):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    run.train(resume_from_checkpoint=True if wanted == "newest" else str(tmp_path / "checkpoint-4"))
    assert run._bcp_resume.path == str(tmp_path / "checkpoint-4")
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-8"]
    assert "checkpoint-6 is passed over" in caplog.text
