"""The notebook runs from top to bottom in a new folder, and shows tables where it promises them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

TOUR = Path(__file__).parents[1] / "examples" / "tour.ipynb"


@pytest.fixture
def through_sockets() -> Iterator[Config]:
    """The kernel listens on sockets in a folder, whose names have to be short: ports that were free when it was started
    may be another's by the time that it is there.
    """
    with tempfile.TemporaryDirectory(prefix="tour-", dir="/tmp") as folder:
        yield Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})


@pytest.mark.timeout(600)  # its cells start processes that import torch, which takes minutes on a busy machine
def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_sockets: Config) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "it is committed without outputs"
    client = NotebookClient(
        notebook,
        timeout=500,
        startup_timeout=300,
        kernel_name="python3",
        config=through_sockets,
        resources={"metadata": {"path": tmp_path}},
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    tables = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert [title for title in ("CheckpointInfo", "LoadReport", "SaveHandle") if title in "".join(tables)] == [
        "CheckpointInfo",
        "LoadReport",
        "SaveHandle",
    ]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "report written to" in printed
    assert "error" not in printed
    assert list(tmp_path.rglob("export/model.safetensors"))
