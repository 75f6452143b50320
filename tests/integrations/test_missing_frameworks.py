"""An integration without its framework says what to install, and nothing imports a framework of another one."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python

ROOT = Path(__file__).parents[2]
INTEGRATIONS = ROOT / "bytecheckpoint" / "integrations"
FRAMEWORKS = {
    "accelerate": {"accelerate"},
    "deepspeed": {"deepspeed"},
    "lightning": {"lightning"},
    "megatron": {"megatron"},
    "megatron_bridge": {"megatron"},
    "ray": {"ray"},
    "torchtitan": {"torchtitan", "tyro"},
    "transformers": {"transformers", "accelerate"},  # the Trainer runs on accelerate
    "verl": {"verl"},
}
"""The packages that each integration imports."""
OF_TORCH = {"dcp", "shared"}
WITHOUT = """
import importlib, json, pathlib, sys

frameworks, integrations = map(json.loads, sys.argv[1:])
asked = []


class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in frameworks:
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
package = importlib.import_module("bytecheckpoint")
root = pathlib.Path(package.__file__).parent
files = [file.relative_to(root.parent).with_suffix("") for file in root.rglob("*.py")]
names = sorted(".".join(file.parts).removesuffix(".__init__") for file in files)
of_others = tuple(f"bytecheckpoint.integrations.{name}" for name in integrations)
for name in names:
    if not name.startswith(of_others) and not name.endswith("__main__"):
        importlib.import_module(name)
asked_by_us, told = list(asked), {}
for name in integrations:
    try:
        importlib.import_module(f"bytecheckpoint.integrations.{name}")
    except ImportError as error:
        told[name] = [type(error).__name__, str(error)]
print(json.dumps({"asked": asked_by_us, "told": told}))
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """The outcome of imports where no framework is installed."""
    program = tmp_path_factory.mktemp("without") / "without.py"
    program.write_text(WITHOUT)
    missing = sorted(set().union(*FRAMEWORKS.values()) | {"peft", "composer"})
    command = [forked_python(), str(program), json.dumps(missing), json.dumps(sorted(FRAMEWORKS))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, dict[str, list[str]]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
def test_an_integration_without_its_framework_is_an_import_error_with_the_pip_line(without, name: str) -> None:
    kind, told = without["told"][name]
    assert kind == "ImportError"
    assert f"bytecheckpoint.integrations.{name} needs a package that is not installed" in told
    assert "Run: pip install '" in told


def test_the_library_without_its_integrations_asks_for_no_framework(without) -> None:
    assert without["asked"] == []


def imported(name: str) -> set[str]:
    """The names of all modules that the files of an integration import."""
    place = INTEGRATIONS / name
    found = set()
    for file in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
            elif isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
    return found


@pytest.mark.parametrize("name", sorted(FRAMEWORKS.keys() | OF_TORCH))
def test_an_integration_imports_no_framework_of_another(name: str) -> None:
    modules = imported(name)
    others = set().union(*FRAMEWORKS.values()) - FRAMEWORKS.get(name, set())
    assert {module for module in modules if module.partition(".")[0] in others} == set()
    ours = {module.split(".")[2] for module in modules if module.startswith("bytecheckpoint.integrations.")}
    shares_a_framework = {each for each in FRAMEWORKS if FRAMEWORKS[each] == FRAMEWORKS.get(name)}
    assert ours <= {name, *OF_TORCH, *shares_a_framework}


def test_each_integration_is_known_here() -> None:
    there = {path.stem for path in INTEGRATIONS.iterdir() if path.name[0] not in "_."}
    assert there == FRAMEWORKS.keys() | OF_TORCH
