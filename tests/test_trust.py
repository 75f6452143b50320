"""What loading does not do: unpickle anything, or look at how a checkpoint came about. That nothing in the library
pickles is looked to in the whole suite (no_pickle.py); here it is shown that this bites.
"""

from __future__ import annotations

import ast
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import no_pickle
import pytest
import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint.manifest import decode_manifest, encode_manifest
from distributed.workers import WorkerPool


def state(fill: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(fill)
    return {"model": model, "extra_state": {"epoch": int(fill)}, "rng": bcp.RankLocal(torch.get_rng_state())}


def test_neither_saving_nor_loading_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    bcp.save(tmp_path, state(1.0))
    loaded = state(0.0)
    bcp.load(tmp_path, loaded)
    assert loaded["extra_state"] == {"epoch": 1}
    assert bcp.open(tmp_path)["model.weight"][0, 0] == 1.0


def test_loading_never_reads_provenance(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(1.0))
    path = tmp_path / "manifest.bcp"
    manifest = decode_manifest(path.read_bytes())
    path.write_bytes(
        encode_manifest(replace(manifest, provenance={"world_size": "many", "created_at": [], "torch": {}}))
    )
    loaded = state(0.0)
    bcp.load(tmp_path, loaded)
    assert torch.equal(loaded["model"].weight, torch.ones(2, 3))
    assert bcp.open(tmp_path).info.world_size is None


ASKS_FOR_PICKLE = {
    "loads": "import pickle\npickle.loads(content)",
    "Unpickler": "import io, pickle\npickle.Unpickler(io.BytesIO(content)).load()",
    "dumps": "import pickle\npickle.dumps([])",
    "an unpickler of before": "old_unpickler(io.BytesIO(content)).load()",
    "torch.load": "import io, torch\ntorch.load(io.BytesIO(content))",
    "torch.save": "import io, torch\ntorch.save([], io.BytesIO())",
    "a collective of objects": "import torch.distributed as dist\ndist.broadcast_object_list([1])",
    "torch's own code": "torch.distributed.distributed_c10d._object_to_tensor([], torch.device('cpu'), None)",
}
UNPICKLER_OF_BEFORE = pickle.Unpickler.__mro__[1]


def ask_as_the_library(what: str) -> None:
    """Runs it as if it stood in a module of the library."""
    import io

    code = compile(ASKS_FOR_PICKLE[what], f"{no_pickle.LIBRARY[0]}made_up.py", "exec")
    content = pickle.dumps(OrderedDict(a=1))
    exec(code, {"content": content, "io": io, "torch": torch, "old_unpickler": UNPICKLER_OF_BEFORE})


@pytest.mark.parametrize("what", sorted(ASKS_FOR_PICKLE))
def test_pickle_in_the_library_would_be_noticed(what: str) -> None:
    with pytest.raises(no_pickle.PickleUsedError, match=r"made_up\.py:"):
        ask_as_the_library(what)
    assert len(no_pickle.uses) == 1
    no_pickle.uses.clear()


def ask_in_a_worker(_rank: int, _world_size: int) -> bool:
    try:
        ask_as_the_library("loads")
    except no_pickle.PickleUsedError:
        return True
    return False


def test_pickle_in_a_worker_would_be_noticed(workers: WorkerPool) -> None:
    assert workers.run(ask_in_a_worker, world_size=2) == [True, True]


class PicklesItself:
    def state_dict(self) -> dict[str, Any]:
        return {"pickled": pickle.dumps([1])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = pickle.loads(state_dict["pickled"])


def test_what_an_object_of_the_user_does_is_its_own_business(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"mine": PicklesItself()})
    loaded = {"mine": PicklesItself()}
    bcp.load(tmp_path, loaded)
    assert loaded["mine"].loaded == [1]


UNPICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch.package"}
PICKLING_CALLS = {*no_pickle.COLLECTIVES, "_object_to_tensor", "_tensor_to_object"}


@pytest.mark.parametrize("folder", no_pickle.LIBRARY)
def test_no_module_of_the_library_names_an_unpickler(folder: str) -> None:
    for path in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            assert str(path) in no_pickle.WRITERS or not UNPICKLERS & set(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
                assert node.attr in {"Pickler", "dumps"}, f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in PICKLING_CALLS, f"{path}:{node.lineno}"
                refused = {"load"} if str(path) in no_pickle.WRITERS else {"load", "save"}
                is_torchs = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in refused
                assert not is_torchs, f"{path}:{node.lineno}"


def test_the_collectives_that_pickle_are_those_of_torch() -> None:
    named = {name for name in dir(dist) if "object" in name.lower() and callable(getattr(dist, name))}
    assert set(no_pickle.COLLECTIVES) <= named
    assert not {name for name in named if name not in no_pickle.COLLECTIVES and not name.startswith("_")}
