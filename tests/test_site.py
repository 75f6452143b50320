"""The site of docs/: every public name stands in the reference, pages that run do, words are counted, and it builds."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import LANGUAGES, blocks_of, run_page

import bytecheckpoint as bcp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = sorted((DOCS / "api").glob("*.md"))
RUN_HERE = [DOCS / "index.md", *API]
"""Pages whose blocks run here, in the order of the page; tests/test_docs.py names those that run elsewhere."""
INTEGRATIONS = ROOT / "bytecheckpoint" / "integrations"


def directives() -> set[str]:
    return {name for page in API for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}


def test_every_public_name_stands_in_the_reference() -> None:
    names = {f"bytecheckpoint.{name}" for name in bcp.__all__} - {"bytecheckpoint.data"}
    names |= {f"bytecheckpoint.data.{name}" for name in bcp.data.__all__}
    assert names - directives() == {"bytecheckpoint.__version__"}
    assert "`bytecheckpoint.__version__`" in (DOCS / "api" / "save-load.md").read_text()


def test_every_public_object_has_a_docstring() -> None:
    policies = [(module, name) for module in (bcp.save_policies, bcp.keep_policies) for name in module.__all__]
    public = [(bcp, name) for name in bcp.__all__ if name != "__version__"]
    for module, name in [*public, *policies, *((bcp.data, name) for name in bcp.data.__all__)]:
        assert getattr(module, name).__doc__, name


def public_integrations() -> dict[str, Path]:
    paths = [path for path in INTEGRATIONS.iterdir() if path.name not in {"shared", "__init__.py", "__pycache__"}]
    return {path.stem: path / "__init__.py" if path.is_dir() else path for path in paths}


def test_every_integration_stands_in_the_reference() -> None:
    named = {name for name in directives() if name.startswith("bytecheckpoint.integrations.")}
    assert named == {f"bytecheckpoint.integrations.{name}" for name in public_integrations()}


@pytest.mark.parametrize(("name", "module"), sorted(public_integrations().items()))
def test_public_names_of_an_integration_have_docstrings(name: str, module: Path) -> None:
    """Read, not imported: its framework may be missing."""
    assert ast.get_docstring(ast.parse(module.read_text())), name
    files = [module] if module.stem == name else list(module.parent.glob("*.py"))
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    defined = {node.name: node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for public in public_names(module) or [each for each in defined if not each.startswith("_")]:
        assert ast.get_docstring(defined[public]), f"{name}.{public}"


def public_names(module: Path) -> list[str]:
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_its_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run_page(page, folder, {}, {})


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)
def test_a_page_that_runs_has_something_to_run(page: Path) -> None:
    assert LANGUAGES & {block.language for block in blocks_of(page)}


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is in the extra docs: `make docs`")
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert [link for link in loaded if "://" in link] == [], page


def test_make_builds_the_site_as_the_test_does() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "-m mkdocs build --quiet --strict" in makefile
    assert "make docs" in (ROOT / ".ci" / "run").read_text()
