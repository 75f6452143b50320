"""`bcp report`: one page over all checkpoints of a run, or of several."""

from __future__ import annotations

import fractions
from dataclasses import replace
from datetime import datetime
from xml.etree import ElementTree as ET

import pytest
import torch
from checkpoint_files import flip
from test_report import browse, check_needs_nothing_but_itself, in_browser, words

import bytecheckpoint as bcp
from bytecheckpoint.manifest import encode_manifest
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.tools.render.html.line_chart import Curve, line_chart
from bytecheckpoint.tools.render.number_format import size_text


@pytest.fixture
def runs(tmp_path):
    """Two runs of different sizes, one with metrics."""
    for step in (1, 2, 3):
        metrics = {"loss": 1 / step, "<b>&": float("nan") if step == 2 else float(step)}
        bcp.save(tmp_path / "runs" / "a", {"x": torch.zeros(1000)}, step=step, metadata={"metrics": metrics})
        bcp.save(tmp_path / "runs" / "b", {"x": torch.zeros(9000)}, step=step, async_save=True).result()
    return tmp_path / "runs"


def page_of(call, root, *args: object) -> ET.Element:
    out = root.parent / "page.html"
    ended = call("report", root, "--out", out, *args)
    assert (ended.code, ended.err) == (0, "")
    return ET.fromstring(out.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>\n"))


def hints(page: ET.Element, label: str) -> list[str]:
    (svg,) = [svg for svg in page.iter("svg") if svg.get("aria-label") == f"{label} over the steps"]
    return [circle.find("title").text for circle in svg.iter("circle")]


def test_sizes_times_stalls_rates_and_metrics_are_drawn_over_the_steps(call, runs) -> None:
    page = page_of(call, runs)
    check_needs_nothing_but_itself(page)
    sizes = hints(page, "Size")
    assert [hint.rpartition("\n")[0] for hint in sizes] == [f"{run}\nstep {step}" for run in "ab" for step in (1, 2, 3)]
    num_bytes = bcp.open(runs / "b", step=1).info.num_bytes
    assert sizes[3] == f"b\nstep 1\n{size_text(num_bytes)}"
    assert len(hints(page, "Rate")) == len(hints(page, "Seconds from the call to the last write")) == 6
    assert [hint.splitlines()[0] for hint in hints(page, "Stall of asynchronous saves")] == ["b"] * 3
    assert hints(page, "loss") == ["a\nstep 1\n1", "a\nstep 2\n0.5", "a\nstep 3\n0.333333"]
    assert len(hints(page, "<b>&")) == 2, "NaN is in the table, and no point of a curve"
    rows = list(page.iter("tbody"))[-1]
    assert len(rows) == 6
    assert "6 checkpoints, " in words(page)


def test_a_time_without_a_zone_is_one_of_utc_in_every_list(call, tmp_path) -> None:
    """As another program may have put it into a manifest."""
    for step in (1, 2):
        bcp.save(tmp_path, {"x": 1}, step=step)
    store = LocalStore(str(tmp_path), writer_threads=1)
    for text in ("2026-01-01T00:00:00", "0001-01-01T00:00:00"):
        manifest = layout.read_manifest(store, "step_00000001")
        manifest = replace(manifest, provenance={**manifest.provenance, "created_at": text})
        (tmp_path / "step_00000001" / layout.MANIFEST_NAME).write_bytes(encode_manifest(manifest))
        assert bcp.open(tmp_path, step=1).info.created_at == datetime.fromisoformat(f"{text}+00:00")
        for command in ("ls --sort saved", f"report --out {tmp_path}/page.html", "watch --once", "keep --latest 1"):
            name, *options = command.split()
            assert call(name, tmp_path, *options).code == 0


def test_a_root_of_steps_and_one_checkpoint_have_pages(call, runs) -> None:
    assert hints(page_of(call, runs / "a"), "Size")[0].startswith("step 1\n")
    bcp.save(runs.parent / "alone", {"x": 1})
    assert "1 checkpoint, " in words(page_of(call, runs.parent / "alone"))


def test_a_damaged_checkpoint_is_named_and_hides_no_other(call, runs) -> None:
    flip(runs / "a" / "step_00000002" / "manifest.bcp", 50)
    out = runs.parent / "page.html"
    ended = call("report", runs, "--out", out, "--json")
    assert (ended.code, ended.json["num_checkpoints"], ended.json["num_damaged"]) == (1, 6, 1)
    assert "step_00000002 is damaged: " in out.read_text()


def test_a_file_that_is_never_loaded_is_refused_and_not_called_damaged(call, runs) -> None:
    torch.save(fractions.Fraction(1, 3), runs / "arguments.bin")
    shown = words(page_of(call, runs))
    assert "arguments.bin is refused: " in shown
    assert "damaged" not in shown
    assert call("report", runs, "--out", runs.parent / "page.html", "--json").json["num_damaged"] == 0


def test_nothing_there_is_an_error_and_leaves_no_page(call, tmp_path) -> None:
    ended = call("report", tmp_path / "none", "--out", tmp_path / "page.html")
    assert (ended.code, ended.err.count("\n")) == (3, 1)
    assert not (tmp_path / "page.html").exists()


def test_thousands_of_points_are_some_of_them_and_the_last() -> None:
    chart = line_chart("x", [Curve("", [(step, float(step)) for step in range(5000)])], str, base=10)
    assert 300 < chart.count("<circle") <= 400
    assert "step 4,999" in chart


@in_browser
def test_a_browser_shows_it_and_complains_of_nothing(call, runs, tmp_path) -> None:
    page_of(call, runs)
    shown = browse(tmp_path / "page.html", tmp_path / "profile", "--dump-dom").stdout
    assert shown.count("<svg") == 6
