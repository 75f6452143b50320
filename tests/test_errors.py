"""The error tree is what its docstring draws, so that callers may rely on classes and kinds."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.errors import ERROR_CLASSES, CheckpointError, and_more

BUILTINS: dict[str, type[Exception]] = {
    "CheckpointNotFoundError": FileNotFoundError,
    "CheckpointExistsError": FileExistsError,
    "CheckpointCorruptError": ValueError,
    "CheckpointMismatchError": ValueError,
    "CheckpointSaveError": RuntimeError,
    "StorageError": OSError,
    "UnsafeCheckpointError": ValueError,
}
KINDS = {
    "CheckpointNotFoundError": "not_found, not_committed, missing_file, replaced",
    "CheckpointExistsError": "exists",
    "CheckpointCorruptError": "checksum, truncated, bad_manifest, unsupported_version, missing_file",
    "CheckpointMismatchError": "missing_key, unexpected_key, shape, dtype, coverage, conflict",
    "CheckpointSaveError": "no_space, storage, rank_failed, rank_missing, unsupported_value, superseded, not_finite",
    "StorageError": "permission, unavailable, unsupported",
    "UnsafeCheckpointError": "pickle_refused, path_escape, limits_exceeded",
}


def drawn() -> dict[str, tuple[str, str]]:
    """Class -> builtin and kinds, as the module's docstring draws them."""
    text = re.sub(r"\n\s*│\s+(?=[a-z])", " ", inspect.getdoc(errors) or "")
    lines = re.findall(r"[├└]── (\w+)\s+\((\w+)\)\s+([\w, ]+)", text)
    return {name: (builtin, re.sub(r"\s+", " ", kinds.strip())) for name, builtin, kinds in lines}


def test_the_tree_is_as_drawn() -> None:
    assert drawn() == {name: (builtin.__name__, KINDS[name]) for name, builtin in BUILTINS.items()}


def raised_kinds() -> Iterator[tuple[str, str]]:
    """Yields each class of the tree that the package raises, with each kind that is written out in the call."""
    for path in sorted(Path(errors.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KINDS:
                kinds = [ast.walk(keyword.value) for keyword in call.keywords if keyword.arg == "kind"]
                for node in chain.from_iterable(kinds):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield call.func.id, node.value


def test_what_is_raised_is_listed_and_what_is_listed_is_raised() -> None:
    listed = {(name, kind) for name, kinds in KINDS.items() for kind in kinds.split(", ")}
    raised = set(raised_kinds())
    assert raised <= listed
    kinds_in_calls = {kind for _, kind in raised}
    # A call may take its kind from a variable, and the test cannot see which class gets it then.
    assert {kind for _, kind in listed} - kinds_in_calls == {"shape"}


def test_every_class_is_listed_by_its_name() -> None:
    classes = {
        name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert classes == ERROR_CLASSES
    assert ERROR_CLASSES.keys() == {"CheckpointError", *BUILTINS}


@pytest.mark.parametrize("name", BUILTINS)
def test_every_class_is_also_the_builtin_that_it_promises(name: str) -> None:
    error = ERROR_CLASSES[name]
    assert error.__bases__ == (CheckpointError, BUILTINS[name])
    assert error.__doc__


@pytest.mark.parametrize("name", ERROR_CLASSES)
def test_an_error_says_its_message_and_carries_its_fields(name: str) -> None:
    error = ERROR_CLASSES[name]("what happened", kind="a_kind", path="s3://bucket/run", step=7, ranks=(3, 5))
    assert str(error) == "what happened"
    assert (error.message, error.kind, error.path, error.step) == ("what happened", "a_kind", "s3://bucket/run", 7)
    assert error.ranks == (3, 5)
    assert isinstance(error, CheckpointError)


@pytest.mark.parametrize("name", ERROR_CLASSES)
def test_fields_that_nobody_can_fill_are_empty(name: str) -> None:
    error = ERROR_CLASSES[name]("what happened", kind="a_kind")
    assert (error.path, error.step, error.ranks) == (None, None, ())


def test_the_kind_is_no_option() -> None:
    with pytest.raises(TypeError):
        CheckpointError("what happened")  # type: ignore[call-arg]


REFUSED: dict[str, Callable[[Path], object]] = {
    "exists": lambda path: bcp.save(path, {"x": torch.ones(1)}),
    "missing_key": lambda path: bcp.load(path, {"x": torch.zeros(1), "y": torch.zeros(1)}),
    "shape": lambda path: bcp.load(path, {"x": torch.zeros(2)}),
    "not_found": lambda path: bcp.load(path / "nothing", {"x": torch.zeros(2)}),
    "unsupported_value": lambda path: bcp.save(path / "new", {"x": object()}),
    "conflict": lambda path: bcp.load(path, {"x": torch.zeros(1)}, include="y"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_is_one_traceback(tmp_path: Path, kind: str) -> None:
    bcp.save(tmp_path, {"x": torch.ones(1)})
    with pytest.raises(bcp.CheckpointError) as caught:
        REFUSED[kind](tmp_path)
    assert caught.value.kind == kind
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_a_failure_keeps_its_cause(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"x": torch.ones(1)})
    (tmp_path / "manifest.bcp").write_bytes(b"rubbish")
    with pytest.raises(bcp.CheckpointCorruptError) as caught:
        bcp.load(tmp_path, {"x": torch.zeros(1)})
    assert caught.value.__cause__ is not None


def test_names_of_a_checkpoint_cannot_drive_a_terminal(tmp_path: Path) -> None:
    name = "a\x1b[2J\x07\u202eb"
    bcp.save(tmp_path, {"model": {name: torch.ones(3)}})
    with pytest.raises(bcp.CheckpointMismatchError) as raised:
        bcp.load(tmp_path, {"model": {"other": torch.ones(3)}})
    for text in (str(raised.value), raised.value.message, *raised.value.args):
        assert "a\\x1b[2J\\x07\\u202eb: in the checkpoint" in text
        assert "\n" in text
        assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_a_list_in_a_message_ends_with_how_many_follow() -> None:
    assert and_more(["a", "b"], 2) == "a, b"
    assert and_more(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert and_more(["a", "b", "c"], 1, "\n  ") == "a\n  and 2 more"
    assert and_more(["a"] * 2345, 1) == "a and 2,344 more"
