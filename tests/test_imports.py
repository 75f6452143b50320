"""What `import bytecheckpoint` gives, what it costs, and that all of the tree is in the wheel."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bytecheckpoint as bcp

ROOT = Path(__file__).parent.parent
PUBLIC_NAMES = {
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "DataLoaderState",
    "DataReport",
    "LoadOptions",
    "LoadReport",
    "LocalInfo",
    "LoggedData",
    "ManagerOptions",
    "ManagerStats",
    "Memory",
    "NameMap",
    "Progress",
    "RankLocal",
    "RecoveredSave",
    "RngState",
    "SaveHandle",
    "SaveOptions",
    "StorageError",
    "UnsafeCheckpointError",
    "__version__",
    "data",
    "delete",
    "every",
    "keep_policies",
    "latest",
    "load",
    "load_tree",
    "open",
    "progress_bar",
    "recover",
    "resume",
    "save",
    "save_policies",
    "steps",
    "warm_up",
}


def run_python(code: str) -> str:
    """What the code prints in a new interpreter that stands in the project's root."""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_public_names_are_exactly_these() -> None:
    assert set(bcp.__all__) == PUBLIC_NAMES
    assert len(bcp.__all__) == len(PUBLIC_NAMES)


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    assert dir(bcp) == bcp.__all__
    code = "import bytecheckpoint as bcp; bcp.save, bcp.recover, bcp.open; print(dir(bcp) == bcp.__all__)"
    assert run_python(code).strip() == "True"


def test_the_version_is_that_of_the_package() -> None:
    assert bcp.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


CLASSES = sorted(name for name in PUBLIC_NAMES if isinstance(getattr(bcp, name), type))


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_shows_nothing_that_is_not_documented(name: str) -> None:
    cls = getattr(bcp, name)
    inherited = set(dir(OSError)) if issubclass(cls, Exception) else set()
    shown = {key: getattr(cls, key) for key in dir(cls) if not key.startswith("_") and key not in inherited}
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    assert [key for key, value in shown.items() if key not in fields and not getattr(value, "__doc__", None)] == []


def test_a_handle_offers_what_is_promised_of_it() -> None:
    promised = {"progress", "staged", "local", "held", "result", "done", "exception", "add_done_callback"}
    assert {key for key in dir(bcp.SaveHandle) if not key.startswith("_")} == promised


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES - {"__version__"}))
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(bcp, name).__doc__


@pytest.mark.parametrize("name", ["load", "recover", "save"])
def test_each_argument_of_a_function_is_documented_on_a_line_of_its_own(name: str) -> None:
    function = getattr(bcp, name)
    lines = (inspect.getdoc(function) or "").splitlines()
    assert {"Args:", "Raises:"} <= set(lines)
    parameters = inspect.signature(function).parameters
    assert [key for key in parameters if not any(line.startswith(f"    {key}: ") for line in lines)] == []


def test_the_package_has_a_guided_tour() -> None:
    assert bcp.__doc__
    assert "save" in bcp.__doc__


@pytest.mark.parametrize("statement", ["import bytecheckpoint", "from bytecheckpoint import save"])
def test_importing_brings_no_object_store_and_no_command_line(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = set(run_python(code).split())
    assert loaded & {"s3fs", "botocore", "aiobotocore", "rich", "click"} == set()


def test_torch_is_imported_by_the_first_name_that_needs_it() -> None:
    code = "import sys, bytecheckpoint as bcp; print('torch' in sys.modules); bcp.save; print('torch' in sys.modules)"
    assert run_python(code).split() == ["False", "True"]


def test_importing_and_the_commands_help_wait_for_no_array_library_and_no_command() -> None:
    code = "import sys, bytecheckpoint; print(*sys.modules)"
    assert {"numpy", "msgspec"} & set(run_python(code).split()) == set()
    code = """
import sys
from bytecheckpoint.tools.main import main
sys.argv = ["bcp", "--help"]
try:
    main()
finally:
    print("MODULES", *sys.modules)
"""
    text, _, modules = run_python(code).partition("MODULES")
    assert "verify" in text
    assert {"numpy", "msgspec", "fsspec", "bytecheckpoint.tools.verify"} & set(modules.split()) == set()


def test_showing_a_local_checkpoint_waits_for_no_torch_no_fsspec_and_no_report(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"x": 1})
    code = f"""
import sys
from bytecheckpoint.tools.main import main
sys.argv = ["bcp", "show", {str(tmp_path / "c")!r}]
try:
    main()
finally:
    print("MODULES", *sys.modules)
"""
    modules = set(run_python(code).partition("MODULES")[2].split())
    unwanted = {"torch", "fsspec", "rich", "numpy.ma", "asyncio", "bytecheckpoint.tools.render.html.checkpoint_page"}
    assert unwanted & modules == set()
    assert "numpy" in modules


def test_a_first_save_of_plain_tensors_imports_no_distributed_tensors(tmp_path: Path) -> None:
    """`torch.distributed.tensor` takes half a second, most of it for sympy. An optimizer of torch imports it itself."""
    code = f"""
import sys, torch
import bytecheckpoint as bcp
model = torch.nn.Linear(3, 3)
bcp.save({str(tmp_path / "c")!r}, {{"model": model, "lr": 0.1}})
bcp.load({str(tmp_path / "c")!r}, {{"model": model}})
print(*sys.modules)
"""
    modules = set(run_python(code).split())
    distributed = {"tensor", "fsdp", "_functional_collectives", "_shard.sharded_tensor.api"}
    assert {"sympy", "fsspec", "botocore", *(f"torch.distributed.{name}" for name in distributed)} & modules == set()


def test_no_collection_walks_the_heap_while_a_name_is_imported(monkeypatch) -> None:
    was_enabled = []
    monkeypatch.setattr(bcp, "import_module", lambda name: was_enabled.append(gc.isenabled()) or sys.modules[name])
    assert bcp.save is sys.modules["bytecheckpoint.api"].save
    assert was_enabled == [False]
    assert gc.isenabled()


def test_importing_starts_nothing() -> None:
    code = """
import logging, signal, sys, threading
import torch, torch.distributed
before = (threading.active_count(), signal.getsignal(signal.SIGTERM), sys.excepthook, logging.root.handlers[:])
import bytecheckpoint.api
after = (threading.active_count(), signal.getsignal(signal.SIGTERM), sys.excepthook, logging.root.handlers[:])
print(before == after)
"""
    assert run_python(code).strip() == "True"


def test_every_folder_of_the_package_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    trees = (ROOT / "bytecheckpoint", ROOT / "tools")
    folders = {path.parent.relative_to(ROOT) for tree in trees for path in tree.rglob("__init__.py")}
    assert {path.parent.relative_to(ROOT) for tree in trees for path in tree.rglob("*.py")} == folders
    names = {".".join(folder.parts) for folder in folders}
    assert set(settings["packages"]) == {
        f"bytecheckpoint.{name}" if name.startswith("tools") else name for name in names
    }


def test_every_name_map_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "bytecheckpoint"
    installed = {path for glob in settings["package-data"]["bytecheckpoint"] for path in package.glob(glob)}
    assert set(package.rglob("*.toml")) <= installed
    assert set(package.rglob("*.toml"))


def test_no_top_level_tools_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"bytecheckpoint.tools": "tools"}
    assert "tools" not in settings["packages"]
