"""docs/cli.md describes every command and option that there is, in the commands' own words, and the JSON that the
commands really give, with its types.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from checkpoint_files import flip
from cli_page import PAGE, option_table, with_option_tables
from fake_telemetry import checkpoint_with_telemetry, ordinary
from forked_python import forked_python
from packed_checkpoints import compress_checkpoint
from stream_loaders import StreamLoader, state_of

import bytecheckpoint as bcp
from bytecheckpoint.manager import step_records
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.tools import exit_codes
from bytecheckpoint.tools.main import cli

QUICK = ("--seconds", 0, "--max-mib", 1)
FREE = {
    "metadata",
    "checkpoints[].metrics",
    "provenance",
    "objects[].value",
    "values",
    "objects[].a",
    "objects[].b",
    "data[].shared",
    "ranks[].seconds",
}
"""Whose content the checkpoint decides."""
SAVES_TO_MEMORY = """
import sys, torch
import bytecheckpoint as bcp
options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=sys.argv[2]))
bcp.save(sys.argv[1], {"w": torch.zeros(3)}, step=1, options=options, to="memory")
"""
"""A job that has ended when its memory is looked at."""
TYPES = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list),
    "list of integers": lambda value: isinstance(value, list) and all(type(item) is int for item in value),
    "list of strings": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "null": lambda value: value is None,
    "any": lambda _: True,
}


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """Returns the text about each command."""
    parts = re.split(r"^## `bcp (\w+)`$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented_keys(section: str) -> dict[str, str]:
    """Returns the keys of JSON with their types: the first two columns of the table."""
    table = section.split("| key | ")[1].split("\n\n", maxsplit=1)[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", table, flags=re.MULTILINE))


def items_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`checkpoints`, `checkpoints[].step`, ..., each as often as it occurs, with its value; what is nested in itself
    has the name of its outermost level.
    """
    for name, item in value.items():
        path = re.sub(r"(children\[\]\.)+", "children[].", f"{prefix}{name}")
        yield path, item
        if path in FREE:
            continue
        inside, lead = (item, f"{path}[].") if isinstance(item, list) else ([item], f"{path}.")
        for child in inside:
            if isinstance(child, dict):
                yield from items_of(child, lead)


def assert_documented(results: Sequence[Any], section: str) -> None:
    """Every key of these results is in the table, every key of the table in one of them, and types are as it says."""
    documented = documented_keys(section)
    found: dict[str, list[Any]] = {}
    for path, value in (item for result in results for item in items_of(result)):
        found.setdefault(path, []).append(value)
    assert found.keys() == documented.keys()
    for path, values in found.items():
        kinds = [TYPES[kind] for kind in documented[path].split(" or ")]
        wrong = [value for value in values if not any(kind(value) for kind in kinds)]
        assert not wrong, f"{path} is said to be {documented[path]}"
    for result in results[1:]:
        assert result.keys() == results[0].keys()


def test_every_command_has_a_section(sections) -> None:
    assert sections.keys() == cli.commands.keys()


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_the_table_of_options_is_what_the_command_tells(sections, name) -> None:
    """`make cli-doc` writes it into the page."""
    assert option_table(cli.commands[name]) in sections[name]
    assert sections[name].count("| option | does |") == bool(option_table(cli.commands[name]))


def test_writing_the_tables_changes_nothing_in_a_page_that_has_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_option_tables(page) == page
    assert with_option_tables(page.replace("| `--sample PCT` |", "| `--old` |")) == page


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_an_example_with_its_output(sections, name) -> None:
    assert f"```console\n$ bcp {name} " in sections[name]


def test_every_exit_code_is_described() -> None:
    described = {
        int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert described == {value for value in vars(exit_codes).values() if isinstance(value, int)}


def test_json_of_ls(call, root, sections) -> None:
    (root / "step_00002000").mkdir()
    store = open_store(root, storage_options=None, writer_threads=1)
    step_records.lease(store, "step_00000005", until=5e9)
    results = [call("ls", root, "--json").json]
    flip(root / "step_00001000" / "manifest.bcp", 50)
    assert_documented([*results, call("ls", root, "--json").json], sections["ls"])


def data_state(position: int) -> bcp.DataLoaderState:
    return bcp.DataLoaderState(StreamLoader({"a": state_of("a", position)}, {"seed": 4}), rank=0, size=1)


def test_json_of_show(call, root, sections, tmp_path) -> None:
    page = ["--html", tmp_path / "page.html"]
    full = call("show", root, "--tree", "--files", "--objects", "--stats", "--tensor", "*", "--json", *page).json
    packed = shutil.copytree(root / "step_00001000", tmp_path / "packed")
    compress_checkpoint(packed)
    bcp.save(tmp_path / "data", {"data": data_state(3)})
    with_data = call("show", tmp_path / "data", "--data", "--json").json
    results = [full, with_data, call("show", root, "--json").json, call("show", packed, "--json").json]
    assert_documented(results, sections["show"])


def test_json_of_verify(call, root, sections) -> None:
    results = [call("verify", root, "--json").json, call("verify", root, "--json", "--sample", 1).json]
    (path,) = (root / "step_00001000" / "data").iterdir()
    flip(path, 0)
    assert_documented([*results, call("verify", root, "--json").json], sections["verify"])


def test_json_of_completion(call, sections) -> None:
    assert_documented([call("completion", "bash", "--json").json], sections["completion"])


def test_json_of_cat(call, root, sections) -> None:
    names = ["large[:2]", "epoch", "large[0]", "rng"]
    assert_documented([call("cat", root, name, "--json").json for name in names], sections["cat"])


def test_json_of_du(call, root, sections) -> None:
    results = [call("du", root, "--json").json]
    flip(root / "step_00001000" / "manifest.bcp", 50)
    assert_documented([*results, call("du", root, "--json").json], sections["du"])


def test_json_of_watch(call, root, sections) -> None:
    results = [call("watch", path, "--once", "--json").json for path in (root, root.parent)]
    shutil.rmtree(root / "step_00000005" / "telemetry")
    flip(root / "step_00001000" / "manifest.bcp", 50)
    assert_documented([*results, call("watch", root, "--once", "--json").json], sections["watch"])


def test_json_of_report(call, root, sections) -> None:
    assert_documented([call("report", root, "--out", root.parent / "run.html", "--json").json], sections["report"])


def test_json_of_gc(call, root, sections) -> None:
    path = root / "step_00000007" / "data" / "00000000deadbeef-00000-0.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1")
    assert_documented([call("gc", root, "--json").json], sections["gc"])


def test_json_of_memory(call, tmp_path, sections) -> None:
    memory, root = tmp_path / "memory", tmp_path / "run"
    subprocess.run([forked_python(), "-W", "ignore", "-c", SAVES_TO_MEMORY, root, memory], check=True)
    of_ls, of_flush = sections["memory"].split("The keys of `bcp memory flush`")
    assert_documented([call("memory", "ls", "--memory-root", memory, "--json").json], of_ls)
    assert_documented([call("memory", "flush", root, "--memory-root", memory, "--json").json], of_flush)
    of_gc = sections["gc"].split("With `--memory`")[-1]
    assert_documented([call("gc", "--memory", "--memory-root", memory, "--json").json], of_gc)


def test_json_of_keep(call, root, sections) -> None:
    results = [call("keep", root, "--latest", 1, *more, "--json").json for more in ([], ["--delete"])]
    assert_documented(results, sections["keep"])


def test_json_of_rm_and_pins(call, root, sections) -> None:
    for command in ("pin", "unpin"):
        assert_documented([call(command, root, "--json").json], sections[command])
    assert_documented([call("rm", root, "--step", 5, "--json").json], sections["rm"])


def test_json_of_doctor(call, root, tmp_path, sections) -> None:
    full = call("doctor", root, *QUICK, "--local-stage", tmp_path / "nvme", "--json").json
    assert_documented([full, call("doctor", root, *QUICK, "--json").json], sections["doctor"])


def test_json_of_doctor_of_a_checkpoint(call, root, tmp_path, sections) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"epoch": 3, "model": torch.nn.Linear(2, 2)}, tmp_path / "refused.pt")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "m.gguf").write_text("-")
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    bcp.save(tmp_path / "run", {"w": torch.zeros(3)}, step=7)
    paths = [root, tmp_path / "text", tmp_path / "refused.pt", tmp_path / "gguf", tmp_path / "m.pt", tmp_path]
    results = [call("doctor", "--checkpoint", path, "--json").json for path in paths]
    assert_documented(results, sections["doctor"].split("### A checkpoint of unknown origin")[1])


def test_json_of_diff(call, root, sections, tmp_path) -> None:
    ranked = bcp.RankLocal({"seed": 1})
    bcp.save(tmp_path / "a", {"w": torch.zeros(3), "v": torch.zeros(2), "lr": 1.0, "rng": ranked, "x": 1})
    bcp.save(tmp_path / "b", {"w": torch.ones(3), "v": torch.zeros(3), "lr": None, "u": torch.zeros(1)})
    for name, position in (("c", 3), ("d", 5)):
        bcp.save(tmp_path / name, {"data": data_state(position)})
    results = [
        call("diff", root, root, "--json").json,
        call("diff", tmp_path / "a", tmp_path / "b", "--json").json,
        call("diff", tmp_path / "a", tmp_path / "b", "--json", "--atol", 2).json,
        call("diff", tmp_path / "a", tmp_path / "b", "--json", "--to", "hf").json,
        call("diff", tmp_path / "c", tmp_path / "d", "--json").json,
    ]
    assert_documented(results, sections["diff"])


def test_json_of_convert(call, root, sections, tmp_path) -> None:
    (tmp_path / "map.toml").write_text('format = 1\nsides = ["a", "b"]\n[[tensors]]\na = "w"\nb = "x"\n')
    bcp.save(tmp_path / "s", {"w": torch.zeros(3)})
    results = [
        call("convert", root, tmp_path / "hf", "--to", "hf", "--include", "model.*", "--json").json,
        call("convert", root, tmp_path / "link", "--to", "bcp", "--link", "--json").json,
        call("convert", tmp_path / "s", tmp_path / "m", "--to", "bcp", "--map", tmp_path / "map.toml", "--json").json,
    ]
    assert_documented(results, sections["convert"])


def test_json_of_timeline(call, root, sections, tmp_path) -> None:
    timed = checkpoint_with_telemetry(tmp_path / "timed", [ordinary(rank) for rank in range(3)], world_size="odd")
    (timed / "telemetry" / "timed-00001.json").write_text("odd")
    results = [
        call("timeline", root, "--json", "--trace", tmp_path / "trace.json").json,
        call("timeline", timed, "--json").json,
    ]
    assert_documented(results, sections["timeline"])
