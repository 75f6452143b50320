"""A model without a name of its own in the checkpoint: converted from files of one model, saved bare, or beside entries
that have names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_files import assert_same, convert
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint.loading import name_scope


class Llama(torch.nn.Module):
    """Named as transformers names its parts: the names of its tensors begin with `model.` themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))


def trained(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    scheduler.last_epoch = 5
    return optimizer, scheduler


@pytest.mark.parametrize("kind", ["safetensors", "torch", "own"])
@pytest.mark.parametrize("name", ["model", "net"])
def test_what_loads_in_place_loads_after_it_was_converted(tmp_path: Path, kind: str, name: str) -> None:
    saved = Llama()
    source = tmp_path / ("source.pt" if kind == "torch" else "source")
    if kind == "safetensors":
        source.mkdir()
        save_file(saved.state_dict(), source / "model.safetensors")
    elif kind == "torch":
        torch.save(saved.state_dict(), source)
    else:
        bcp.save(source, saved.state_dict())
    convert(source, tmp_path / "converted")
    for path in (source, tmp_path / "converted"):
        model = Llama()
        report = bcp.load(path, {name: model})
        assert report.num_tensors == 4
        assert_same(model.state_dict(), saved.state_dict())


def test_a_model_without_a_name_loads_beside_entries_that_have_one(tmp_path: Path) -> None:
    saved = Llama()
    optimizer, scheduler = trained(saved)
    torch.save(
        {**saved.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()},
        tmp_path / "x.pt",
    )
    convert(tmp_path / "x.pt", tmp_path / "converted")
    for path in (tmp_path / "x.pt", tmp_path / "converted"):
        model = Llama()
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        state["scheduler"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], step_size=7)
        report = bcp.load(path, state)
        assert not report.unexpected
        assert_same(model.state_dict(), saved.state_dict())
        for of_new, of_saved in zip(model.parameters(), saved.parameters(), strict=True):
            assert_same(state["optimizer"].state[of_new], optimizer.state[of_saved])
        assert (state["scheduler"].last_epoch, state["scheduler"].step_size) == (5, 2)


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_without_a_name_is_found_beside_an_entry_that_the_checkpoint_lacks(
    tmp_path: Path, *, strict: bool
) -> None:
    model, other = Llama(), Llama()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state: dict[str, Any] = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "epoch": 7}
    if strict:
        with pytest.raises(bcp.CheckpointMismatchError, match=r"\(2 missing_key\)(?s:.*)epoch: not in the checkpoint"):
            bcp.load(tmp_path / "model.pt", state)
        return
    report = bcp.load(tmp_path / "model.pt", state, strict=False)
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    assert report.missing == ["optimizer", "epoch"]
    assert state["epoch"] == 7


def test_the_error_is_about_the_names_as_they_are_where_none_fits(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"body.weight": torch.ones(3, 2)})
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(tmp_path / "c", {"net": torch.nn.Linear(2, 3)})
    assert caught.value.kind == "missing_key"
    assert "net.weight: not in the checkpoint" in caught.value.message


def test_include_has_the_names_of_the_checkpoint_where_the_model_has_none(tmp_path: Path) -> None:
    saved, model = Llama(), Llama()
    bcp.save(tmp_path / "c", saved.state_dict())
    untouched = model.model[1].weight.detach().clone()
    report = bcp.load(tmp_path / "c", {"net": model}, include="model.0.*")
    assert report.num_tensors == 2
    assert torch.equal(model.model[0].weight, saved.model[0].weight)
    assert torch.equal(model.model[1].weight, untouched)


def test_a_checkpoint_that_has_the_model_under_its_name_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Llama()
    bcp.save(tmp_path / "c", {"model": model, "ema": torch.ones(2)})
    calls = []
    match_state = name_scope.match_state
    monkeypatch.setattr(
        name_scope,
        "match_state",
        lambda *args, **options: calls.append(1) or match_state(*args, **options),
    )
    bcp.load(tmp_path / "c", {"model": model})
    assert len(calls) == 1
