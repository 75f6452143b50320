"""What loading does not do: unpickle anything, or look at how a checkpoint came about."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.manifest import decode_manifest, encode_manifest


def state(fill: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(fill)
    return {"model": model, "extra_state": {"epoch": int(fill)}, "rng": bcp.RankLocal(torch.get_rng_state())}


def test_neither_saving_nor_loading_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    bcp.save(tmp_path, state(1.0))
    loaded = state(0.0)
    bcp.load(tmp_path, loaded)
    assert loaded["extra_state"] == {"epoch": 1}
    assert bcp.open(tmp_path)["model.weight"][0, 0] == 1.0


def test_loading_never_reads_provenance(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(1.0))
    path = tmp_path / "manifest.bcp"
    manifest = decode_manifest(path.read_bytes())
    path.write_bytes(
        encode_manifest(replace(manifest, provenance={"world_size": "many", "created_at": [], "torch": {}}))
    )
    loaded = state(0.0)
    bcp.load(tmp_path, loaded)
    assert torch.equal(loaded["model"].weight, torch.ones(2, 3))
    assert bcp.open(tmp_path).info.world_size is None
