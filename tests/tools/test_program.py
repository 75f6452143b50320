"""Rules for every command: exit codes, one line or one object for an error, no traceback, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from checkpoint_files import data_file
from click.testing import CliRunner
from command_lines import paths_of

import bytecheckpoint as bcp
from bytecheckpoint.storage.backends import local_store
from bytecheckpoint.tools.arguments import _parse_storage_options
from bytecheckpoint.tools.main import cli

COMMANDS = sorted(set(cli.commands) - {"completion", "memory"})  # memory has commands of its own
"""Commands about storages and checkpoints."""
ABOUT_STORAGE = {"doctor", "gc"}
"""They look at what is not committed, or at no checkpoint at all."""
ABOUT_ONE = sorted(set(COMMANDS) - {"du", "keep", "ls", "report", "watch"} - ABOUT_STORAGE)
TAKE_ANY = {"nowhere": {"doctor"}, "empty": {"doctor"}, "noise": ABOUT_STORAGE}
"""Commands that succeed on a path without a checkpoint."""


def test_the_version_is_the_packages(call) -> None:
    from importlib.metadata import version

    assert call("--version").out == f"bcp {version('bytecheckpoint')}\n"


def test_without_arguments_it_says_what_it_can(call) -> None:
    ended = call()
    assert ended.code == 0
    assert all(command in ended.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(call, command: str) -> None:
    ended = call(command, "--help")
    assert ended.code == 0
    assert f"Example:\n    bcp {command} " in ended.out.replace("  Example", "Example")
    assert "--json" in ended.out
    assert "--storage-option" in ended.out


_IMPERATIVES = {
    *("Add", "Also", "Begin", "Check", "Choose", "Compare", "Convert", "Delete", "Give", "Keep", "Instead", "List"),
    *("Look", "Measure", "Pass", "Pin", "Print", "Read", "Remove", "Rename", "Replace", "Send", "Set", "Show", "Sort"),
    *("Start", "Take", "With", "Write"),
}
"""First words of help: verbs, and words before which a verb would only be put off, as in `With --to hf: drop ...`."""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_what_to_do(command: str) -> None:
    helps = [cli.commands[command].help, *(getattr(param, "help", None) for param in cli.commands[command].params)]
    assert {text.split()[0].rstrip(",") for text in helps if text} <= _IMPERATIVES


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("place", "code", "kind", "words"),
    [
        ("nowhere", 3, "not_found", "there is nothing at"),
        ("file", 3, "not_found", "is a file"),
        ("empty", 3, "not_found", "there is nothing at"),
        ("noise", 3, "not_found", "is not a checkpoint"),
        ("nosuch://bucket/run", 4, "unsupported", "no backend is known"),
        ("", 4, "unsupported", "the path is empty"),
    ],
)
def test_a_wrong_path_is_one_line(call, tmp_path, command, place, code, kind, words) -> None:
    if command in TAKE_ANY.get(place, set()):
        return
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "a.txt").write_text("x")
    path = place if not place or "://" in place else str(tmp_path / place)
    ended = call(command, *paths_of(command, path))
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("error: ")
    assert words in ended.err
    ended = call(command, *paths_of(command, path), "--json")
    assert (ended.code, ended.err) == (code, "")
    assert ended.json.keys() == {"error"}
    assert ended.json["error"].keys() == {"kind", "message", "path"}
    assert ended.json["error"]["kind"] == kind


@pytest.mark.parametrize("command", ABOUT_ONE)
def test_an_uncommitted_folder_is_not_found(call, root, command) -> None:
    step = root / "step_00001000"
    (step / "manifest.bcp").unlink()
    for args in (paths_of(command, step), [*paths_of(command, root), "--step", 1000]):
        ended = call(command, *args)
        assert ended.code == 3
        assert "is not committed" in ended.err
    result = call(command, *paths_of(command, root), "--json").json
    if command == "convert":
        assert result["source"].endswith("step_00000005")
    else:
        assert result.get("a", result)["step"] == 5


@pytest.mark.parametrize("command", [name for name in ABOUT_ONE if name != "rm"])  # which deletes it
@pytest.mark.parametrize("position", [0, 10, 100, -1])
def test_a_damaged_manifest_is_exit_code_1(call, root, command, position) -> None:
    manifest = root / "step_00001000" / "manifest.bcp"
    content = bytearray(manifest.read_bytes())
    content[position] ^= 1
    manifest.write_bytes(content)
    ended = call(command, *paths_of(command, root), "--json")
    assert ended.code == 1
    assert ended.json["error"]["kind"] == "bad_manifest"


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["show"],
        ["show", "a", "b"],
        ["show", "a", "--nonsense"],
        ["show", "a", "--step", "-1"],
        ["verify", "a", "--sample", "0"],
        ["verify", "a", "--sample", "nan"],
        ["verify", "a", "--threads", "0"],
        ["diff", "a"],
        ["diff", "a", "b", "--atol", "-1"],
        ["diff", "a", "b", "--rtol", "much"],
        ["diff", "a", "b", "--rtol", "nan"],
        ["diff", "a", "b", "--atol", "inf"],
        ["diff", "/a", "/b", "--storage-option", "key=value"],
        ["doctor", "a", "--seconds", "nan"],
        ["timeline"],
        ["keep", "a"],
        ["keep", "a", "--latest", "0"],
        ["keep", "a", "--every", "x"],
        ["keep", "a", "--best", "loss:least"],
        ["keep", "a", "--within", "soon"],
        ["keep", "a", "--within", "9" * 400 + "d"],
        ["ls", "a", "--storage-option", "secret"],
        ["ls", "/a", "--storage-option", "key=value"],
        ["gc", "--memory", "--save-id", "x", "--delete"],
        ["gc", "--memory", "--local-stage", "stage"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_line(call, args) -> None:
    ended = call(*args)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert "secret" not in ended.err
    ended = call(*args, "--json")
    assert (ended.code, ended.err) == (2, "")
    assert ended.json["error"]["kind"] in {"usage", "conflict"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("5", 5),
        ('"5"', "5"),
        ("abc", "abc"),
        ("", ""),
        ('{"endpoint_url": "http://127.0.0.1"}', {"endpoint_url": "http://127.0.0.1"}),
    ],
)
def test_values_of_storage_options_are_json_or_text(text, value) -> None:
    assert _parse_storage_options(None, None, [f"key={text}"]) == {"key": value}


def test_urls_and_storage_options_work(call) -> None:
    url = "memory://cli-urls"
    bcp.save(url, {"x": 1}, step=7)
    assert call("ls", url, "--json", "--storage-option", "skip_instance_cache=true").json["checkpoints"][0]["step"] == 7
    assert call("show", url, "--json").json["step"] == 7
    assert call("verify", url, "--json").json["ok"]
    assert call("diff", url, url, "--json").json["same"]
    assert call("timeline", url, "--json").json["step"] == 7


@pytest.mark.parametrize("command", COMMANDS)
def test_interrupting_is_exit_code_130(call, saved_root, monkeypatch, command) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(local_store.LocalStore, "list", interrupt)
    ended = call(command, *paths_of(command, saved_root))
    assert (ended.code, ended.out) == (130, "")
    assert ended.err == "error: interrupted; no committed checkpoint was changed\n"


def test_control_characters_in_names_do_not_reach_the_terminal(call, tmp_path) -> None:
    bcp.save(tmp_path / "c", {"a\x1b[31m\nb": __import__("torch").zeros(1)})
    ended = call("show", tmp_path / "c")
    assert "\x1b" not in ended.out
    assert "a\\x1b[31m\\nb" in ended.out


def test_output_without_unicode_has_escapes(saved_root) -> None:
    result = CliRunner(charset="ascii").invoke(cli, ["show", str(saved_root), "--tree"])
    assert result.exit_code == 0
    assert "\\u2514" in result.stdout


def test_the_console_module_ends_quietly_when_its_reader_has_enough(saved_root) -> None:
    """Like `bcp show x | head -1`, in a real process with a real pipe that is closed early."""
    command = [sys.executable, "-m", "bytecheckpoint.tools", "show", str(saved_root), "--limit", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read()
        code = process.wait(timeout=100)
    assert (code, err) == (141, b"")


def test_a_warning_is_one_line_without_the_place_in_the_source(root, tmp_path) -> None:
    (root / "step_00002000").symlink_to(tmp_path)
    command = [sys.executable, "-m", "bytecheckpoint.tools", "pin", str(root)]
    (tmp_path / "manifest.bcp").touch()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"warning: {root}/step_00002000 is left out of the steps: ")


def test_warnings_of_a_process_that_goes_on_after_a_command_are_as_they_were(root) -> None:
    given = warnings.formatwarning
    assert CliRunner().invoke(cli, ["ls", str(root)]).exit_code == 0
    assert warnings.formatwarning is given


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="stands in for a full disk")
@pytest.mark.parametrize("args", [["verify", "--json"], ["ls"], ["--help"]])
def test_output_that_cannot_be_written_does_not_pass_for_a_damaged_checkpoint(saved_root, args) -> None:
    """Like `bcp verify x --json > report.json` on a full disk, which ended with a traceback and exit code 1."""
    command = [sys.executable, "-m", "bytecheckpoint.tools", *args, *([str(saved_root)] if args != ["--help"] else [])]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 4
    assert ended.stderr.startswith("error: cannot write the output: No space left on device")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_command_runs_where_the_shell_has_closed_a_stream(saved_root, closed) -> None:
    shell = f'exec "$0" -m bytecheckpoint.tools verify "$1" {closed}'
    ended = subprocess.run(["sh", "-c", shell, sys.executable, saved_root], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert bool(ended.stdout) == (closed == "2>&-")


def test_no_command_but_diff_needs_torch(root, tmp_path) -> None:
    """The package itself imports torch; nothing that the commands import does, so it is their package's to change."""
    code = """
import sys, types
package = types.ModuleType("bytecheckpoint")
package.__path__ = [sys.argv[1]]
sys.modules["bytecheckpoint"] = package
tools = types.ModuleType("bytecheckpoint.tools")
tools.__path__ = [sys.argv[2]]
sys.modules["bytecheckpoint.tools"] = tools
from bytecheckpoint.tools.main import cli
show = ["show", "--tree", "--stats", "--html", sys.argv[4]]
for args in (["ls"], show, ["verify"], ["timeline"], ["keep", "--latest=1"], ["pin"], ["unpin"], ["rm", "--step=5"]):
    try:
        cli.main([*args, sys.argv[3], "--json"])
    except SystemExit as ended:
        assert ended.code == 0, args
assert "torch" not in sys.modules
assert "rich" not in sys.modules
"""
    project = Path(__file__).parents[2]
    arguments = [str(project / "bytecheckpoint"), str(project / "tools"), str(root), str(tmp_path / "page")]
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [json.loads(line).keys() for line in ended.stdout.splitlines()]
    assert data_file(root).exists()


@pytest.mark.parametrize("command", ABOUT_ONE)
def test_the_newest_step_is_called_latest_as_in_open(call, root, command) -> None:
    result = call(command, *paths_of(command, root), "--step", "latest", "--json").json
    if command == "convert":
        assert result["source"].endswith("step_00001000")
    else:
        assert result.get("a", result)["step"] == 1000


@pytest.mark.parametrize("command", ABOUT_ONE)
@pytest.mark.parametrize("step", ["newest", "-1", "1.5", "", "0x10", "9" * 30])
def test_a_step_that_is_none_is_refused_with_what_would_be_one(call, saved_root, command, step) -> None:
    ended = call(command, *paths_of(command, saved_root), "--step", step)
    assert ended.code == 2
    assert "is no step: 0, 1, 2, ..., latest or none" in ended.err


@pytest.mark.parametrize(("command", "option"), [("show", "--html"), ("timeline", "--trace")])
def test_a_local_file_in_a_folder_that_is_not_there_is_wrong_usage(call, saved_root, tmp_path, command, option) -> None:
    target = tmp_path / "nowhere" / "page"
    ended = call(command, saved_root, option, target)
    assert ended.code == 2
    assert f"the folder {str(target.parent)!r} does not exist" in ended.err
    assert not target.parent.exists()
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in call(command, saved_root, option, tmp_path / "file" / "page").err
    ended = call(command, saved_root, option, tmp_path / ("x" * 300) / "page")
    assert ended.code == 2
    assert "cannot be looked at: File name too long" in ended.err


@pytest.mark.parametrize(("command", "option"), [("show", "--html"), ("timeline", "--trace")])
def test_a_local_file_that_cannot_be_written_is_no_failed_save(call, saved_root, command, option) -> None:
    ended = call(command, saved_root, option, "/dev/full")
    assert ended.code == 4
    assert "cannot write the " in ended.err
    assert "the checkpoint was only read" in ended.err
    assert "save again" not in ended.err
    assert "published" not in ended.err
