"""`bcp ls --columns`, `--sort`, `--reverse` and `--limit`, and how foreign checkpoints are listed."""

from __future__ import annotations

import pytest
import torch

import bytecheckpoint as bcp


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: the metric of one rises, that of the other falls and is missing once; and a file of torch.save."""
    root = tmp_path_factory.mktemp("ls") / "runs"
    for run, losses in (("a", {5: 0.5, 10: 0.75}), ("b", {5: 0.25, 10: None, 15: 0.125})):
        for step, loss in losses.items():
            metrics = {} if loss is None else {"val_loss": loss}
            bcp.save(root / run, {"x": torch.zeros(step * 100)}, step=step, metadata={"metrics": metrics})
    torch.save({"w": torch.ones(5)}, root / "b" / "w.pt")
    return root


def rows_of(out: str, title: str) -> list[list[list[str]]]:
    """Returns the cells of each table whose first column has this title."""
    tables: list[list[list[str]]] = []
    for line in out.splitlines():
        words = line.split()
        if words[:1] == [title]:
            tables.append([])
        elif line.startswith("  ") and tables and words[0] != "...":
            tables[-1].append(words)
    return tables


def test_columns_are_the_named_ones_in_their_order(call, runs) -> None:
    ended = call("ls", runs, "--columns", "val_loss, step,format")
    assert rows_of(ended.out, "val_loss") == [
        [["0.5", "5", "bytecheckpoint"], ["0.75", "10", "bytecheckpoint"]],
        [
            ["0.25", "5", "bytecheckpoint"],
            ["-", "10", "bytecheckpoint"],
            ["0.125", "15", "bytecheckpoint"],
            ["-", "-", "torch.save"],
        ],
    ]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--sort", "val_loss"], [["5", "10"], ["15", "5", "10", "-"]]),
        (["--sort", "val_loss", "--reverse"], [["10", "5"], ["5", "15", "10", "-"]]),
        (["--sort", "size", "--reverse"], [["10", "5"], ["15", "10", "5", "-"]]),
        (["--sort", "size"], [["5", "10"], ["-", "5", "10", "15"]]),  # the file of torch.save is the smallest
        (["--sort", "step", "--reverse"], [["10", "5"], ["15", "10", "5", "-"]]),
    ],
)
def test_rows_are_sorted_within_their_run_and_those_without_a_value_are_last(call, runs, options, steps) -> None:
    tables = rows_of(call("ls", runs, *options).out, "step")
    assert [[row[0] for row in table] for table in tables] == steps
    items = call("ls", runs, *options, "--json").json["checkpoints"]
    assert ["-" if item["step"] is None else str(item["step"]) for item in items] == [*steps[0], *steps[1]]


def test_a_foreign_checkpoint_which_has_no_save_id_is_last_in_their_order(call, runs) -> None:
    items = call("ls", runs / "b", "--sort", "save_id", "--json").json["checkpoints"]
    assert [item["format"] for item in items] == [*["bytecheckpoint"] * 3, "torch.save"]


def test_a_limit_says_how_many_rows_it_leaves_out(call, runs) -> None:
    ended = call("ls", runs / "b", "--limit", 1, "--sort", "val_loss", "--columns", "step,val_loss")
    assert ended.out.splitlines()[2:] == [
        "  step  val_loss",
        "    15     0.125",
        "  ... and 3 more: --limit 0 shows all",
    ]


@pytest.mark.parametrize("option", ["--columns", "--sort"])
def test_a_name_that_is_no_column_is_refused_with_the_names_that_are(call, runs, option) -> None:
    assert call("ls", runs, option, "loss", "--json").json["error"]["kind"] == "conflict"
    ended = call("ls", runs, option, "loss")
    assert (ended.code, ended.out) == (2, "")
    assert "'loss'" in ended.err
    assert "save_id" in ended.err
    assert "val_loss" in ended.err


def test_reverse_alone_is_wrong_usage(call, runs) -> None:
    assert call("ls", runs, "--reverse").code == 2


def test_a_foreign_checkpoint_is_listed_with_its_format(call, runs) -> None:
    rows = rows_of(call("ls", runs / "b").out, "step")[0]
    assert rows[-1][-2:] == ["w.pt", "torch.save"]
