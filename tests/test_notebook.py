"""The notebook runs from top to bottom in a new folder, and shows tables where it promises them."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from rank_programs import reserved_port
from traitlets.config import Config

TOUR = Path(__file__).parents[1] / "examples" / "tour.ipynb"


CHANNELS = ("shell", "iopub", "stdin", "hb", "control")


@pytest.mark.timeout(600)  # its cells start processes that import torch, which takes minutes on a busy machine
def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "it is committed without outputs"
    with ExitStack() as held:
        # Jupyter picks ports that are free, and its kernel listens there seconds later.
        ports = {f"{channel}_port": held.enter_context(reserved_port()) for channel in CHANNELS}
        client = NotebookClient(
            notebook,
            timeout=500,
            startup_timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": tmp_path}},
            config=Config({"KernelManager": {"cache_ports": False, **ports}}),
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
