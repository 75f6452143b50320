"""Tables fit the window that they are printed in: columns go in order of importance, numbers are whole, and text that
is cut says so. Each command writes to a pseudo terminal of the width.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from checkpoint_files import flip
from fake_telemetry import checkpoint_with_telemetry, ordinary
from rich import cells
from stream_loaders import StreamLoader, state_of

import bytecheckpoint as bcp
from bytecheckpoint.tools.render.terminal import LAST_DROP, Column, _fitted_text, fit_columns

WIDTHS = (40, 60, 80, 120, 200)
_CHILD = """
import sys
from bytecheckpoint.tools.main import cli
for line in iter(sys.stdin.readline, ""):
    try:
        cli.main(line.rstrip("\\n").split("\\t"))
    except SystemExit as ended:
        print(f"<{ended.code}>", flush=True)
"""
_ONLY_TABLES = """
from bytecheckpoint.tools.render.terminal import Screen
Screen.line = lambda *_, **__: None
"""
SIZE = re.compile(r"\b[0-9]+(?:\.[0-9])? (?:B|[KMG]iB)\b")


class Terminal:
    """A process that runs commands, one after the other, in a window whose width can be set."""

    def __init__(self, before: str = "") -> None:
        self._screen, inside = pty.openpty()
        environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + _CHILD],
            stdin=subprocess.PIPE,
            stdout=inside,
            stderr=subprocess.DEVNULL if before else inside,
            env={**environment, "TERM": "xterm-256color"},
        )
        os.close(inside)

    def run(self, width: int, *args: object) -> list[str]:
        """Returns the lines that a command prints, without their colours."""
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        assert self.process.stdin is not None
        self.process.stdin.write(("\t".join(map(str, args)) + "\n").encode())
        self.process.stdin.flush()
        seen = b""
        while (found := re.search(rb"<([0-9]+)>\r\n$", seen)) is None:
            seen += os.read(self._screen, 65536)
        assert found.group(1) in {b"0", b"1"}, seen.decode()
        return re.sub(r"\x1b\[[0-9;]*m", "", seen[: found.start()].decode()).replace("\r\n", "\n").splitlines()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        os.close(self._screen)


@pytest.fixture(scope="module")
def terminal():
    opened = Terminal()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def long_names(saved_root, tmp_path_factory) -> Path:
    """Makes a root with steps, an unfinished save, and a checkpoint whose name is longer than a narrow window."""
    root = tmp_path_factory.mktemp("windows") / "r"
    for step in (5, 1000):
        bcp.save(root, {"x": 1}, step=step)
    (root / "step_00002000" / "data").mkdir(parents=True)
    bcp.save(root / ("the-best-one-of-all-by-validation-loss" * 2), {"x": 1})
    return root


def words_of(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


@pytest.mark.parametrize("width", WIDTHS)
def test_ls_has_step_size_and_state_in_any_window(terminal, long_names, width) -> None:
    lines = terminal.run(width, "ls", long_names)[2:]
    rows = [words_of(line) for line in lines[1:5]]
    titles = words_of(lines[0])
    assert titles[:2] == ["step", "size"]
    assert titles[-1] == "state"
    assert [row[0] for row in rows] == ["5", "1000", "2000", "-"]
    assert all(SIZE.fullmatch(row[1]) for row in rows)
    assert [row[-1] for row in rows] == ["committed", "committed", "not committed", "committed"]
    assert all(len(line) <= width for line in lines)


def test_ls_gives_up_age_then_tensors_then_ranks(terminal, long_names) -> None:
    missing = []
    for width in range(120, 50, -1):
        titles = words_of(terminal.run(width, "ls", long_names)[2])
        gone = [name for name in ("age", "tensors", "ranks", "saved") if name not in titles]
        if gone not in missing:
            missing.append(gone)
    order = ["age", "tensors", "ranks", "saved"]
    assert missing == [order[:count] for count in range(len(missing))]
    assert len(missing) >= 4


def test_what_a_narrow_window_leaves_out_is_said(terminal, long_names) -> None:
    assert terminal.run(60, "ls", long_names)[-1].startswith("  not shown: saved, age, ")
    assert not any("not shown" in line for line in terminal.run(200, "ls", long_names))


def test_text_is_cut_in_its_middle_because_names_differ_at_their_ends(terminal, long_names) -> None:
    name = "the-best-one-of-all-by-validation-loss" * 2
    folders = [words_of(line)[-2] for line in terminal.run(60, "ls", long_names)[3:7]]
    start, _, end = folders[-1].partition("…")
    assert name.startswith(start)
    assert name.endswith(end)
    assert len(end) > len(start) > 3
    assert folders[0][-6:] == "000005"
    assert any(name in line for line in terminal.run(200, "ls", long_names))


def test_a_long_text_is_not_measured_again_for_each_of_its_characters(monkeypatch) -> None:
    measured = []
    monkeypatch.setattr(cells, "cell_len", lambda text: measured.append(text) or len(text))
    cut = _fitted_text("a" * 2000 + "b" * 2000, 31, is_folded=False)
    assert cut == "a" * 10 + "…" + "b" * 20
    assert len(measured) < 50


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """Makes a root of steps with many metrics."""
    root = tmp_path_factory.mktemp("measured") / "r"
    for step in (1000, 123456, 2000000):
        metrics = {"val_loss": 1.234567 / step, "train/perplexity": 12.5, "accuracy": 0.75, "grad_norm": 1e-9}
        bcp.save(root, {"x": 1}, step=step, metadata={"metrics": metrics})
    return root


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("options", [["--best", "val_loss:min:2"], ["--latest", "1", "--every", "1000"]])
def test_keep_fits_the_window_and_cuts_no_number(terminal, measured, width, options) -> None:
    lines = terminal.run(width, "keep", measured, *options)[2:]
    assert all(len(line) <= width for line in lines if "not shown" not in line)
    assert ("val_loss" in lines[0]) or "--best" not in options
    numbers = [line.split()[0] for line in lines[1:] if line[:11].strip().isdecimal()]
    assert numbers == ["1000", "123456", "2000000"]
    text = " ".join(" ".join(line.split()) for line in lines)
    assert "newest" in text
    assert "…" not in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_ls_shows_the_metrics_that_fit(terminal, measured, width) -> None:
    lines = terminal.run(width, "ls", measured)[2:]
    assert all(len(line) <= width for line in lines if "not shown" not in line)
    assert words_of(lines[0])[-1] == "state"
    assert ("val_loss" in lines[0]) == (width >= 120)
    assert "accuracy" in lines[0]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("options", [["--tree"], ["--limit", "0"], ["--files"], ["--tensor", "large"]])
def test_show_cuts_no_number_and_no_name(call, terminal, saved_root, width, options) -> None:
    """Every number of a row is one that the same row has without a window, and names go on in the next line."""
    wide = call("show", saved_root, *options).out
    numbers = {word for line in wide.splitlines() for word in words_of(line)}
    lines = terminal.run(width, "show", saved_root, *options)
    sizes = [size for line in lines for size in SIZE.findall(line)]
    assert sizes
    assert set(sizes) <= {size for word in numbers for size in SIZE.findall(word)}
    counts = [word for line in lines for word in words_of(line) if re.fullmatch(r"[0-9]+(,[0-9]{3})*", word)]
    assert set(counts) <= numbers
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tree_has_every_name_in_any_window(terminal, saved_root, width) -> None:
    lines = terminal.run(width, "show", saved_root, "--tree", "--limit", "0")
    start = next(number for number, line in enumerate(lines) if words_of(line)[0] == "module")
    shown = "".join(line[: width - 11].strip() for line in lines[start:])
    for name in ("embed.weight", "layers.0-11", "bias", "weight", "optimizer", "exp_avg_sq", "large"):
        assert name in shown, name
    assert "4.0 MiB" in "\n".join(lines[start:])


@pytest.fixture(scope="module")
def tables():
    """Yields a terminal that shows nothing but the tables: lines of text are never wrapped."""
    opened = Terminal(_ONLY_TABLES)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tabled(saved_root, long_names, measured, tmp_path_factory) -> dict[str, list[object]]:
    """Returns arguments of commands that print every kind of table, with long names and large numbers."""
    folder = tmp_path_factory.mktemp("tables")
    name = "model.transformer.layers.17.mixture_of_experts.gate_and_up_projection.weight"
    state = {name: torch.arange(123456.0), "shape": torch.zeros(4096, 3), "dtype": torch.zeros(9), "lr": 1.5}
    bcp.save(folder / "a", state)
    other = {name: torch.full((123456,), -1.5e-7), "shape": torch.zeros(3, 4096), "dtype": torch.zeros(9).half()}
    bcp.save(folder / "b", {**other, "lr": "a text that is longer than a narrow window is wide"})
    loader = StreamLoader({f"web-{n:04d}": state_of("web", 1_000_000 + n) for n in range(3)}, {"seed": 4})
    bcp.save(folder / "data", {"data": bcp.DataLoaderState(loader, rank=0, size=1)})
    checkpoint_with_telemetry(folder / "timed", [ordinary(rank, write_s=12345.678) for rank in range(20)])
    bcp.save(folder / "damaged", state)
    flip(next((folder / "damaged" / "data").iterdir()), 5000)
    dead = folder / "gc" / "step_00000007" / "data" / "00000000deadbeef-00000-0.safetensors"
    dead.parent.mkdir(parents=True)
    dead.write_bytes(b"1" * 12345678)
    bcp.save(folder / "gc", {"x": 1}, step=8)
    in_memory = bcp.SaveOptions(memory=bcp.Memory(root=folder / "memory", copies=1))
    with pytest.warns(UserWarning, match="on a disk"):
        bcp.save(folder / "a-run-with-a-long-name", state, step=123456, options=in_memory, to="memory")
    return {
        "ls": ["ls", long_names],
        "ls metrics": ["ls", measured],
        "show": ["show", folder / "a"],
        "show tree": ["show", saved_root, "--tree"],
        "show files": ["show", saved_root, "--files", "--objects"],
        "show stats": ["show", folder / "a", "--stats"],
        "show tensor": ["show", folder / "a", "--stats", "--tensor", "*"],
        "show data": ["show", folder / "data", "--data"],
        "keep": ["keep", measured, "--best", "val_loss:min:2", "--latest", 1],
        "diff": ["diff", folder / "a", folder / "b"],
        "diff near": ["diff", folder / "a", folder / "b", "--rtol", 1e-3],
        "timeline": ["timeline", folder / "timed"],
        "verify": ["verify", folder / "damaged"],
        "gc": ["gc", folder / "gc", "--older-than", 0],
        "du": ["du", long_names.parent],
        "memory ls": ["memory", "ls", "--memory-root", folder / "memory"],
        "doctor": ["doctor", folder, "--seconds", 0, "--max-mib", 1],
        "doctor checkpoint": ["doctor", "--checkpoint", folder / "a"],
    }


_TABLES = [
    *("ls", "ls metrics", "show", "show tree", "show files", "show stats", "show tensor", "show data", "keep", "diff"),
    *("diff near", "timeline", "verify", "gc", "du", "memory ls", "doctor", "doctor checkpoint"),
]
_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+(?:e[-+][0-9]+)?)?(?: (?:B|[KMG]iB|ms|s|µs))?")
"""An exponent follows a fraction only: the end of a save id in a folded file name may read `2442e-00`."""


@pytest.mark.parametrize("name", _TABLES)
def test_every_table_fits_every_window_and_cuts_no_number(tables, tabled, name) -> None:
    """Each number of a narrow window is a cell of the widest one; but doctor measures anew."""
    wide = {word for line in tables.run(400, *tabled[name]) for word in words_of(line)}
    for width in (40, 60, 80, 120):
        lines = tables.run(width, *tabled[name])
        assert [line for line in lines if len(line) > width] == []
        numbers = {word for line in lines for word in words_of(line) if _NUMBER.fullmatch(word)}
        assert name.startswith("doctor") or numbers <= wide
        assert lines


def test_a_table_that_is_not_for_a_terminal_has_all_columns_whatever_the_window(call, long_names, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = call("ls", long_names).out.splitlines()
    assert words_of(lines[2]) == ["step", "size", "saved", "age", "tensors", "ranks", "folder", "state"]
    assert any("the-best-one-of-all-by-validation-loss" * 2 in line for line in lines)


def test_columns_that_are_dropped_last_leave_only_for_the_least_texts() -> None:
    columns = [Column("step", is_right=True), Column("folder", drop=LAST_DROP), Column("state", is_whole=True)]
    assert fit_columns(columns, [4, 40, 13], 4 + 2 + 8 + 2 + 13).dropped == []
    assert fit_columns(columns, [4, 40, 13], 4 + 2 + 7 + 2 + 13).dropped == [1]


@pytest.mark.parametrize("room", range(60))
def test_columns_of_numbers_are_whole_whatever_the_room(room) -> None:
    columns = [Column("name"), Column("n", is_right=True, drop=1), Column("note"), Column("size", is_right=True)]
    lengths = [30, 9, 40, 10]
    fitted = fit_columns(columns, lengths, room)
    assert all(width == lengths[n] for n, width in zip(fitted.numbers, fitted.widths, strict=True) if n in {1, 3})
    assert sorted([*fitted.numbers, *fitted.dropped]) == [0, 1, 2, 3]
    assert set(fitted.dropped) <= {1}
    assert sum(fitted.widths) + 2 * (len(fitted.widths) - 1) <= max(room, 8 + 8 + 10 + 4)
