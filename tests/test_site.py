"""The site of docs/: every public name stands in the reference, pages that run do, words are counted, and it builds."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_blocks import LANGUAGES, blocks_of, run_page
from storage.s3_service import S3Service

import bytecheckpoint as bcp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = sorted((DOCS / "api").glob("*.md"))
HOW_TO = sorted({*(DOCS / "how-to").glob("*.md")} - {DOCS / "how-to" / "index.md"})
RUN_HERE = [DOCS / "index.md", DOCS / "tutorial.md", DOCS / "concepts.md", *HOW_TO, *API]
"""Pages whose blocks run here, in the order of the page; tests/test_docs.py names those that run elsewhere."""
MAX_README_WORDS, MAX_WORDS = 1_100, 22_000
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


def test_each_public_name_has_an_example_of_its_own() -> None:
    """Right below its description; the pages run, and integrations have whole programs on pages of their own."""
    lacking = []
    for page in API:
        if page.stem == "integrations":
            continue
        _, *parts = re.split(r"^::: bytecheckpoint\.", page.read_text(), flags=re.MULTILINE)
        for part in parts:
            name, _, rest = part.partition("\n")
            if not rest.strip().startswith("```python\n"):
                lacking.append(name)
    assert lacking == []


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
    files += (INTEGRATIONS / "shared").glob("*.py")
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    defined = {node.name: node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for public in public_names(module) or [each for each in defined if not each.startswith("_")]:
        assert ast.get_docstring(defined[public]), f"{name}.{public}"


def public_names(module: Path) -> list[str]:
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


@pytest.mark.timeout(600)  # the tutorial starts processes that import torch, which takes minutes on a busy machine
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:the memory root")
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_its_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    replaced = {"/nvme/stage": str(tmp_path / "nvme"), "/dev/shm/bytecheckpoint": str(tmp_path / "memory")}
    environment = {"SLURM_JOB_END_TIME": str(time.time() + 3600)}
    if "s3://bucket" in page.read_text():
        replaced["s3://bucket"] = request.getfixturevalue("s3_folder")
        environment |= request.getfixturevalue("s3_environment")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run_page(page, folder, replaced, environment)


@pytest.fixture
def s3_folder(s3: S3Service) -> Iterator[str]:
    with s3.new_prefix() as prefix:
        yield f"s3://{s3.bucket}/{prefix}"


@pytest.fixture
def s3_environment(s3: S3Service) -> dict[str, str]:
    secrets = {"AWS_ACCESS_KEY_ID": s3.key, "AWS_SECRET_ACCESS_KEY": s3.secret}
    return {**secrets, "AWS_ENDPOINT_URL": s3.url, "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)
def test_a_page_that_runs_has_something_to_run(page: Path) -> None:
    assert LANGUAGES & {block.language for block in blocks_of(page)}


def test_there_is_no_shell_block_that_no_test_knows() -> None:
    """Commands stand in `sh` blocks on the pages that run here. `console` shows a command's output, or one that the
    page's own test runs.
    """
    elsewhere = [page for page in [ROOT / "README.md", *DOCS.rglob("*.md")] if page not in RUN_HERE]
    languages = {page.relative_to(DOCS.parent).as_posix(): {b.language for b in blocks_of(page)} for page in elsewhere}
    assert [name for name, found in languages.items() if found & {"sh", "bash", "shell"}] == []
    migration = {name for name in languages if name.startswith("docs/migrate/from-")}
    with_commands = {name for name, found in languages.items() if "console" in found}
    assert with_commands == {"docs/cli.md", "docs/name_maps.md", *migration}


def words_of(page: Path) -> int:
    """Returns the number of words outside of blocks of code: what begins with a letter, so no measured number."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return len(re.findall(r"(?<!\S)[^\w\s]*[^\W\d_]", prose))


def test_the_readme_is_read_in_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MAX_README_WORDS


def test_the_pages_that_people_write_are_no_book() -> None:
    """Programs write the API reference, the command reference and the table of faults, which count apart."""
    written_by_programs = {*API, DOCS / "cli.md", DOCS / "faults.md"}
    pages = {ROOT / "README.md", *DOCS.rglob("*.md")} - written_by_programs
    assert sum(map(words_of, pages)) <= MAX_WORDS


def test_the_citation_names_the_version_of_the_package() -> None:
    assert f"\nversion: {bcp.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_how_to_page_is_short_and_listed(page: Path) -> None:
    assert 80 <= words_of(page) <= 250
    assert f"({page.name})" in (DOCS / "how-to" / "index.md").read_text()


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
