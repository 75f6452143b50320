"""What the README shows runs as it stands."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_first_example_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(README), "exec"), {})
    assert printed.getvalue().startswith("{'epoch': 3} 1000\ntensor([[")
    assert (tmp_path / "ckpt" / "step_00001000" / "manifest.bcp").is_file()


def test_links_to_files_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
