"""A `~` at the start of a local path is the home folder, everywhere, and a path may be a pathlib.Path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.tools.main import cli


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


@pytest.mark.parametrize("kind", [str, Path])
def test_every_function_expands_it(home: Path, kind: Any) -> None:
    state = {"x": torch.ones(3)}
    bcp.save(kind("~/run"), state, step=1, options=bcp.SaveOptions(local_stage=kind("~/stage")))
    bcp.save(kind("~/run"), state, step=2, role="actor")
    assert (home / "run" / "step_00000001" / "manifest.bcp").is_file()
    assert (home / "run" / "actor" / "step_00000002").is_dir()
    assert (home / "stage").is_dir()
    bcp.load(kind("~/run"), state)
    bcp.load(kind("~/run"), state, role="actor")
    assert (bcp.latest(kind("~/run")), bcp.steps(kind("~/run"))) == (1, [1])
    assert bcp.open(kind("~/run")).info.path == str(home / "run" / "step_00000001")
    assert bcp.recover(kind("~/run"), options=bcp.SaveOptions(local_stage=kind("~/stage"))) == []
    assert not list((home.parent / "elsewhere").iterdir())


def test_a_foreign_file_is_found_there(home: Path) -> None:
    torch.save({"x": torch.ones(3)}, home / "model.pt")
    assert list(bcp.open("~/model.pt")) == ["x"]


def test_the_command_line_expands_it(home: Path) -> None:
    bcp.save(home / "run", {"model": {"x": torch.ones(3)}})
    commands: list[list[str]] = [
        ["ls", "~/run"],
        ["show", "~/run", "--html", "~/report.html"],
        ["verify", "~/run"],
        ["gc", "~/run", "--local-stage=~/stage"],
        ["diff", "~/run", "~/run"],
        ["convert", "~/run", "~/model.pt", "--to", "torch"],
        ["convert", "~/run", "~/linked", "--to", "bcp", "--link"],
    ]
    for command in commands:
        ended = CliRunner().invoke(cli, command)
        assert ended.exit_code == 0, ended.output
    assert str(home / "memory") in CliRunner().invoke(cli, ["memory", "ls", "--memory-root=~/memory"]).output
    assert (home / "model.pt").is_file()
    assert (home / "report.html").is_file()
    assert (home / "linked" / "manifest.bcp").is_file()
    assert not list((home.parent / "elsewhere").iterdir())


def test_a_name_elsewhere_in_a_path_and_a_url_stay(home: Path) -> None:
    bcp.save("a~b", {"x": 1})
    bcp.save("memory://home/~/x", {"x": 1})
    assert (home.parent / "elsewhere" / "a~b").is_dir()
    assert bcp.open("memory://home/~/x").info.path == "memory://home/~/x"
