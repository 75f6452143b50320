"""What the pages say of formats and commands is what exists: no page denies what another one, or the code, has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from click import Command, Option
from click.testing import CliRunner
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint.formats.detect import Format
from bytecheckpoint.tools.main import cli
from bytecheckpoint.tools.name_options import FORMATS

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "docs" / "limits.md"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

CALLED = {
    "safetensors": ("safetensors", "Hugging Face"),
    "torch.save": ("torch.save",),
    "torch.save of ranks": ("files of ranks", "sharded state"),
    "torch.distributed.checkpoint": ("torch.distributed.checkpoint", "DCP", "torch_dist", "distributed checkpoint"),
    "torch.distributed.checkpoint folders": ("ByteCheckpoint", "Accelerate"),
    "deepspeed": ("DeepSpeed", "ZeRO"),
    "megatron": ("Megatron",),
}
"""How pages call the formats that are read."""
DENIED = re.compile(
    r"\b(?:is|are|was|were|be|can) (?:not|never)(?: yet)? (?:read|written|converted|imported|exported|supported)\b"
    r"|\bcannot (?:be )?(?:read|written?|convert(?:ed)?)\b|\bnone (?:of them )?is (?:read|written)\b"
    r"|\b(?:is|are) (?:still )?to come\b|\bnot yet\b|\bnot implemented\b|\bwill (?:come|follow|be added)\b|\bplanned\b",
    re.IGNORECASE,
)
"""What a page may not say of a format, a command or an option that exists."""
ABOUT_OTHERS = {
    "benchmarks.md": "benchmarks tell what other programs' writers do",
    "faults.md": "a table of faults: reads and writes there are those that were made to fail",
}
OPTIONS_OF_OTHERS = {
    "--async-save",
    "--ckpt-step",
    "--dataloader-save",
    "--dist-ckpt-optim-fully-reshardable",
    "--exit-on-missing-checkpoint",
    "--finetune",
    "--freeze-all-layers",
    "--load",
    "--no-load-optim",
    "--no-load-rng",
    "--no-save-optim",
    "--no-save-rng",
    "--non-persistent-ckpt-type",
    "--override-ckpt-iteration",
    "--override-opt-param-scheduler",
    "--pretrained-checkpoint",
    "--save",
    "--save-retain-interval",
    "--use-checkpoint-args",
    "--ckpt-format",
    "--dataloader-type",
    "--no-data-sharding",
    "--help",
    "--json",
    "--storage-option",
    "--version",
    "--minutes",
    "--size",
}
"""Of Megatron, of every command (the page tells them once), and of scripts."""


def prose_of(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def sentences_of(text: str) -> list[str]:
    """Sentences of paragraphs, items of lists and rows of tables, each with the text before its colon."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:- |\| |[0-9]+\. ))", text)
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.;:])\s+", " ".join(block.split()))]


def denials_in(text: str) -> list[str]:
    """The sentences that deny a format or a command that exists."""
    names = {name for called in CALLED.values() for name in called} | {f"bcp {command}" for command in cli.commands}
    names |= {"other formats", "other program"}
    known = re.compile("|".join(rf"(?<!\w){re.escape(name)}" for name in sorted(names)), re.IGNORECASE)
    sentences = sentences_of(text)
    return [
        sentence
        for before, sentence in zip(["", *sentences], sentences, strict=False)
        # A clause after a colon or semicolon is about what stands before it.
        if DENIED.search(sentence) and known.search((before if before.endswith((":", ";")) else "") + sentence)
    ]


def table_after(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its titles."""
    below = page.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\|(?! ?-)(.*)\|$", below, re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows[1:]]


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


FOREIGN = ROOT / "docs" / "foreign.md"


def test_the_table_of_formats_that_are_read_is_that_of_the_code() -> None:
    named = [name for row in table_after(FOREIGN, "What is read") for name in in_code(row[0])]
    assert sorted(set(named)) == sorted(get_args(Format))


def test_every_format_has_a_name_that_denials_are_looked_for_by() -> None:
    assert CALLED.keys() == set(get_args(Format))


def test_the_table_of_formats_that_are_written_is_that_of_the_command() -> None:
    assert [in_code(row[0]) for row in table_after(FOREIGN, "What is written")] == [[name] for name in FORMATS]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_written_is_read_back_as_the_table_says(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    for row in table_after(FOREIGN, "What is written"):
        (to,), read_as = in_code(row[0]), in_code(row[2])[0]
        target = tmp_path / to
        ended = CliRunner().invoke(cli, ["convert", str(tmp_path / "model.safetensors"), str(target), "--to", to])
        assert ended.exit_code == 0, ended.output
        assert bcp.open(target).info.format == read_as


def test_readme_names_every_format_that_is_written() -> None:
    (line,) = [line for line in README.read_text().splitlines() if line.startswith("bcp convert A ")]
    assert all(re.search(rf"\b{name}\b", line) for name in FORMATS)


@pages
def test_no_page_denies_a_format_or_a_command_that_exists(page: Path) -> None:
    if page.name not in ABOUT_OTHERS:
        assert denials_in(prose_of(page)) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Of other formats those in docs/foreign.md are read and none is written: `bcp convert` is to come.",
        "Engines are read as they are in memory; DeepSpeed's own checkpoints are not read.",
        "Hugging Face folders are not written yet.",
        "Folders of\nMegatron cannot be read.",
        "| `bcp diff` | is planned |",
    ],
)
def test_a_denial_is_found(sentence: str) -> None:
    """The first two stood in README and docs/frameworks.md while the code had both."""
    assert denials_in(f"A line before.\n\n{sentence}\n\nAnd one after.")


def commands_in(page: Path) -> list[tuple[str, str]]:
    """The commands that a page names in code, each with the rest of its line."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:console|bash|sh)?\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose_of(page))]
    return [found.groups() for line in lines if (found := re.match(r"(?:\$ )?bcp ([a-z]\w*)(.*)", line))]


def options_of(command: Command) -> set[str]:
    return {name for param in command.params if isinstance(param, Option) for name in param.opts} | {"--help"}


@pages
def test_commands_that_are_named_exist_with_their_options(page: Path) -> None:
    for command, rest in commands_in(page):
        assert command in cli.commands, f"{page.name} names bcp {command}"
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest))
        assert named <= options_of(cli.commands[command]), f"{page.name} names bcp {command}{rest}"


@pages
def test_options_that_are_named_alone_exist(page: Path) -> None:
    every = {name for command in cli.commands.values() for name in options_of(command)} | OPTIONS_OF_OTHERS
    if "bcp" in page.read_text() and page.name not in ABOUT_OTHERS and page.name != "CONTRIBUTING.md":
        spans = [span for span in re.findall(r"`([^`]+)`", prose_of(page)) if span.startswith("--")]
        assert {re.match(r"--[a-z][\w-]*", span).group() for span in spans} <= every


def test_readme_lists_every_command() -> None:
    named = set(re.findall(r"^bcp ([\w-]+)", README.read_text(), re.MULTILINE))
    assert named == {name for name, command in cli.commands.items() if not command.hidden}


def test_the_limits_say_of_megatrons_ranks_what_the_page_says() -> None:
    """They once said "no experts" where docs/frameworks.md said "any number of ... expert ranks"."""
    page = " ".join((ROOT / "docs" / "frameworks.md").read_text().split())
    promised = re.search(r"checkpoint loads at any number of ([\w ,-]+) ranks", page)
    assert promised is not None
    (limits,) = [item for item in re.split(r"\n- ", LIMITS.read_text()) if item.startswith("Of Megatron,")]
    missing = re.findall(r"\bno ([\w ]+?)(?=,| and |\.)", " ".join(limits.split()))
    kinds = {kind.rstrip("s") for kind in re.split(r", | and ", promised.group(1))}
    assert not kinds & {kind.rstrip("s") for kind in missing}
