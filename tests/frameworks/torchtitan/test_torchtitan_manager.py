"""BcpCheckpointManager in the Trainer's call sequence, in one process: retention, initial checkpoints, last ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from click.testing import CliRunner
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

import bytecheckpoint as bcp
from bytecheckpoint.integrations.torchtitan import BcpCheckpointManager
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.tools.main import cli
from frameworks.going_on import line_of
from frameworks.torchtitan import titan_runs

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


class Counter:
    """A state of the user."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run:
    """The parts of a Trainer, and its order of calls."""

    def __init__(self, root: Path, *, seed: int = 0, manager: type = BcpCheckpointManager, **config: Any) -> None:
        spec = titan_runs.config_of(root, titan_runs.Training(name="run"), world_size=1).model_spec
        torch.manual_seed(seed)
        self.model = spec.model.build()
        self.model.init_weights()
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.trained = Counter()
        self.user = Counter()
        own = {"enable": True, "interval": 1, "last_save_model_only": False, **config}
        self.manager = manager.Config(**own).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.trained, "mine": self.user},
            sd_adapter=Llama3StateDictAdapter(spec.model, None),
            base_folder=str(root),
        )

    def step(self, *, last: bool = False) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.manager.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedulers.step()
        self.trained.value += 1
        self.user.value += 10
        self.manager.save(self.trained.value, last_step=last)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.manager.close()


def steps_in(root: Path) -> list[str]:
    folder = root / "checkpoint"
    return sorted(path.name for path in folder.iterdir() if (path / "manifest.bcp").exists())


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_everything_comes_back(run: Run, tmp_path: Path) -> None:
    run.step()
    run.step()
    saved = run.weights()
    run.manager.close()
    again = Run(tmp_path, seed=1)
    assert again.manager.load() is True
    assert same(again.weights(), saved)
    assert (again.trained.value, again.user.value, again.schedulers.schedulers[0].last_epoch) == (2, 20, 2)
    first = next(iter(run.optimizers.optimizers[0].state.values()))
    loaded = next(iter(again.optimizers.optimizers[0].state.values()))
    assert torch.equal(first["exp_avg"], loaded["exp_avg"])
    again.manager.close()


def test_doctor_says_what_a_folder_of_torchtitan_is_and_its_options_load_it(run: Run, tmp_path: Path) -> None:
    run.step()
    saved = run.weights()
    run.step()
    run.manager.close()
    words = line_of(tmp_path / "checkpoint/step-1", "torchtitan").split()
    options = {name.removeprefix("--checkpoint."): value for name, value in zip(words[::2], words[1::2], strict=True)}
    again = Run(tmp_path / "elsewhere", seed=1, folder=options["folder"], load_step=int(options["load_step"]))
    assert again.manager.load(step=again.manager.config.load_step) is True
    assert same(again.weights(), saved)
    again.manager.close()


def test_the_optimizers_step_only_when_the_save_before_has_staged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    staged, step = SaveHandle.staged, run.optimizers.step
    monkeypatch.setattr(SaveHandle, "staged", lambda self, *given: (staged(self, *given), calls.append("staged")))
    monkeypatch.setattr(run.optimizers, "step", lambda: (calls.append("step"), step()))
    for _ in range(3):
        run.step()
    assert calls == ["step", "staged", "step", "staged", "step"]


def test_an_empty_folder_is_a_fresh_start(run: Run) -> None:
    assert run.manager.load() is False


def test_a_disabled_manager_does_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, enable=False)
    run.step()
    assert run.manager.load() is False
    run.manager.close()
    assert not (tmp_path / "checkpoint").exists()


def test_no_fewer_than_k_stay_while_saves_are_under_way(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_latest_k=2)
    seen = []
    for _ in range(6):
        run.step()
        seen.append(len(steps_in(tmp_path)) if (tmp_path / "checkpoint").exists() else 0)
    run.manager.close()
    assert steps_in(tmp_path) == ["step-5", "step-6"]
    assert all(count >= min(2, number) for number, count in enumerate(seen))  # the save of this step is under way
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-5", "step-6"]


def test_a_pinned_checkpoint_and_files_of_others_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_latest_k=2, async_save=False)
    run.step()
    (tmp_path / "checkpoint/step-1/pin.json").write_text("{}")
    run.step()
    (tmp_path / "checkpoint/step-2/notes.txt").write_text("mine")
    run.step()
    run.step()
    run.manager.close()
    assert steps_in(tmp_path) == ["step-1", "step-3", "step-4"]
    assert [path.name for path in (tmp_path / "checkpoint/step-2").iterdir()] == ["notes.txt"]


def test_what_is_excluded_stays_as_it_is(run: Run, tmp_path: Path) -> None:
    run.step()
    run.step()
    run.manager.close()
    again = Run(tmp_path, seed=1, exclude_from_loading=["optimizer", "lr_scheduler", "mine"])
    again.user.value = 7
    assert again.manager.load()
    assert (again.trained.value, again.user.value) == (2, 7)
    assert again.schedulers.schedulers[0].last_epoch == 0
    assert not again.optimizers.optimizers[0].state
    assert same(again.weights(), run.weights())
    again.manager.close()


def test_a_state_whose_name_begins_with_an_excluded_one_is_loaded(run: Run, tmp_path: Path) -> None:
    run.manager.states["mine_too"] = Counter()
    run.manager.states["mine_too"].value = 3
    run.step()
    run.manager.close()
    again = Run(tmp_path, exclude_from_loading=["mine"])
    again.manager.states["mine_too"] = Counter()
    assert again.manager.load()
    assert (again.user.value, again.manager.states["mine_too"].value, again.trained.value) == (0, 3, 1)
    again.manager.close()


@pytest.mark.parametrize("left_out", [[], ["average.fast"]], ids=str)
def test_a_state_of_tensors_with_a_dot_in_its_name_is_loaded(run: Run, tmp_path: Path, left_out: list[str]) -> None:
    run.manager.states["average.fast"] = {"w": torch.ones(1 << 15)}
    run.step()
    run.manager.close()
    again = Run(tmp_path, exclude_from_loading=left_out)
    again.manager.states["average.fast"] = {"w": torch.zeros(1 << 15)}
    assert again.manager.load()
    assert again.manager.states["average.fast"]["w"].unique() == (0 if left_out else 1)
    again.manager.close()


def test_an_unknown_name_to_exclude_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, exclude_from_loading=["optimiser"])
    with pytest.raises(ValueError, match="optimiser"):
        run.manager.load()
    run.manager.close()


def test_a_state_that_the_run_has_no_more_is_ignored(run: Run, tmp_path: Path) -> None:
    run.step()
    run.manager.close()
    again = Run(tmp_path)
    del again.manager.states["mine"]
    assert again.manager.load()
    assert again.trained.value == 1
    again.manager.close()


def test_a_seed_gives_the_weights_alone(tmp_path: Path) -> None:
    seed = Run(tmp_path, create_seed_checkpoint=True)
    seed.trained.value = 5
    seed.manager.save(curr_step=0, last_step=True)
    seed.manager.close()
    run = Run(tmp_path, seed=1)
    assert run.manager.load()
    assert same(run.weights(), seed.weights())
    assert run.trained.value == 0
    run.step()
    run.manager.close()
    assert steps_in(tmp_path) == ["step-0", "step-1"]


def test_the_last_checkpoint_may_be_weights_alone_in_another_dtype(tmp_path: Path) -> None:
    run = Run(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    run.step()
    run.step(last=True)
    run.manager.close()
    last = bcp.open(tmp_path / "checkpoint/step-2")
    assert {name.split(".")[0] for name in last} == {"model"}
    assert {view.dtype for view in last.values()} == {torch.bfloat16}
    again = Run(tmp_path, seed=1)
    assert again.manager.load()
    assert again.trained.value == 1  # from the newest that holds all
    again.manager.close()
    other = Run(tmp_path / "other", seed=1, initial_load_path=str(tmp_path / "checkpoint/step-2"))
    assert other.manager.load()
    assert torch.equal(other.weights()["norm.weight"], run.weights()["norm.weight"].bfloat16().float())
    assert other.trained.value == 0
    other.manager.close()


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    run = Run(tmp_path, last_save_model_only=True, interval=100)
    run.step(last=True)
    run.manager.close()
    again = Run(tmp_path)
    with pytest.raises(bcp.CheckpointMismatchError, match="initial_load_path"):
        again.manager.load()
    again.manager.close()


def test_an_initial_checkpoint_may_give_everything_and_is_used_once(run: Run, tmp_path: Path) -> None:
    run.step()
    run.manager.close()
    initial = {"initial_load_path": str(tmp_path / "checkpoint/step-1"), "initial_load_model_only": False}
    other = Run(tmp_path / "other", seed=1, **initial)
    assert other.manager.load()
    assert other.trained.value == 1
    other.step()
    other.manager.close()
    again = Run(tmp_path / "other", seed=1, **initial)
    assert again.manager.load()
    assert again.trained.value == 2
    again.manager.close()


def test_a_local_initial_checkpoint_gives_everything_to_a_run_in_object_storage(run: Run, tmp_path: Path) -> None:
    run.step()
    run.manager.close()
    initial = {"initial_load_path": str(tmp_path / "checkpoint/step-1"), "initial_load_model_only": False}
    place = {"folder": f"memory://{tmp_path.name}", "storage_options": {"use_listings_cache": False}}
    other = Run(tmp_path / "other", seed=1, **initial, **place)
    assert other.manager.load()
    assert other.trained.value == 1
    other.manager.close()


def test_weights_go_to_hugging_face_and_come_back(tmp_path: Path) -> None:
    run = Run(tmp_path, last_save_model_only=True, last_save_in_hf=True)
    run.step()
    run.step(last=True)
    run.manager.close()
    folder = tmp_path / "checkpoint/step-2"
    assert any(path.suffix == ".safetensors" for path in folder.iterdir())
    assert "model.layers.0.self_attn.q_proj.weight" in bcp.open(folder)
    assert not (tmp_path / "checkpoint/step-2.weights").exists()
    other = Run(tmp_path / "other", seed=1, initial_load_path=str(folder), initial_load_in_hf=True)
    assert other.manager.load()
    assert same(other.weights(), run.weights())
    other.manager.close()
    again = Run(tmp_path, seed=1)
    assert again.manager.load()
    assert again.trained.value == 1
    again.manager.close()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_weights_for_hugging_face_take_the_place_of_a_step_that_training_has_left(
    tmp_path: Path, is_damaged: bool
) -> None:
    first = Run(tmp_path)
    for _ in range(3):
        first.step()
    first.manager.close()
    folder = tmp_path / "checkpoint/step-3"
    if is_damaged:
        (folder / "manifest.bcp").write_bytes(b"damaged")
    again = Run(tmp_path, last_save_model_only=True, last_save_in_hf=True, interval=100)
    assert again.manager.load(2)
    again.step(last=True)
    again.manager.close()
    found = bcp.open(folder)
    assert found.info.format == "safetensors"
    assert torch.equal(found.state_dict()["model.norm.weight"], again.weights()["norm.weight"])
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-1", "step-2", "step-3"]
    assert (folder / "data").exists() == is_damaged  # which files are its own is not known


def test_weights_for_hugging_face_do_not_replace_a_step_that_is_pinned(tmp_path: Path) -> None:
    first = Run(tmp_path)
    for _ in range(3):
        first.step()
    first.manager.close()
    (tmp_path / "checkpoint/step-3/pin.json").write_text("{}")
    again = Run(tmp_path, last_save_model_only=True, last_save_in_hf=True, interval=100)
    assert again.manager.load(2)
    with pytest.raises(bcp.CheckpointExistsError, match=r"step-3\.weights: "):
        again.step(last=True)
    again.manager.close()
    assert steps_in(tmp_path) == ["step-1", "step-2", "step-3", "step-3.weights"]


def test_parameters_that_the_adapter_forgets_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, last_save_model_only=True, last_save_in_hf=True)
    run.step(last=True)
    run.manager.close()
    other = Run(
        tmp_path / "other", seed=1, initial_load_path=str(tmp_path / "checkpoint/step-1"), initial_load_in_hf=True
    )
    assert other.manager.load()
    assert "has no names" not in caplog.text
    other.manager._sd_adapter.from_hf_map.pop("model.layers.{}.mlp.up_proj.weight")
    assert other.manager.load()
    other.manager.close()
    assert "Llama3StateDictAdapter has no names for layers.0.feed_forward.w3.weight" in caplog.text
    assert "norm" not in caplog.text.rpartition("has no names")[2]


def test_a_run_goes_back_to_an_earlier_step_and_replaces_later_ones(run: Run, tmp_path: Path) -> None:
    for _ in range(3):
        run.step()
    run.manager.close()
    back = Run(tmp_path, keep_latest_k=2)
    assert back.manager.load(step=1)
    back.step()
    assert back.trained.value == 2
    back.manager.close()
    assert steps_in(tmp_path) == ["step-1", "step-2"]  # step-3 belongs to the branch that was left, and goes first
    again = Run(tmp_path)
    again.manager.load()
    assert again.trained.value == 2
    again.manager.close()


def test_a_step_that_is_not_there_names_those_that_are(run: Run, tmp_path: Path) -> None:
    run.step()
    run.manager.close()
    again = Run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"load_step=7.*\[1\]"):
        again.manager.load(step=7)
    again.manager.close()


def test_an_unfinished_save_is_passed_over(run: Run, tmp_path: Path) -> None:
    run.step()
    run.step()
    run.manager.close()
    (tmp_path / "checkpoint/step-2/manifest.bcp").unlink()
    again = Run(tmp_path)
    assert again.manager.load()
    assert again.trained.value == 1
    again.manager.close()


def test_a_damaged_checkpoint_is_passed_over_stays_and_does_not_count(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        run.step()
    run.manager.close()
    (tmp_path / "checkpoint/step-3/manifest.bcp").write_bytes(b"damaged")
    again = Run(tmp_path, keep_latest_k=2)
    with pytest.raises(bcp.CheckpointCorruptError):
        again.manager.load(step=3)
    assert again.manager.load()
    assert again.trained.value == 2
    assert "step-3 is passed over" in caplog.text
    for _ in range(3):  # also over the step that is damaged
        again.step()
    again.manager.close()
    assert steps_in(tmp_path) == ["step-4", "step-5"]


def test_a_damaged_checkpoint_alone_is_no_fresh_start(run: Run, tmp_path: Path) -> None:
    run.step()
    run.manager.close()
    (tmp_path / "checkpoint/step-1/manifest.bcp").write_bytes(b"damaged")
    again = Run(tmp_path)
    with pytest.raises(bcp.CheckpointCorruptError):
        again.manager.load()
    again.manager.close()


def test_a_folder_of_torchtitans_own_manager_is_no_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoint/step-4").mkdir(parents=True)
    (tmp_path / "checkpoint/step-4/.metadata").write_bytes(b"")
    run = Run(tmp_path)
    with pytest.raises(bcp.CheckpointMismatchError, match="torchtitan's own manager"):
        run.manager.load()
    run.manager.close()


def test_weights_of_torchtitans_own_manager_load(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        theirs = Run(tmp_path, manager=CheckpointManager, keep_latest_k=0)
    theirs.step()
    theirs.manager.close()
    path = tmp_path / "checkpoint/step-1"
    ours = Run(tmp_path / "ours", seed=1, initial_load_path=str(path))
    assert ours.manager.load()
    assert same(ours.weights(), theirs.weights())
    ours.manager.close()


@pytest.mark.parametrize("left_out", [[], ["optimizer", "mine"]], ids=str)
def test_everything_of_torchtitans_own_manager_loads(tmp_path: Path, left_out: list[str]) -> None:
    theirs = Run(tmp_path, manager=CheckpointManager, keep_latest_k=0)
    theirs.step()
    theirs.step()
    theirs.manager.close()
    initial = {"initial_load_path": str(tmp_path / "checkpoint/step-2"), "initial_load_model_only": False}
    ours = Run(tmp_path / "ours", seed=1, exclude_from_loading=left_out, **initial)
    assert ours.manager.load()
    assert same(ours.weights(), theirs.weights())
    assert (ours.trained.value, ours.schedulers.schedulers[0].last_epoch) == (2, 2)
    assert ours.user.value == (0 if left_out else 20)
    saved, loaded = (
        [run.optimizers.optimizers[0].state.get(parameter, {}) for parameter in run.model.parameters()]
        for run in (theirs, ours)
    )
    assert all(torch.equal(old[key], new[key]) for old, new in zip(saved, loaded, strict=True) for key in new)
    assert {len(new) for new in loaded} == {0 if left_out else 3}
    ours.manager.close()


@pytest.mark.parametrize(
    ("manager", "options"),
    [
        (CheckpointManager, ["bcp"]),
        (BcpCheckpointManager, ["dcp"]),
        (BcpCheckpointManager, ["dcp", "--flatten-optimizer", "--rename", r"^model\.="]),
    ],
)
def test_everything_of_a_converted_checkpoint_loads(tmp_path: Path, manager: type, options: list[str]) -> None:
    before = Run(tmp_path, manager=manager, keep_latest_k=0)
    before.step()
    before.step()
    before.manager.close()
    path = str(tmp_path / "converted")
    ended = CliRunner().invoke(cli, ["convert", str(tmp_path / "checkpoint/step-2"), path, "--to", *options])
    assert not ended.exit_code, ended.output
    after = Run(tmp_path / "after", seed=1, initial_load_path=path, initial_load_model_only=False)
    assert after.manager.load()
    assert same(after.weights(), before.weights())
    assert (after.trained.value, after.user.value, after.schedulers.schedulers[0].last_epoch) == (2, 20, 2)
    saved, loaded = (
        [run.optimizers.optimizers[0].state[parameter] for parameter in run.model.parameters()]
        for run in (before, after)
    )
    assert all(torch.equal(old[key], new[key]) for old, new in zip(saved, loaded, strict=True) for key in old)
    after.manager.close()


def test_load_only_saves_nothing(run: Run, tmp_path: Path) -> None:
    run.step()
    run.manager.close()
    reader = Run(tmp_path, load_only=True)
    assert reader.manager.load()
    reader.step()
    reader.manager.close()
    assert steps_in(tmp_path) == ["step-1"]


def test_a_failed_save_is_raised_by_the_next_one(run: Run, tmp_path: Path) -> None:
    run.manager.states["mine"] = SimpleNamespace()
    with pytest.raises(bcp.CheckpointSaveError, match="extra_state"):
        run.step()


def test_credentials_stay_out_of_what_torchtitan_logs(tmp_path: Path) -> None:
    config = BcpCheckpointManager.Config(enable=True, storage_options={"secret": "xyzzy"})
    assert "xyzzy" not in str(config.to_dict()) + repr(config)


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs/integrations/torchtitan.md"
    change, load = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {"config": SimpleNamespace(), "bcp": bcp, "dump_folder": tmp_path}
    exec(compile(change, str(page), "exec"), names)
    config = names["config"].checkpoint
    assert (type(config)._owner, config.interval, config.keep_latest_k) == (BcpCheckpointManager, 500, 3)
    run = Run(tmp_path, interval=500, keep_latest_k=3)
    run.trained.value = 499
    run.step()
    run.manager.close()
    names["model"] = Run(tmp_path / "other", seed=1, enable=False).model
    exec(compile(load, str(page), "exec"), names)
    assert same(names["model"].state_dict(), run.weights())
