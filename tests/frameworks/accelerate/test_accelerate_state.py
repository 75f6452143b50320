"""What an Accelerator holds beside one model: more models, hooks, objects, names of a project; and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import bytecheckpoint as bcp
from bytecheckpoint.integrations.accelerate import load_state, save_state, states
from frameworks.accelerate.accelerate_program import told
from frameworks.going_on import go_on

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]


def accelerator(**more: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **more)


def project(folder: Path, *, total_limit: int | None = None) -> dict[str, Any]:
    names = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=total_limit)
    return {"project_config": names}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def two_of_each(seed: int) -> tuple[Any, list[Any]]:
    torch.manual_seed(seed)
    of_all = accelerator()
    models = [nn.Linear(4, 4), nn.Linear(4, 2)]
    optimizers = [adam(model) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, seed + 1) for optimizer in optimizers]
    return of_all, list(of_all.prepare(*models, *optimizers, *schedulers))


def test_several_models_and_optimizers_come_back(tmp_path: Path) -> None:
    first, (one, two, *others) = two_of_each(1)
    save_state(first, tmp_path).result()
    second, (other_one, other_two, *other_others) = two_of_each(2)
    go_on(tmp_path, "accelerate", accelerator=second)
    for saved, loaded in ((one, other_one), (two, other_two)):
        assert all(torch.equal(saved.state_dict()[name], loaded.state_dict()[name]) for name in saved.state_dict())
    for saved, loaded in zip(others[:2], other_others[:2], strict=True):
        states, loaded_states = saved.state_dict()["state"], loaded.state_dict()["state"]
        assert all(torch.equal(states[number]["exp_avg"], loaded_states[number]["exp_avg"]) for number in states)
    assert [each.scheduler.step_size for each in other_others[2:]] == [2, 2]
    plain = nn.Linear(4, 2)
    bcp.load(tmp_path, {"model_1": plain})
    assert torch.equal(plain.weight, two.weight)


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_registered_objects_the_scaler_and_the_step_come_back(tmp_path: Path) -> None:
    first, counters = accelerator(), [Counter(3), Counter(4)]
    first.register_for_checkpointing(*counters)
    first.step, first.scaler = 7, torch.amp.GradScaler("cpu", init_scale=64.0)
    first.scaler.scale(torch.ones(1))
    save_state(first, tmp_path).result()
    second, others = accelerator(), [Counter(0), Counter(0)]
    second.register_for_checkpointing(*others)
    second.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    load_state(second, tmp_path)
    assert [each.count for each in others] == [3, 4]
    assert (second.step, second.scaler.get_scale()) == (7, 64.0)


def test_another_number_of_registered_objects_is_refused(tmp_path: Path) -> None:
    first = accelerator()
    first.register_for_checkpointing(Counter(3))
    save_state(first, tmp_path).result()
    with pytest.raises(bcp.CheckpointMismatchError, match=r"extra_state\.object_0"):
        load_state(accelerator(), tmp_path)


def test_a_load_before_prepare_is_refused_and_loads_nothing(tmp_path: Path) -> None:
    first, _ = two_of_each(1)
    first.register_for_checkpointing(Counter(3))
    save_state(first, tmp_path).result()
    early, counter = accelerator(), Counter(0)
    early.register_for_checkpointing(counter)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.weight: in the checkpoint, not in the state"):
        load_state(early, tmp_path)
    assert counter.count == 0


def test_a_folder_of_accelerate_itself_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    first, (model, *_) = two_of_each(1)
    first.save_state(tmp_path)
    second, (other, *_) = two_of_each(2)
    before = other.weight.detach().clone()
    with pytest.raises(bcp.CheckpointMismatchError, match=r"accelerator\.load_state"):
        load_state(second, tmp_path)
    assert torch.equal(other.weight, before)
    assert not torch.equal(other.weight, model.weight)


def left(of_all: Any, folder: Path) -> list[str]:
    """The checkpoints that are there once all that is due is deleted."""
    states._FOLDERS[of_all].wait(60)
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_project_names_checkpoints_and_keeps_as_many_as_it_says(tmp_path: Path) -> None:
    first = accelerator(**project(tmp_path, total_limit=2))
    first.prepare(nn.Linear(4, 4))
    folder = tmp_path / "checkpoints"
    for _ in range(4):
        save_state(first, async_save=False)
    assert left(first, tmp_path) == ["checkpoint_2", "checkpoint_3"]
    second = accelerator(**project(tmp_path, total_limit=2))
    second.prepare(nn.Linear(4, 4))
    assert load_state(second).path == str(folder / "checkpoint_3")
    save_state(second).result()
    assert left(second, tmp_path) == ["checkpoint_3", "checkpoint_4"]


def test_going_back_to_an_earlier_checkpoint_keeps_what_is_committed_since_and_goes_on_from_it(tmp_path: Path) -> None:
    first = accelerator(**project(tmp_path, total_limit=4))
    first.prepare(nn.Linear(4, 4))
    folder = tmp_path / "checkpoints"
    for _ in range(4):
        save_state(first, async_save=False)
    second = accelerator(**project(tmp_path, total_limit=2))
    second.prepare(nn.Linear(4, 4))
    load_state(second, folder / "checkpoint_0")
    save_state(second, async_save=False, options=bcp.SaveOptions(overwrite=True))
    assert left(second, tmp_path) == ["checkpoint_1", "checkpoint_3"]
    assert load_state(second).path == str(folder / "checkpoint_1")


def test_a_pinned_checkpoint_of_a_project_stays(tmp_path: Path) -> None:
    first = accelerator(**project(tmp_path, total_limit=1))
    first.prepare(nn.Linear(4, 4))
    folder = tmp_path / "checkpoints"
    save_state(first, async_save=False)
    (folder / "checkpoint_0" / "pin.json").write_text("{}")
    for _ in range(2):
        save_state(first, async_save=False)
    assert left(first, tmp_path) == ["checkpoint_0", "checkpoint_2"]


def test_a_deletion_leaves_files_of_others_and_takes_those_of_accelerate(tmp_path: Path) -> None:
    first = accelerator(**project(tmp_path, total_limit=1))
    optimizer = torch.optim.AdamW(first.prepare(nn.Linear(4, 4)).parameters())
    first.prepare(optimizer)
    first.register_for_checkpointing(Counter(3))
    names = first.project_configuration
    first.register_save_state_pre_hook(lambda _models, _weights, folder: Path(folder, "adapter.pt").write_text("mine"))
    save_state(first, async_save=False)
    folder = tmp_path / "checkpoints" / "checkpoint_0"
    names.automatic_checkpoint_naming = False
    first.save_state(str(folder))
    names.automatic_checkpoint_naming = True
    assert len({each.name for each in folder.iterdir()} - {"adapter.pt", "data", "telemetry", "manifest.bcp"}) >= 4
    save_state(first, async_save=False)
    assert left(first, tmp_path) == ["checkpoint_0", "checkpoint_2"]  # accelerate has counted its own save
    assert [each.name for each in folder.iterdir()] == ["adapter.pt"]


def test_a_damaged_checkpoint_of_a_project_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = accelerator(**project(tmp_path))
    first.prepare(nn.Linear(4, 4))
    for _ in range(2):
        save_state(first, async_save=False)
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_1" / "manifest.bcp").write_bytes(b"damaged")
    second = accelerator(**project(tmp_path))
    second.prepare(nn.Linear(4, 4))
    assert load_state(second).path == str(folder / "checkpoint_0")
    assert "checkpoint_1 is passed over" in caplog.text
    save_state(second, async_save=False)
    assert left(second, tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    (folder / "checkpoint_2" / "manifest.bcp").write_bytes(b"damaged")
    (folder / "checkpoint_0" / "manifest.bcp").write_bytes(b"damaged")
    with pytest.raises(bcp.CheckpointCorruptError):
        load_state(second)


def test_a_save_that_failed_deletes_nothing_and_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = accelerator(**project(tmp_path, total_limit=1))
    first.prepare(nn.Linear(4, 4))
    save_state(first).result()
    from bytecheckpoint.saving import commit

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(commit.layout, "commit", refuse)
        with pytest.raises(bcp.CheckpointError, match="the disk is gone"):
            save_state(first, async_save=False)
    assert (tmp_path / "checkpoints" / "checkpoint_1").exists()
    second = accelerator(**project(tmp_path, total_limit=1))
    second.prepare(nn.Linear(4, 4))
    assert load_state(second).path.endswith("checkpoint_0")


def test_a_project_without_a_committed_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "checkpoint_3").mkdir(parents=True)
    with pytest.raises(bcp.CheckpointNotFoundError, match="no committed checkpoint_<number>"):
        load_state(accelerator(**project(tmp_path)))


def test_a_missing_path_is_refused_without_automatic_names(tmp_path: Path) -> None:
    for call in (save_state, load_state):
        with pytest.raises(ValueError, match=r"pass path=, or ProjectConfiguration\("):
            call(accelerator())
    with pytest.raises(ValueError, match="step= needs a path"):
        save_state(accelerator(**project(tmp_path)), step=3)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_backends_with_an_integration_of_their_own_are_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = accelerator()
    monkeypatch.setattr(type(of_all), "distributed_type", DistributedType[kind])
    for call in (save_state, load_state):
        with pytest.raises(ValueError, match=rf"{kind}, .*nothing was done: call bytecheckpoint"):
            call(of_all, tmp_path)


def test_hooks_of_diffusers_save_and_load_their_models_themselves(tmp_path: Path) -> None:
    def save_adapter(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        torch.save(models[1].state_dict(), Path(folder) / "adapter.pt")
        weights.pop()

    def load_adapter(models: list[nn.Module], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "adapter.pt"))

    first = accelerator()
    one, two = first.prepare(nn.Linear(4, 4), nn.Linear(4, 2))
    first.register_save_state_pre_hook(save_adapter)
    save_state(first, tmp_path).result()
    assert {name.split(".")[0] for name in bcp.open(tmp_path)} == {"model"}
    second = accelerator()
    other_one, other_two = second.prepare(nn.Linear(4, 4), nn.Linear(4, 2))
    second.register_load_state_pre_hook(load_adapter)
    load_state(second, tmp_path)
    assert torch.equal(one.weight, other_one.weight)
    assert torch.equal(two.weight, other_two.weight)


@pytest.mark.parametrize("taken", [[0], [1], [0, 1]])
def test_an_optimizer_of_a_model_that_a_hook_saves_is_saved_and_loaded_by_name(
    tmp_path: Path, taken: list[int]
) -> None:
    def save_weights(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        for number in reversed(taken):
            torch.save(models[number].state_dict(), Path(folder) / f"unet_{number}.pt")
            weights.pop(number)

    def load_weights(models: list[nn.Module], folder: str) -> None:
        for number in reversed(taken):
            models.pop(number).load_state_dict(torch.load(Path(folder) / f"unet_{number}.pt"))

    def trained(folder: Path | None) -> tuple[list[nn.Module], torch.optim.Optimizer]:
        of_all = accelerator()
        of_all.register_save_state_pre_hook(save_weights)
        of_all.register_load_state_pre_hook(load_weights)
        one, two = nn.Linear(4, 4), nn.Linear(4, 4)
        adam = torch.optim.Adam([{"params": one.parameters()}, {"params": two.parameters(), "lr": 0.5}])
        one, two, adam = of_all.prepare(one, two, adam)
        if folder is None:
            two(one(torch.rand(2, 4))).sum().backward()
            adam.step()
            save_state(of_all, tmp_path).result()
        else:
            load_state(of_all, folder)
        assert all("param_names" not in group for group in adam.param_groups)
        return [one, two], adam.optimizer

    models, adam = trained(None)
    other_models, other_adam = trained(tmp_path)
    assert all(map(torch.equal, of_all_parameters(models), of_all_parameters(other_models)))
    for mine, other in zip(of_all_parameters(models), of_all_parameters(other_models), strict=True):
        assert torch.equal(adam.state[mine]["exp_avg_sq"], other_adam.state[other]["exp_avg_sq"])
    assert {name.split(".")[0] for name in bcp.open(tmp_path)}.isdisjoint(
        {("model", "model_1")[each] for each in taken}
    )


def of_all_parameters(models: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for model in models for parameter in model.parameters()]


def numbers(folder: Path, *, stateful: bool = True) -> tuple[Any, Any]:
    of_all = accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
    return of_all, of_all.prepare(DataLoader(TensorDataset(torch.arange(12)), 2, shuffle=True))


def test_a_save_before_the_first_batch_and_right_after_a_load_keep_the_position(tmp_path: Path) -> None:
    torch.manual_seed(3)
    first, loader = numbers(tmp_path)
    save_state(first, tmp_path / "new").result()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    save_state(first, tmp_path / "later").result()
    rest = [batch[0].tolist() for batch in batches]
    second, loader = numbers(tmp_path)
    load_state(second, tmp_path / "later")
    save_state(second, tmp_path / "again").result()
    third, loader = numbers(tmp_path)
    load_state(third, tmp_path / "again")
    assert [batch[0].tolist() for batch in loader] == rest
    fourth, loader = numbers(tmp_path)
    load_state(fourth, tmp_path / "new")
    assert len(list(loader)) == 6


def test_an_evaluation_after_the_load_does_not_take_the_random_numbers_of_training(tmp_path: Path) -> None:
    def run(*, saves: bool) -> list[float]:
        of_all = accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        torch.manual_seed(5)
        training, evaluation = of_all.prepare(
            DataLoader(TensorDataset(torch.arange(8)), 2, shuffle=True), DataLoader(TensorDataset(torch.arange(4)), 2)
        )
        drawn: list[float] = []
        if not saves:
            load_state(of_all, tmp_path)
        for epoch in range(2):
            for _ in training:
                drawn.append(torch.rand(()).item())
                if saves and len(drawn) == 2:
                    save_state(of_all, tmp_path).result()
                if not saves and epoch == 1:
                    return drawn
            for number, _ in enumerate(evaluation):
                if number == 0:
                    break
        return drawn

    whole = run(saves=True)
    assert run(saves=False) == whole[2:5]


class ByEpoch(Sampler[int]):
    """A user's sampler, whose order follows from the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter([(each + 5 * self.epoch) % 12 for each in range(12)])


def test_a_sampler_of_the_user_hears_of_the_epoch(tmp_path: Path) -> None:
    def prepared() -> tuple[Any, Any]:
        of_all = accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        return of_all, of_all.prepare(DataLoader(TensorDataset(torch.arange(12)), 2, sampler=ByEpoch()))

    first, loader = prepared()
    assert [batch[0][0].item() for batch in loader] == [0, 2, 4, 6, 8, 10]
    batches = iter(loader)
    assert [next(batches)[0][0].item() for _ in range(2)] == [5, 7]
    save_state(first, tmp_path).result()
    second, loader = prepared()
    load_state(second, tmp_path)
    assert [batch[0][0].item() for batch in loader] == [9, 11, 1, 3]
    assert next(iter(loader))[0][0].item() == 10


class Letters(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(12))


@pytest.mark.parametrize("kind", ["shard", "dispatcher"])
def test_an_iterable_dataset_goes_on(tmp_path: Path, kind: str) -> None:
    def prepared() -> tuple[Any, Any]:
        how = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=kind == "dispatcher")
        of_all = accelerator(dataloader_config=how)
        return of_all, of_all.prepare(DataLoader(Letters(), 2))

    first, loader = prepared()
    batches = iter(loader)
    begun = [next(batches).tolist() for _ in range(2)]
    save_state(first, tmp_path).result()
    second, loader = prepared()
    load_state(second, tmp_path)
    assert begun + [batch.tolist() for batch in loader] == [[each, each + 1] for each in range(0, 12, 2)]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["shard", "dispatcher"])
def test_an_iterable_dataset_goes_on_twice_in_one_pass(tmp_path: Path, kind: str, num_workers: int) -> None:
    seen: list[list[int]] = []
    how = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=kind == "dispatcher")
    for run in range(3):
        of_all = accelerator(dataloader_config=how)
        loader = of_all.prepare(DataLoader(Letters(), 2, num_workers=num_workers))
        if run:
            load_state(of_all, tmp_path / str(run - 1))
        batches = iter(loader)
        seen += [next(batches).tolist() for _ in range(2)]
        save_state(of_all, tmp_path / str(run)).result()
    assert seen == [[each, each + 1] for each in range(0, 12, 2)]


def test_a_loader_of_streams_goes_on_exactly(tmp_path: Path) -> None:
    def prepared() -> tuple[Any, Any]:
        of_all = accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
        streams = bcp.data.Streams({"a": list(range(6)), "b": list(range(10, 16))}, rank=0, size=1)
        return of_all, of_all.prepare(DataLoader(streams, 2))

    first, loader = prepared()
    whole = [batch.tolist() for batch in loader]
    first, loader = prepared()
    batches = iter(loader)
    begun = [next(batches).tolist() for _ in range(2)]
    save_state(first, tmp_path).result()
    drawn = torch.rand(3)
    second, loader = prepared()
    load_state(second, tmp_path)
    rest = []
    for batch in loader:
        rest.append(batch.tolist())
        if len(rest) == 1:
            assert torch.equal(torch.rand(3), drawn)
    assert begun + rest == whole


def test_the_state_of_another_kind_of_loader_is_refused_before_weights_are_filled(tmp_path: Path) -> None:
    def prepared(data: Any) -> tuple[Any, nn.Module]:
        of_all = accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
        model, _ = of_all.prepare(nn.Linear(2, 2), DataLoader(data, 2))
        return of_all, model

    save_state(prepared(bcp.data.Streams({"a": list(range(6))}, rank=0, size=1))[0], tmp_path).result()
    of_all, model = prepared(list(range(6)))
    weight = model.weight.detach().clone()
    with pytest.raises(bcp.CheckpointMismatchError, match="a loader that accelerate has prepared"):
        load_state(of_all, tmp_path)
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_that_makes_no_batches_goes_on(tmp_path: Path, stateful: bool) -> None:
    def prepared() -> tuple[Any, Any]:
        of_all = accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
        return of_all, of_all.prepare(DataLoader(list(range(12)), batch_size=None, shuffle=True))

    torch.manual_seed(3)
    first, loader = prepared()
    batches = iter(loader)
    begun = [next(batches) for _ in range(5)]
    save_state(first, tmp_path).result()
    rest = list(batches)
    assert sorted(begun + rest) == list(range(12))
    second, loader = prepared()
    load_state(second, tmp_path)
    assert list(loader) == (rest if stateful else begun + rest)


def test_include_leaves_the_loader_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told(["--out", tmp_path, "--save-at", 5, "--stop-at", 5])
    of_all, loader = numbers(tmp_path, stateful=False)
    model = of_all.prepare(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8)))
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        load_state(of_all, tmp_path, include="model.*")
    assert torch.equal(model.state_dict()["3.bias"], torch.as_tensor(bcp.open(tmp_path)["model.3.bias"]))
    assert len(list(loader)) == 6
    assert "skip_first_batches" not in caplog.text
