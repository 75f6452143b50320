"""Lightning's Trainer in one process, saving with this library: what its users do with checkpoints."""

from __future__ import annotations

import enum
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from os.path import lexists
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import bytecheckpoint as bcp
from bytecheckpoint.integrations.lightning import BcpDDPStrategy, BcpSingleDeviceStrategy
from bytecheckpoint.integrations.lightning import saves as saves_in_flight
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends.fsspec_store import FsspecStore
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX
from frameworks.going_on import go_on
from frameworks.lightning.lightning_runs import Regression, committed, samples, train_loader, trainer_of

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def fit(
    folder: Path,
    callbacks: list[Any],
    *,
    module: Regression | None = None,
    ckpt_path: Any = None,
    validates: bool = False,
    strategy: Any = None,
    loader: Any = None,
    **options: Any,
) -> tuple[Regression, pl.Trainer]:
    pl.seed_everything(5, verbose=False)
    module = module or Regression()
    trainer = trainer_of(strategy or BcpSingleDeviceStrategy(), callbacks, default_root_dir=folder, **options)
    held_out = DataLoader(samples()[:16], batch_size=8)
    trainer.fit(
        module, train_loader() if loader is None else loader, held_out if validates else None, ckpt_path=ckpt_path
    )
    return module, trainer


def same_weights(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


class CountingLoader(DataLoader[Any]):
    """Goes on after the batches of a pass that its state counts, and skips them when a pass begins, as torchdata's
    StatefulDataLoader does.
    """

    num_taken = num_to_skip = 0

    def __iter__(self) -> Any:
        batches = super().__iter__()
        self.num_taken, self.num_to_skip = self.num_to_skip, 0
        for _ in range(self.num_taken):
            next(batches)
        return self._counted(batches)

    def _counted(self, batches: Any) -> Iterator[Any]:
        for batch in batches:
            self.num_taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_taken": self.num_taken % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_to_skip = state["num_taken"]


class Pairs(Regression):
    """Takes batches of several loaders together."""

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(torch.cat(batch), number)


def each_few_steps(folder: Path, steps: int = 3, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=steps, **options)


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("at", [11, 16])
def test_a_run_that_stopped_goes_on_bit_for_bit(tmp_path: Path, at: int, *, async_save: bool) -> None:
    strategy = BcpSingleDeviceStrategy(async_save=async_save)
    whole, _ = fit(tmp_path, [])
    fit(tmp_path, [each_few_steps(tmp_path, at)], max_steps=at, strategy=strategy)
    (path,) = tmp_path.glob("*.ckpt")
    resumed, _ = fit(tmp_path, [], ckpt_path=path)
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step >= at}
    assert same_weights(resumed, whole)


def test_the_end_of_an_epoch_resumes_with_the_order_of_the_next(tmp_path: Path) -> None:
    loader = DataLoader(samples(), batch_size=8, shuffle=True)  # whose order follows from the random state alone
    epochs = {"loader": loader, "max_steps": -1, "max_epochs": 3}
    whole, _ = fit(tmp_path, [ModelCheckpoint(tmp_path, save_top_k=-1)], **epochs)
    resumed, _ = fit(tmp_path, [], ckpt_path=tmp_path / "epoch=1-step=16.ckpt", **epochs)
    assert resumed.rows == whole.rows[128:]
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step >= 16}


@pytest.mark.parametrize("at", [3, 11, 16])
def test_a_loader_with_a_distributed_sampler_goes_on_in_the_order_of_its_epoch(tmp_path: Path, at: int) -> None:
    def loader() -> DataLoader[Any]:
        sampler = DistributedSampler(samples(), num_replicas=1, rank=0)
        return CountingLoader(samples(), batch_size=8, sampler=sampler)

    whole, _ = fit(tmp_path, [], loader=loader())
    fit(tmp_path, [each_few_steps(tmp_path, at)], loader=loader(), max_steps=at)
    (path,) = tmp_path.glob("*.ckpt")
    resumed, _ = fit(tmp_path, [], loader=loader(), ckpt_path=path)
    assert resumed.rows == whole.rows[8 * at :]


@pytest.mark.parametrize(
    ("at", "num_workers", "saves"),
    [
        (8, 0, {"every_n_train_steps": 8}),
        (8, 2, {"every_n_train_steps": 8}),
        (8, 0, {"save_on_train_epoch_end": True}),
        (11, 0, {"every_n_train_steps": 11}),
    ],
)
@pytest.mark.parametrize("is_random", [False, True])
def test_a_loader_of_torchdata_goes_on_in_the_order_of_its_epoch(
    tmp_path: Path, at: int, num_workers: int, saves: dict[str, Any], is_random: bool
) -> None:
    def loader() -> Any:
        sampler = None if is_random else DistributedSampler(samples(), num_replicas=1, rank=0)
        return StatefulDataLoader(samples(), 8, sampler=sampler, shuffle=is_random, num_workers=num_workers)

    epochs = {"max_steps": -1, "max_epochs": 2}
    whole, _ = fit(tmp_path, [ModelCheckpoint(tmp_path, save_top_k=-1, **saves)], loader=loader(), **epochs)
    (path,) = tmp_path.glob(f"*step={at}.ckpt")
    resumed, _ = fit(tmp_path, [], loader=loader(), ckpt_path=path, **epochs)
    assert resumed.rows == whole.rows[8 * at :]
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step >= at}


def test_a_random_sampler_that_lightning_divides_between_ranks_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"strategy": BcpDDPStrategy(process_group_backend="gloo"), "use_distributed_sampler": True}
    fit(tmp_path, [], loader=StatefulDataLoader(samples(), batch_size=8, shuffle=True), max_steps=2, **options)
    assert caplog.text.count("the order of train loader 0 is in no checkpoint") == 1
    assert "sampler=DistributedSampler(dataset)" in caplog.text


def test_a_save_after_the_last_batch_of_streams_goes_on_with_the_first_batch_of_the_next_epoch(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 3, "max_steps": 9}  # an epoch of 8 batches has 3 steps
    whole, _ = fit(tmp_path, [each_few_steps(tmp_path, 3, save_top_k=-1)], **options)
    (path,) = tmp_path.glob("*step=3.ckpt")
    resumed, trainer = fit(tmp_path, [], ckpt_path=path, **options)
    assert same_weights(resumed, whole)
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed == 8


@pytest.mark.parametrize("step", [4, 6], ids=["a loader begins anew in the next read", "one has begun anew"])
def test_an_epoch_of_combined_loaders_ends_where_it_would_have_ended(tmp_path: Path, step: int) -> None:
    def combined() -> Any:
        few = {str(k): samples()[k::8] for k in range(5)}  # 5 batches, which come again until the 8 others end
        few_loader = DataLoader(bcp.data.Streams(few, rank=0, size=1, read_ahead=1), batch_size=8)
        return CombinedLoader([train_loader(), few_loader], "max_size_cycle")

    callbacks = [each_few_steps(tmp_path, step, save_top_k=-1)]
    whole, _ = fit(tmp_path, callbacks, module=Pairs(), loader=combined(), max_steps=11)
    (path,) = tmp_path.glob(f"*step={step}.ckpt")
    resumed, _ = fit(tmp_path, [], module=Pairs(), loader=combined(), max_steps=11, ckpt_path=path)
    assert resumed.losses == {at: loss for at, loss in whole.losses.items() if at >= step}


def test_top_k_and_last_are_as_with_lightnings_own_saves(tmp_path: Path) -> None:
    folders = {}
    for name, strategy in {"own": "auto", "ours": BcpSingleDeviceStrategy()}.items():
        folder = tmp_path / name
        saves = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)
        fit(folder, [saves], validates=True, strategy=strategy, max_steps=40, check_val_every_n_epoch=1)
        folders[name] = sorted(path.name for path in folder.glob("*.ckpt"))
        named = [saves.best_model_path, saves.kth_best_model_path, saves.last_model_path, *saves.best_k_models]
        assert all(map(os.path.exists, named))
    assert folders["ours"] == folders["own"]
    assert len(folders["ours"]) == 3
    assert all(map(bcp.open, named))


def test_the_last_checkpoint_is_not_written_a_second_time(tmp_path: Path) -> None:
    fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], max_steps=3)
    last, other = (bcp.open(tmp_path / name) for name in ("last.ckpt", "epoch=0-step=3.ckpt"))
    assert last.info.save_id == other.info.save_id
    (data,) = (tmp_path / "last.ckpt" / "data").iterdir()
    assert data.stat().st_nlink == 2
    shutil.rmtree(tmp_path / "epoch=0-step=3.ckpt")
    assert torch.equal(
        torch.as_tensor(last["model.net.0.weight"]), bcp.load_tree(last.info.path)["model"]["net.0.weight"]
    )


@pytest.mark.parametrize("async_save", [True, False])
def test_training_waits_neither_for_the_save_nor_for_its_copy_as_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, async_save: bool
) -> None:
    copied, threads = saves_in_flight.copy_checkpoint, set()

    def noted(*arguments: Any) -> None:
        threads.add(threading.current_thread() is threading.main_thread())
        copied(*arguments)

    monkeypatch.setattr(saves_in_flight, "copy_checkpoint", noted)
    strategy = BcpSingleDeviceStrategy(async_save=async_save)
    fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], max_steps=6, strategy=strategy)
    assert threads == {not async_save}
    assert committed(tmp_path) == {"epoch=0-step=6.ckpt": 6, "last.ckpt": 6}


def test_where_files_cannot_be_linked_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def refuse(source: str, target: str, **options: Any) -> None:
        if "last.ckpt" in str(target) and "step=" in str(source):
            raise OSError("no links here")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", refuse)
    fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], max_steps=6)
    assert committed(tmp_path) == {"epoch=0-step=6.ckpt": 6, "last.ckpt": 6}


def test_a_resumed_run_goes_on_with_the_same_last_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], max_steps=3)
    fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], max_steps=9, ckpt_path="last")
    assert committed(tmp_path) == {"epoch=1-step=9.ckpt": 9, "last.ckpt": 9}


def test_a_last_checkpoint_may_be_a_link(tmp_path: Path) -> None:
    fit(tmp_path, [each_few_steps(tmp_path, save_last="link")], max_steps=6)
    assert (tmp_path / "last.ckpt").is_symlink()
    assert committed(tmp_path) == {"epoch=0-step=6.ckpt": 6, "last.ckpt": 6}
    again = each_few_steps(tmp_path, save_last=True, save_top_k=0, enable_version_counter=False)
    resumed, _ = fit(tmp_path, [again], max_steps=9, ckpt_path="last")
    assert min(resumed.losses) == 6
    assert committed(tmp_path) == {"epoch=0-step=6.ckpt": 6, "last.ckpt": 9}  # the link alone was replaced


def test_the_first_link_to_a_last_checkpoint_does_not_wait_for_its_folder(tmp_path: Path) -> None:
    fit(tmp_path, [each_few_steps(tmp_path / "new", save_last="link")], max_steps=3)
    assert committed(tmp_path / "new") == {"epoch=0-step=3.ckpt": 3, "last.ckpt": 3}


@pytest.mark.parametrize("is_local", [True, False])
def test_callbacks_that_save_at_the_same_steps_in_one_folder_take_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_local: bool
) -> None:
    hold_up_data(monkeypatch)
    folder = tmp_path if is_local else f"memory:/{tmp_path}"
    both = [ModelCheckpoint(folder, monitor="val_loss", mode=mode, save_top_k=2) for mode in ("min", "max")]
    fit(tmp_path, [*both], validates=True, max_steps=40)
    best = [path for saves in both for path in saves.best_k_models]
    assert len(set(best)) == 4
    assert all(map(bcp.open, best))
    left = map(str, tmp_path.rglob("*")) if is_local else fsspec.filesystem("memory").find(str(tmp_path))
    assert not [path for path in left if TEMPORARY_PREFIX in path]


def test_callbacks_keep_all_that_they_save_with_one_name_at_a_url_that_they_have_listed(tmp_path: Path) -> None:
    fsspec.register_implementation(Listed.protocol, Listed, clobber=True)
    (tmp_path / "earlier.ckpt").mkdir()
    several = {"monitor": "step", "filename": "{epoch}", "every_n_train_steps": 2, "save_top_k": -1}
    saves = ModelCheckpoint(f"listed://{tmp_path}", **several)
    fit(tmp_path, [saves], max_steps=8, strategy=BcpSingleDeviceStrategy(storage_options={"auto_mkdir": True}))
    assert sorted(committed(tmp_path).values()) == [2, 4, 6, 8]


def test_a_save_whose_path_cannot_be_taken_beforehand_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = FsspecStore.write

    def refuse_placeholders(store: Any, name: str, *given: Any, **named: Any) -> None:
        if name.endswith("placeholder"):
            raise bcp.StorageError("too many requests", kind="unavailable")
        write(store, name, *given, **named)

    monkeypatch.setattr(FsspecStore, "write", refuse_placeholders)
    saves = ModelCheckpoint(f"memory:/{tmp_path}", every_n_train_steps=3)
    fit(tmp_path, [saves], max_steps=3)
    assert bcp.open(saves.best_model_path).metadata["global_step"] == 3
    assert f"another callback may take the path {saves.best_model_path} as well: too many requests" in caplog.text


class Listed(LocalFileSystem):
    """A storage that looks for paths in its listings and keeps them, as s3fs does."""

    protocol = "listed"

    def ls(self, path: str, detail: bool = False, **_: Any) -> Any:
        found = super().ls(path, detail=True)
        self.dircache[self._strip_protocol(path)] = found
        return found if detail else [each["name"] for each in found]

    def exists(self, path: str, **_: Any) -> bool:
        name = self._strip_protocol(path)
        parent = self._parent(name)
        return name in {each["name"] for each in self.dircache[parent]} if parent in self.dircache else lexists(name)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()
        super().invalidate_cache(path)


def hold_up_data(monkeypatch: pytest.MonkeyPatch) -> None:
    write = FsspecStore.write

    def write_late(store: Any, name: str, *given: Any, **named: Any) -> None:
        time.sleep(0.1 if name.startswith(layout.DATA_FOLDER) else 0)
        write(store, name, *given, **named)

    monkeypatch.setattr(FsspecStore, "write", write_late)


def make_uncommitted(path: Path) -> None:
    (path / "data").mkdir(parents=True)
    (path / "data" / "0123456789abcdef-00000-000.safetensors").write_bytes(b"a part")


def test_last_passes_over_what_was_never_committed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, [each_few_steps(tmp_path, save_top_k=-1)], max_steps=6)
    make_uncommitted(tmp_path / "last.ckpt")
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        resumed, trainer = fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], max_steps=9, ckpt_path="last")
    assert min(resumed.losses) == 6
    assert "epoch=0-step=6.ckpt is the newest checkpoint beside it" in caplog.text
    assert trainer.ckpt_path == str(tmp_path / "epoch=0-step=6.ckpt")


def test_last_passes_over_a_damaged_one_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, [each_few_steps(tmp_path, save_top_k=-1)], max_steps=6)
    make_uncommitted(tmp_path / "last.ckpt")
    damaged = tmp_path / "epoch=0-step=6.ckpt"
    (damaged / "manifest.bcp").write_bytes(b"damaged")
    resumed, trainer = fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], max_steps=9, ckpt_path="last")
    assert min(resumed.losses) == 3
    assert f"{damaged} is passed over" in caplog.text
    assert trainer.ckpt_path == str(tmp_path / "epoch=0-step=3.ckpt")
    with pytest.raises(bcp.CheckpointCorruptError):
        fit(tmp_path, [], ckpt_path=damaged)


def test_before_the_first_last_checkpoint_lightning_warns_and_begins_anew(tmp_path: Path) -> None:
    for strategy in ("auto", BcpSingleDeviceStrategy()):
        with pytest.warns(UserWarning, match="there is no last checkpoint available"):
            begun, _ = fit(tmp_path, [each_few_steps(tmp_path)], max_steps=3, ckpt_path="last", strategy=strategy)
        assert min(begun.losses) == 0
        assert [path.name for path in tmp_path.glob("last*")] == []


def test_an_explicit_path_that_was_never_committed_raises(tmp_path: Path) -> None:
    fit(tmp_path, [each_few_steps(tmp_path)], max_steps=6)
    make_uncommitted(tmp_path / "last.ckpt")
    with pytest.raises(bcp.CheckpointNotFoundError, match="not committed"):
        fit(tmp_path, [], ckpt_path=tmp_path / "last.ckpt")
    with pytest.raises(bcp.CheckpointNotFoundError):
        fit(tmp_path, [], ckpt_path=tmp_path / "nothing.ckpt")


def test_after_a_resume_callbacks_hold_no_path_that_is_gone(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2)
    _, trainer = fit(tmp_path, [saves], validates=True, max_steps=40)
    keep = tmp_path / "kept" / "x.ckpt"
    trainer.save_checkpoint(keep)
    assert committed(keep.parent) == {"x.ckpt": 40}
    shutil.rmtree(saves.best_model_path)
    (left,) = set(saves.best_k_models) - {saves.best_model_path}
    again = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2)
    fit(tmp_path, [again], validates=True, max_steps=40, ckpt_path=keep)
    assert again.best_k_models.keys() == {left}
    assert again.best_model_path == left
    assert again.best_model_score == again.best_k_models[left]


@pytest.mark.parametrize("is_local", [True, False])
def test_after_a_resume_callbacks_hold_the_paths_whose_storage_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_local: bool
) -> None:
    folder = tmp_path if is_local else f"memory:/{tmp_path}"
    saves, again = (ModelCheckpoint(folder, monitor="val_loss", save_top_k=2) for _ in range(2))
    _, trainer = fit(tmp_path, [saves], validates=True, max_steps=40)
    trainer.save_checkpoint(tmp_path / "kept" / "x.ckpt")
    if is_local:
        shutil.rmtree(saves.best_model_path)
        Path(saves.best_model_path).symlink_to(saves.best_model_path)  # the system refuses to follow it

    def list_nothing(*_: Any) -> Any:
        raise bcp.StorageError("too many requests", kind="unavailable")

    monkeypatch.setattr(FsspecStore, "list", list_nothing)
    fit(tmp_path, [again], validates=True, max_steps=40, ckpt_path=tmp_path / "kept" / "x.ckpt")
    assert again.best_k_models == saves.best_k_models
    assert again.best_model_path == saves.best_model_path
    assert f"the callbacks keep {saves.best_model_path}, which may be gone: " in caplog.text


def test_a_test_loads_the_module_alone(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, monitor="val_loss")
    _, trainer = fit(tmp_path, [saves], validates=True, max_steps=40)
    held_out = DataLoader(samples()[:16], batch_size=8)
    fresh = Regression()
    other = trainer_of(BcpSingleDeviceStrategy(), [])
    (found,) = other.test(fresh, held_out, ckpt_path=saves.best_model_path)
    assert found["val_loss"] == pytest.approx(float(saves.best_model_score))
    (best,) = trainer.test(dataloaders=held_out, ckpt_path="best")
    assert best == found
    other.validate(fresh, held_out, ckpt_path=saves.best_model_path)


def test_weights_alone_load_and_do_not_resume(tmp_path: Path) -> None:
    trained, _ = fit(tmp_path, [each_few_steps(tmp_path, save_weights_only=True)], max_steps=3)
    (path,) = tmp_path.glob("*.ckpt")
    assert not any(name.startswith("optimizer") for name in bcp.open(path))
    fresh = Regression()
    bcp.load(path, {"model": fresh})
    assert same_weights(fresh, trained)
    with pytest.raises(bcp.CheckpointMismatchError, match="save_weights_only"):
        fit(tmp_path, [], ckpt_path=path)


class Color(enum.Enum):
    RED = 1


def test_hyperparameters_of_any_type_are_saved_as_text(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Configured(Regression):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            self.save_hyperparameters(settings)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.append(checkpoint["hyper_parameters"])

    settings = {"color": Color.RED, "folder": Path("x"), "of": {"lr": 0.1, 5: {1, 2}}}
    fit(tmp_path, [each_few_steps(tmp_path)], module=Configured(**settings), max_steps=3)
    (path,) = tmp_path.glob("*.ckpt")
    fit(tmp_path, [], module=Configured(**settings), max_steps=6, ckpt_path=path)
    assert seen[0]["color"] == "Color.RED"
    assert seen[0]["of"]["lr"] == 0.1


def test_objects_that_a_hook_adds_are_refused_by_name(tmp_path: Path) -> None:
    class Adding(Regression):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"color": Color.RED}

    with pytest.raises(bcp.CheckpointSaveError, match=r"extra_state.mine.color"):
        fit(tmp_path, [each_few_steps(tmp_path)], module=Adding(), max_steps=3)


@pytest.mark.parametrize("of_head", [True, False])
def test_a_hook_that_takes_weights_out_makes_the_checkpoint_smaller(tmp_path: Path, *, of_head: bool) -> None:
    class HeadOnly(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW((self.net[3] if of_head else self).parameters())

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name in [name for name in checkpoint["state_dict"] if not name.startswith("net.3.")]:
                del checkpoint["state_dict"][name]

    fit(tmp_path, [each_few_steps(tmp_path)], module=HeadOnly(), max_steps=3)
    (path,) = tmp_path.glob("*.ckpt")
    weights = [name for name in bcp.open(path) if name.startswith("model.")]
    assert weights == ["model.net.3.weight", "model.net.3.bias"]
    resumed, _ = fit(tmp_path, [], module=HeadOnly(), max_steps=4, ckpt_path=path)
    assert min(resumed.losses) == 3


@pytest.mark.parametrize("make", [lambda: EMAWeightAveraging(decay=0.5), lambda: EarlyStopping("val_loss")])
def test_callbacks_with_a_state_go_on_bit_for_bit(tmp_path: Path, make: Callable[[], Any]) -> None:
    whole, _ = fit(tmp_path, [make()], validates=True)
    fit(tmp_path, [make(), each_few_steps(tmp_path, 11)], validates=True, max_steps=11)
    (path,) = tmp_path.glob("*.ckpt")
    resumed, _ = fit(tmp_path, [make()], validates=True, ckpt_path=path)
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step >= 11}
    assert same_weights(resumed, whole)


def test_training_begins_anew_after_a_search_for_the_learning_rate(tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], [LearningRateFinder(num_training_steps=20, update_attr=False)]):
        pl.seed_everything(5, verbose=False)
        module = Regression()
        module.net[2].p = 0.0  # no dropout: after the search Lightning draws a random number more
        fit(tmp_path, callbacks, module=module, loader=DataLoader(samples(), batch_size=8))
        runs.append(module)
    assert runs[0].losses == runs[1].losses
    assert same_weights(*runs)
    assert not list(tmp_path.glob(".lr_find_*"))


class SearchInTraining(LearningRateFinder):
    """Searches for a learning rate at the start of the second epoch."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def test_streams_go_on_after_a_search_for_the_learning_rate_in_training(tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], [SearchInTraining(num_training_steps=12, update_attr=False)]):
        pl.seed_everything(5, verbose=False)
        module = Regression()
        module.net[2].p = 0.0
        fit(tmp_path, callbacks, module=module)
        runs.append(module)
    assert runs[0].losses == runs[1].losses
    assert not list(tmp_path.glob(".lr_find_*"))


def test_a_checkpoint_of_averaged_weights_tests_with_the_averaged_ones(tmp_path: Path) -> None:
    saves = each_few_steps(tmp_path, 11)
    fit(tmp_path, [EMAWeightAveraging(decay=0.5), saves], max_steps=11)
    found = bcp.load_tree(saves.best_model_path)
    assert not torch.equal(found["model"]["net.0.weight"], found["current_model"]["net.0.weight"])
    fresh = Regression()
    trainer_of(BcpSingleDeviceStrategy(), []).test(fresh, DataLoader(samples()), ckpt_path=saves.best_model_path)
    assert torch.equal(fresh.net[0].weight, found["model"]["net.0.weight"])


def resume_from_lightnings_file(tmp_path: Path) -> None:
    fit(tmp_path, [each_few_steps(tmp_path, 8, save_last=True)], max_steps=8, strategy="auto")
    assert (tmp_path / "last.ckpt").is_file()
    resumed, _ = fit(tmp_path, [each_few_steps(tmp_path, 8)], max_steps=16, ckpt_path=tmp_path / "last.ckpt")
    theirs, _ = fit(tmp_path / "own", [], max_steps=16, ckpt_path=tmp_path / "last.ckpt", strategy="auto")
    assert resumed.losses == theirs.losses


def test_files_of_lightning_itself_resume(tmp_path: Path) -> None:
    # In a process of its own, because Lightning unpickles them, which other tests here refuse.
    name = resume_from_lightnings_file.__name__
    program = f"import sys, pathlib; import {__name__} as tests; tests.{name}(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, capture_output=True)


def test_what_is_gone_may_be_removed(tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, [each_few_steps(tmp_path)], max_steps=3)
    (path,) = tmp_path.glob("*.ckpt")
    (path / "notes.txt").write_text("mine")
    trainer.strategy.remove_checkpoint(path)
    assert [each.name for each in path.iterdir()] == ["notes.txt"]
    trainer.strategy.remove_checkpoint(path)
    trainer.strategy.remove_checkpoint(tmp_path / "never.ckpt")
    make_uncommitted(tmp_path / "half.ckpt")
    trainer.strategy.remove_checkpoint(tmp_path / "half.ckpt")
    assert not (tmp_path / "half.ckpt").exists()


def test_a_save_that_fails_in_the_background_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise bcp.StorageError("the disk is gone", kind="unavailable")

    monkeypatch.setattr(saves_in_flight, "copy_step", refuse)
    with pytest.raises(bcp.CheckpointError, match="the disk is gone"):
        fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], max_steps=9)
    assert committed(tmp_path) == {"epoch=0-step=3.ckpt": 3}


def test_an_exception_saves_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise ValueError("a bad batch")

    with pytest.raises(ValueError, match="a bad batch"):
        fit(tmp_path, [OnExceptionCheckpoint(tmp_path), each_few_steps(tmp_path)], module=Regression({5: fail}))
    assert committed(tmp_path) == {"epoch=0-step=3.ckpt": 3, "on_exception.ckpt": 5}


def test_an_exception_is_raised_as_it_is_where_an_earlier_save_takes_longer_than_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_commit, commit = threading.Event(), layout.commit

    def commit_when_told(*given: Any, **named: Any) -> Any:
        assert may_commit.wait(60)
        return commit(*given, **named)

    def fail(_: object) -> None:
        raise ValueError("a bad batch")

    monkeypatch.setattr(layout, "commit", commit_when_told)
    callbacks = [OnExceptionCheckpoint(tmp_path), each_few_steps(tmp_path)]
    strategy = BcpSingleDeviceStrategy(exception_timeout_s=0.1)
    with pytest.raises(ValueError, match="a bad batch") as raised:
        fit(tmp_path, callbacks, module=Regression({5: fail}), strategy=strategy)
    may_commit.set()
    strategy._bcp_saves.settle(timeout_s=60.0)
    assert "still under way after 0.1 s" in raised.value.__notes__[0]
    assert committed(tmp_path) == {"epoch=0-step=3.ckpt": 3}


def test_streams_that_lightning_reads_ahead_of_are_refused(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="read_ahead=1"):
        fit(tmp_path, [], loader=train_loader(read_ahead=0))
    fit(tmp_path, [], loader=train_loader(read_ahead=0), limit_train_batches=4, max_steps=4)  # of known length


def test_one_process_may_use_ddp(tmp_path: Path) -> None:
    strategy = BcpDDPStrategy(process_group_backend="gloo")
    fit(tmp_path, [each_few_steps(tmp_path, save_last=True)], strategy=strategy, max_steps=3)
    assert committed(tmp_path) == {"epoch=0-step=3.ckpt": 3, "last.ckpt": 3}


def test_urls_work_as_folders_do(tmp_path: Path) -> None:
    url = "memory://runs/a"
    saves = ModelCheckpoint(url, every_n_train_steps=3, save_last=True)
    fit(tmp_path, [saves], max_steps=9)
    assert bcp.open(saves.best_model_path).metadata["global_step"] == 9
    assert bcp.open(f"{url}/last.ckpt").info.save_id == bcp.open(saves.best_model_path).info.save_id
    resumed, _ = fit(tmp_path, [], max_steps=10, ckpt_path=f"{url}/last.ckpt")
    assert min(resumed.losses) == 9


def test_doctor_says_what_a_folder_of_lightning_is_and_its_line_goes_on(tmp_path: Path) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1)
    whole, _ = fit(tmp_path, [saves], max_steps=8)
    module = Regression()
    trainer = trainer_of(BcpSingleDeviceStrategy(), [], default_root_dir=tmp_path / "again", max_steps=8)
    (path,) = [path for path in tmp_path.iterdir() if "step=4" in path.name]
    module.train_dataloader = train_loader  # the line has no loaders
    go_on(path, "Lightning", trainer=trainer, model=module)
    assert module.losses == {step: whole.losses[step] for step in range(4, 8)}
