"""Hyperparameters of modules and data modules: what Lightning's Trainer saves, and what hooks get when it goes on."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.saving import _load_state
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from bytecheckpoint.integrations.lightning import BcpSingleDeviceStrategy
from frameworks.lightning.lightning_runs import train_loader, trainer_of

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Module(pl.LightningModule):
    """A module with hyperparameters of any kind; notes the checkpoint that it is given."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.net = torch.nn.Linear(8, 1)
        self.given: dict[str, Any] = {}

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.given = checkpoint


class Data(pl.LightningDataModule):
    """A data module with hyperparameters of any kind."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)

    def train_dataloader(self) -> DataLoader[Any]:
        return train_loader()


def given_back(folder: Path, module: Any, data: Any) -> dict[str, Any]:
    """Trains, saves, goes on from there in a new trainer, and returns the checkpoint that hooks were given."""
    path = folder / "a.ckpt"
    options: dict[str, Any] = {"default_root_dir": folder, "enable_checkpointing": False}
    trainer = trainer_of(BcpSingleDeviceStrategy(), [], max_steps=1, **options)
    trainer.fit(Module(module), Data(data))
    trainer.save_checkpoint(path)
    resumed = Module(module)
    trainer = trainer_of(BcpSingleDeviceStrategy(), [], max_steps=2, **options)
    trainer.fit(resumed, Data(data), ckpt_path=path)
    assert trainer.global_step == 2
    return resumed.given


def as_namespace(values: dict[str, Any]) -> Namespace:
    return Namespace(**values)


@pytest.mark.parametrize("make", [dict, as_namespace, OmegaConf.create])
def test_hyperparameters_of_modules_and_data_modules_come_back_as_dicts(
    tmp_path: Path, make: Callable[[dict[str, Any]], Any]
) -> None:
    of_module, of_data = {"width": 16, "of": {"lr": 0.1}}, {"batch": 2, "name": "x"}
    given = given_back(tmp_path, make(of_module), make(of_data))
    assert given["hyper_parameters"] == of_module
    assert given["datamodule_hyper_parameters"] == of_data
    assert type(given["datamodule_hyper_parameters"]) is dict
    made = _load_state(Data, given)  # what load_from_checkpoint does with the checkpoint that it has read
    assert dict(made.hparams) == of_data


def test_lists_in_configs_of_omegaconf_come_back_as_lists(tmp_path: Path) -> None:
    values = {"layers": [1, 2], "of": {"betas": [0.9, {"x": [None]}]}}
    given = given_back(tmp_path, {"cfg": OmegaConf.create(values), "all": [OmegaConf.create(values)]}, values)
    assert given["hyper_parameters"] == {"cfg": values, "all": [values]}
    assert given_back(tmp_path, OmegaConf.create(values), values)["hyper_parameters"] == values


def test_configs_of_omegaconf_that_lack_values_are_saved_as_they_were_written(tmp_path: Path) -> None:
    missing, unknown = {"folder": "???", "lr": 0.1, "same": "${lr}"}, {"folder": "${oc.env:BCP_NO_SUCH}", "lr": 0.1}
    given = given_back(tmp_path, {"cfg": OmegaConf.create(missing)}, {"cfg": OmegaConf.create(unknown)})
    assert given["hyper_parameters"] == {"cfg": {"folder": "???", "lr": 0.1, "same": 0.1}}
    assert given["datamodule_hyper_parameters"] == {"cfg": unknown}


def test_an_item_that_refers_to_nothing_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    values = {"lr": 0.1, "same": "${lr}", "paths": ["${oc.env:BCP_NO_SUCH}", "${same}"], "of": {"lr": "${lr}"}}
    given = given_back(tmp_path, OmegaConf.create(values), {"x": 1})
    paths = ["${oc.env:BCP_NO_SUCH}", 0.1]
    assert given["hyper_parameters"] == {"lr": 0.1, "same": 0.1, "paths": paths, "of": {"lr": 0.1}}
