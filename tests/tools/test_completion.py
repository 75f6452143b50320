"""Completion: what the program answers, and what a real shell makes of it. The shells ask a program of this folder."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.tools.completion.param_types import next_parts
from bytecheckpoint.tools.completion.scripts import ASK, SCRIPTS
from bytecheckpoint.tools.main import cli


def answer(*words: object) -> list[str]:
    result = CliRunner().invoke(cli, [ASK, *map(str, words)])
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_commands() -> None:
    assert answer("") == ["words", *cli.commands]
    assert answer("un") == ["words", "unpin"]
    assert answer("nonsense", "") == ["nothing"]


def test_options_and_their_values(saved_root) -> None:
    assert answer("show", saved_root, "--ste") == ["words", "--step"]
    assert answer("convert", "a", "b", "--to", "") == ["words", "bcp", "hf", "dcp", "torch"]
    assert answer("convert", "a", "b", "--to=h") == ["words", "--to=hf"]
    assert answer("completion", "") == ["words", *SCRIPTS]


def test_paths_are_completed_by_the_shell_but_not_urls() -> None:
    assert answer("ls", "/tm") == ["files"]
    assert answer("diff", "/tmp", "") == ["files"]
    assert answer("ls", "s3://bucket/") == ["words"]


def test_steps_of_the_root(saved_root) -> None:
    assert answer("show", saved_root, "--step", "") == ["words", "1000", "5", "latest", "none"]
    assert answer("show", saved_root, "--step=1") == ["words", "--step=1000"]


def test_names_of_tensors(saved_root) -> None:
    assert answer("cat", saved_root, "model.layers.1.") == [
        "words",
        "model.layers.1.bias",
        "model.layers.1.weight",
    ]
    assert answer("show", saved_root, "--tensor", "lar") == ["words", "large"]
    assert answer("cat", saved_root, "--step", "5", "model.em") == ["words", "model.embed.weight"]
    assert "model." in answer("cat", saved_root, "")


@pytest.mark.parametrize("path", ["/nowhere", "s3://bucket/run"])
def test_what_cannot_be_read_has_no_candidates(path) -> None:
    assert answer("cat", path, "m") == ["words"]


def test_names_that_a_shell_would_run_or_a_terminal_obey_are_not_offered(tmp_path) -> None:
    hostile = ["b;id", "c$(id)", "d`id`", "e\nf", "g\x1b[31m", "h|id", "i'j", "k l", "m&", "n>o", "p!q", "r\\s"]
    bcp.save(tmp_path / "c", {"m": dict.fromkeys([*hostile, "fine[0].w-1", "größe"], torch.zeros(1))})
    assert answer("cat", tmp_path / "c", "m.") == ["words", "m.fine[0].w-1", "m.größe"]


def test_many_names_are_completed_up_to_the_next_dot() -> None:
    names = [f"model.layers.{n}.{part}" for n in range(30) for part in ("a.weight", "b.weight")]
    assert next_parts([*names, "lr"], "") == ["model.", "lr"]
    assert next_parts(names, "") == [f"model.layers.{n}." for n in range(30)]
    assert next_parts(names, "model.layers.7.") == ["model.layers.7.a.weight", "model.layers.7.b.weight"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a checkpoint, and with `bcp` on a path of its own."""
    folder = tmp_path_factory.mktemp("shells")
    bcp.save(folder / "my-run", {"model": {"w": torch.zeros(3)}, "lr": 1.0}, step=7)
    program = folder / "bin" / "bcp"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bytecheckpoint.tools "$@"\n')
    program.chmod(0o755)
    return folder


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed here")


def in_shell(place: Path, *command: str) -> list[str]:
    paths = os.pathsep.join([str(place / "bin"), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(place)}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def bash(place: Path, line: str) -> list[str]:
    """Returns the candidates that bash replaces the last part of its line by."""
    code = f"""
eval "$(bcp completion bash)"
compopt() {{ :; }}  # there is no completion under way that it could change
COMP_LINE={line!r}
COMP_POINT=${{#COMP_LINE}}
_bcp_completion
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    return [text for text in in_shell(place, "bash", "--norc", "-c", code) if text]


def fish(place: Path, line: str) -> list[str]:
    quoted = line.replace("'", "\\'")
    found = in_shell(place, "fish", "--no-config", "-c", f"bcp completion fish | source; complete -C '{quoted}'")
    return [text.split("\t")[0] for text in found]


def zsh(place: Path, line: str) -> list[str]:
    """Returns what the script hands to zsh's compadd, which exists only within a completion."""
    words = " ".join(f"{word!r}" for word in line.split(" "))
    code = f"""
compdef() {{ :; }}
_files() {{ print -l -- files; }}
compadd() {{ while [[ "$1" != -- ]]; do shift; done; shift; print -l -- "$@"; }}
eval "$(bcp completion zsh)"
words=({words})
CURRENT=${{#words}}
_bcp_completion
"""
    return in_shell(place, "zsh", "-f", "-c", code)


SHELLS = [pytest.param(run, marks=needs(run.__name__), id=run.__name__) for run in (bash, fish, zsh)]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_and_names(place, shell: Callable[[Path, str], list[str]]) -> None:
    assert sorted(shell(place, "bcp un")) == ["unpin"]
    assert sorted(shell(place, "bcp show my-run --ste")) == ["--step"]
    assert sorted(shell(place, "bcp show my-run --step ")) == ["7", "latest", "none"]
    assert shell(place, "bcp cat my-run model.w") == ["model.w"]


@needs("bash")
def test_bash_completes_paths_and_what_stands_after_an_equals_sign(place) -> None:
    assert bash(place, "bcp ls my-") == ["my-run"]
    assert bash(place, "bcp show my-run --tensor=model") == ["model.w"]
    assert bash(place, "bcp cat my-run 'model.w") == ["model.w"]


@needs("fish")
def test_fish_completes_paths(place) -> None:
    assert fish(place, "bcp ls my-") == ["my-run/"]


@needs("zsh")
def test_zsh_completes_paths(place) -> None:
    assert zsh(place, "bcp ls my-") == ["files"]


@needs("bash")
def test_bash_in_a_terminal_replaces_the_line(place) -> None:
    """A real, interactive bash gets the keys `bcp cat my-run mod<TAB>`."""
    environment = {"PATH": os.pathsep.join([str(place / "bin"), os.environ["PATH"]]), "TERM": "dumb", "PS1": "$ "}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    screen, inside = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], cwd=place, env=environment, stdin=inside, stdout=inside, stderr=inside
    ) as process:
        os.close(inside)
        os.write(screen, b'eval "$(bcp completion bash)"; echo READY\n')
        read_until(screen, b"\nREADY")
        os.write(screen, b"bcp cat my-run mod\t")
        seen = read_until(screen, b"model.w")
        process.kill()  # the bash of this test, which waits for the rest of the line
    assert b"bcp cat my-run model.w" in seen
    os.close(screen)


def read_until(screen: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        seen += os.read(screen, 4096)
    return seen
