"""`bcp doctor --checkpoint` on what the integrations save: where it came from, and the line with which a run goes on.
tests/frameworks runs each line in its framework.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import get_args

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.info import INTEGRATION
from bytecheckpoint.integrations.shared.mark import Name, marked
from bytecheckpoint.tools.analysis.diagnosis.checkpoint_diagnosis import CheckpointDiagnosis, diagnose
from bytecheckpoint.tools.analysis.diagnosis.integrations import resume_code

LINES = {
    "accelerate": "load_state(accelerator, {path})",
    "dcp": "dcp.load(state, checkpoint_id={path})",
    "deepspeed": "load_checkpoint(engine, {root}, tag='run-3')",
    "fabric": "fabric.load({path}, state)",
    "lightning": "trainer.fit(model, ckpt_path={path})",
    "megatron": "--load {root} --ckpt-step 3",
    "megatron_bridge": "checkpoint.load={root} checkpoint.ckpt_step=3",
    "torchtitan": "--checkpoint.folder {root} --checkpoint.load_step 3",
    "transformers": "trainer.train(resume_from_checkpoint={path})",
    "verl": "trainer.resume_mode=resume_path trainer.resume_from_path={root}",
}


def saved(path: Path, name: Name, **metadata: object) -> CheckpointDiagnosis:
    bcp.save(path, {"model": {"w": torch.ones(2)}}, metadata=marked(name, metadata))
    return diagnose(str(path), {})


@pytest.mark.parametrize("name", get_args(Name))
def test_each_integration_has_a_line_with_which_a_run_goes_on(tmp_path: Path, name: Name) -> None:
    path = tmp_path / "a folder's" / "run-3"
    found = saved(path, name)
    assert found.origin is not None
    assert found.origin.known_by == "'bcp_integration' in the metadata"
    assert found.step == 3
    code = found.code[0]
    assert code.does == f"go on in {found.origin.writer.removeprefix('this library within ')}"
    is_python = "options" not in code.needs
    root = repr(str(path.parent)) if is_python else shlex.quote(str(path.parent))
    expected = LINES[name].format(path=repr(str(path)), root=root)
    assert code.lines[0].replace('"run-3"', "'run-3'") == expected
    if is_python:
        compile("\n".join([*code.imports, *code.lines]), name, "exec")
    assert len(found.code) > 1  # and those that need no framework


def test_a_step_of_verl_without_roles_is_its_own_folder(tmp_path: Path) -> None:
    (line,) = saved(tmp_path / "global_step_4", "verl").code[0].lines
    assert line.endswith(f"={tmp_path}/global_step_4")


def test_a_role_of_verl_by_its_bare_name_has_the_step_in_the_folder_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path without `global_step_` is refused by verl."""
    folder = tmp_path / "global_step_4"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (line,) = saved(Path("actor"), "verl").code[0].lines
    assert line.endswith(f"={folder}")


@pytest.mark.parametrize(("here", "path"), [("actor", "."), ("actor", "../actor"), ("actor", "./"), ("", "./actor")])
def test_a_role_of_verl_by_a_relative_path_has_the_step_in_the_folder_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, path: str
) -> None:
    """In `global_step_4/actor` it got the folder of the role for `.`, and `..` for `../actor`."""
    folder = tmp_path / "global_step_4"
    saved(folder / "actor", "verl")
    monkeypatch.chdir(folder / here)
    (line,) = diagnose(path, {}).code[0].lines
    assert line.endswith(f"={folder}")


def test_a_step_of_verl_in_which_the_command_runs_is_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "global_step_4", "verl")
    monkeypatch.chdir(tmp_path / "global_step_4")
    (line,) = diagnose(".", {}).code[0].lines
    assert line.endswith(f"={tmp_path}/global_step_4")


def test_a_role_of_verl_at_a_url_has_the_step_in_the_folder_around_it(tmp_path: Path) -> None:
    saved(tmp_path, "verl")
    (code,) = resume_code(bcp.open(tmp_path).manifest, "s3://bucket/global_step_4/actor/", 4)
    assert code.lines[0].endswith("=s3://bucket/global_step_4")


@pytest.mark.parametrize(("path", "root"), [("run-3", "."), ("/run-3", "/"), ("/run-3/", "/"), ("a/run-3", "a")])
def test_the_root_of_a_run_is_the_folder_above_the_checkpoint(tmp_path: Path, path: str, root: str) -> None:
    saved(tmp_path, "megatron")
    (code,) = resume_code(bcp.open(tmp_path).manifest, path, 3)
    assert code.lines == [f"--load {root} --ckpt-step 3"]


def test_weights_alone_and_other_marks_have_no_line_to_go_on_with(tmp_path: Path) -> None:
    found = saved(tmp_path / "weights", "lightning", weights_only=True)
    assert not found.code[0].does.startswith("go on in")
    bcp.save(tmp_path / "other", {"model": {"w": torch.ones(2)}}, metadata={INTEGRATION: ["of another"]})
    found = diagnose(str(tmp_path / "other"), {})
    assert found.origin == ("this library", "manifest.bcp")
