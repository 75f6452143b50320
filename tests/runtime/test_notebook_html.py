"""What a notebook shows of checkpoints, reports and handles."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.info import DataReport
from bytecheckpoint.storage.backends.local_store import LocalStore

ODD = '</td><script>alert(1)</script>&"'


def cells_of(html: str) -> list[list[str]]:
    """Rows of the table; parsing fails where anything is not escaped."""
    page = ET.fromstring(f"<div>{html}</div>")
    assert not list(page.iter("script"))
    return [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]


def test_a_save_and_a_load_show_their_facts_and_nothing_empty(tmp_path: Path) -> None:
    state = {ODD: torch.zeros(1000), "n": 1}
    handle = bcp.save(tmp_path / "c", state, step=3, metadata={ODD: ODD}, async_save=True)
    info = handle.result()
    facts = dict(cells_of(info._repr_html_())[1:])
    assert facts["step"] == "3"
    assert facts["metadata"] == f"{ODD}: {ODD}"
    assert "metrics" not in facts
    assert cells_of(handle._repr_html_())[1][:2] == ["phase", "done"]
    report = bcp.load(tmp_path / "c", {**state, "more": torch.zeros(1)}, strict=False)
    loaded = dict(cells_of(report._repr_html_())[1:])
    assert loaded["missing"] == "more"
    assert {"unexpected", "mismatched", "random_restores"} & set(loaded) == set()


@pytest.mark.parametrize("restarted", [True, False])
def test_true_and_false_are_no_numbers(tmp_path: Path, restarted: bool) -> None:
    report = DataReport(num_streams=2000, saved_size=2, size=1, elastic="restart", restarted=restarted)
    facts = dict(cells_of(report._repr_html_())[1:])
    assert facts["restarted"] == str(restarted)
    assert facts["num_streams"] == "2,000"
    info = bcp.save(tmp_path / "c", {"x": 1}, metadata={"bf16": restarted, "flags": [restarted, 1]}).result()
    assert dict(cells_of(info._repr_html_())[1:])["metadata"] == f"bf16: {restarted}, flags: {restarted}, 1"


def test_a_failed_save_shows_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StorageError("no such luck", kind="unavailable")

    monkeypatch.setattr(LocalStore, "write", refuse)
    handle = bcp.save(tmp_path / "c", {"x": torch.zeros(3)}, async_save=True)
    error = handle.exception()
    assert dict(cells_of(handle._repr_html_())[1:])["error"].startswith(str(error)[:50])


def test_a_checkpoint_of_many_tensors_shows_some_and_completes_all(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {f"t{number}": torch.zeros(2) for number in range(60)} | {ODD: torch.zeros(1)})
    with bcp.open(tmp_path / "c") as opened:
        html = opened._repr_html_()
        assert len(cells_of(html)) == 51
        assert "and 11 more" in html
        assert set(opened._ipython_key_completions_()) == set(opened)


@pytest.mark.parametrize("size", [10**6])
def test_large_values_stay_small(tmp_path: Path, size: int) -> None:
    info = bcp.save(tmp_path / "c", {"x": 1}, metadata={"long": "x" * size, "many": list(range(1000))})
    if isinstance(info, bcp.SaveHandle):
        info = info.result()
    assert len(info._repr_html_()) < 4000
