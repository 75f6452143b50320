"""`bcp show --html`: one page that is well-formed, asks nobody for anything, tells what is in the checkpoint, stays
small and runs nothing that a checkpoint has put into a name.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from fake_telemetry import checkpoint_with_telemetry, ordinary, record
from packed_checkpoints import contents_of, write_checkpoint

import bytecheckpoint as bcp
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, encode_manifest, tensor_record
from bytecheckpoint.region import Region, grid_regions
from bytecheckpoint.tools.analysis.module_tree import build_tree
from bytecheckpoint.tools.analysis.summary import TensorEntry
from bytecheckpoint.tools.render.chunk_map import map_chunks
from bytecheckpoint.tools.render.treemap import Box, lay_out, squarify

SVG_WIDTH = 960


def page_of(call, path: Path, *args: object) -> ET.Element:
    out = path.parent / "report.html"
    ended = call("show", path, "--html", out, *args)
    assert ended.code == 0, ended.err
    assert f"report written to {out}" in ended.out
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n<html")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def words(page: ET.Element) -> str:
    return "\n".join(page.itertext())


def titles(page: ET.Element) -> list[str]:
    return [element.text or "" for element in page.iter("title")]


def test_the_page_tells_what_is_in_the_checkpoint(call, root) -> None:
    page = page_of(call, root, "--objects", "--stats")
    assert page.find("head/title").text == str(root / "step_00001000")
    assert [element.text for element in page.iter("h2")] == [
        "Where the bytes are",
        "How the save went",
        "Modules",
        "Tensors",
        "Files",
        "Plain values",
    ]
    text = words(page)
    for expected in ("model.layers.11.weight", "layers.0-11", "float32", "1 rank", "epoch", "5.243e+05"):
        assert expected in text
    (file,) = bcp.open(root).manifest.files
    assert file.name in text


def test_the_page_needs_nothing_but_itself(call, root) -> None:
    page = page_of(call, root)
    tags = {element.tag for element in page.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use", "a"}
    attributes = {name for element in page.iter() for name in element.attrib}
    assert not attributes & {"src", "href", "srcset", "action", "data"}
    assert not [name for name in attributes if name.startswith("on")]
    (policy,) = [meta.get("content") for meta in page.iter("meta") if meta.get("http-equiv")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    text = (root.parent / "report.html").read_text()
    assert set(re.findall(r"<(\w+)[^<>]*/>", text)) == {"meta"}, "HTML closes no other element so"
    style = page.find("head/style").text
    assert "url(" not in style
    assert "@import" not in style
    assert "://" not in ET.tostring(page, encoding="unicode").replace("svg xmlns", "")


def test_the_treemap_has_areas_in_the_proportion_of_sizes(call, tmp_path) -> None:
    state = {"a": {"x": torch.zeros(600, 100), "y": torch.zeros(200, 100)}, "b": torch.zeros(200, 100)}
    bcp.save(tmp_path / "c", state)
    page = page_of(call, tmp_path / "c")
    svg = next(page.iter("svg"))
    areas = {}
    for rect in svg.iter("rect"):
        name = rect.find("title").text.splitlines()[0]
        areas[name] = float(rect.get("width")) * float(rect.get("height"))
    assert areas["a"] / areas["b"] == pytest.approx(4, rel=0.01)
    assert areas["a.x"] / areas["a.y"] == pytest.approx(3, rel=0.05)
    assert areas["a"] + areas["b"] == pytest.approx(960 * 480, rel=0.01)


def test_the_chunks_of_a_tensor_are_where_they_lie(call, tmp_path) -> None:
    regions = grid_regions((100, 100), (50, 25))
    contents = contents_of("w", torch.zeros(100, 100), regions, "none")
    write_checkpoint(tmp_path / "c", [contents[:4], contents[4:]])
    page = page_of(call, tmp_path / "c", "--tensor", "w")
    picture = list(page.iter("svg"))[-1]
    rects = [(float(r.get("x")), float(r.get("y")), r.get("fill"), r.find("title").text) for r in picture.iter("rect")]
    assert len(rects) == 8
    fills = {fill for *_, fill, _ in rects}
    assert len(fills) == 2
    assert rects[0][:2] == (0, 0)
    assert rects[-1][3].splitlines() == ["[50:100, 75:100]", "4.9 KiB", "data/packed-00001-0.safetensors"]
    assert (rects[-1][0], rects[-1][1]) == (360, 160)


def test_many_chunks_become_fields() -> None:
    regions = grid_regions((100, 300), (1, 1))
    record = tensor_record("uint8", (100, 300), [Chunk(r, r.offsets[0] // 50, 0, 1) for r in regions])
    drawn = map_chunks(record, max_rows=96, max_columns=160)
    assert drawn.fields.shape == (96, 160)
    assert drawn.files == [0, 1]
    assert (drawn.fields[:48] == 0).all()
    assert (drawn.fields[48:] == 1).all()


def test_of_many_dimensions_those_that_are_cut_are_shown() -> None:
    regions = grid_regions((2, 8, 3, 12), (2, 2, 3, 4))
    record = tensor_record("uint8", (2, 8, 3, 12), [Chunk(r, n, 0, 1) for n, r in enumerate(regions)])
    drawn = map_chunks(record, max_rows=100, max_columns=100)
    assert drawn.axes == (1, 3)
    expected = np.repeat(np.repeat(np.arange(12).reshape(4, 3), 2, axis=0), 4, axis=1)
    assert (drawn.fields == expected).all()


HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\x00\x1b]0;\"'&"


def test_nothing_in_a_name_becomes_markup(call, tmp_path) -> None:
    odd = HOSTILE.replace("\x00", "")
    bcp.save(tmp_path / "c", {odd: torch.zeros(4), "plain" + odd: odd}, metadata={odd: odd})
    (telemetry,) = (tmp_path / "c" / "telemetry").iterdir()
    content = record(0, {odd: (0.0, 1.0)}, host=odd, save_id=bcp.open(tmp_path / "c").info.save_id)
    telemetry.write_text(__import__("json").dumps(content))
    page = page_of(call, tmp_path / "c", "--objects")
    assert not list(page.iter("script"))
    assert not list(page.iter("img"))
    assert "<script>" in words(page)


def test_how_the_save_went_is_drawn(call, tmp_path) -> None:
    path = checkpoint_with_telemetry(tmp_path / "c", [ordinary(0), ordinary(1, write_s=3.0), ordinary(2, late_s=0.4)])
    page = page_of(call, path)
    gantt, heat = list(page.iter("svg"))[-2:]
    bars = [rect for rect in gantt.iter("rect") if "rank" in rect.find("title").text]
    assert len(bars) == 9
    slow = next(rect for rect in bars if rect.find("title").text == "rank 1 on node0\nwrite: 3.00 s")
    assert float(slow.get("x")) + float(slow.get("width")) == pytest.approx(SVG_WIDTH, abs=0.1)
    cells = list(heat.iter("rect"))
    assert len(cells) == 9
    shades = {rect.find("title").text: rect.get("fill") for rect in cells}
    assert shades["rank 1\nwrite: 3.00 s"] == "hsl(14 85% 40%)"
    assert shades["rank 0\nwrite: 1.00 s"] == "hsl(14 85% 76%)"
    assert "called late" not in words(page.find("body/h1"))


def test_a_checkpoint_without_telemetry_or_tensors_has_a_page(call, tmp_path) -> None:
    bcp.save(tmp_path / "c", {"x": 1})
    shutil.rmtree(tmp_path / "c" / "telemetry")
    assert "no telemetry that can be understood" in words(page_of(call, tmp_path / "c"))


def test_thousands_of_ranks_and_layers_make_a_small_page(call, tmp_path) -> None:
    path = checkpoint_with_telemetry(tmp_path / "c", [ordinary(rank, write_s=1 + rank / 999) for rank in range(1000)])
    count = 1000
    files = [DataFile(f"data/timed-{n:05d}-0.safetensors", 64 * count) for n in range(1000)]
    tensors = {
        f"model.m{n}.weight_{n % 7}": tensor_record(
            "float32", (100, 16), [Chunk(r, (n + k) % 1000, n * 64, 64) for k, r in enumerate(rows(100))]
        )
        for n in range(count)
    }
    (path / "manifest.bcp").write_bytes(encode_manifest(Manifest(save_id="timed", files=files, tensors=tensors)))
    page = page_of(call, path)
    assert (tmp_path / "report.html").stat().st_size < 2 << 20
    text = words(page)
    assert "1,000 in 100,000 chunks" in text
    assert "... and 600 more" in text
    assert "100 chunks in 100 files" in text
    assert len(list(page.iter("rect"))) < 8000


def rows(count: int) -> list[Region]:
    return [Region((n, 0), (1, 16)) for n in range(count)]


def test_a_report_that_cannot_be_written_is_one_line(call, saved_root, tmp_path) -> None:
    ended = call("show", saved_root, "--html", tmp_path / "nowhere" / "report.html")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    ended = call("show", saved_root, "--html", "/dev/full")
    assert (ended.code, ended.out, ended.err.count("\n")) == (4, "", 1)
    assert call("show", saved_root, "--html", tmp_path).code == 2


def test_json_names_the_report(call, saved_root, tmp_path) -> None:
    out = tmp_path / "r.html"
    assert call("show", saved_root, "--html", out, "--json").json["html"] == str(out)
    assert out.exists()


@pytest.mark.parametrize("count", [1, 2, 3, 10, 41])
def test_squares_fill_the_box_without_overlaps(count) -> None:
    sizes = [float(2 ** (-n / 3)) for n in range(count)]
    boxes = squarify(sizes, Box(5.0, 7.0, 300.0, 200.0))
    areas = [box.width * box.height for box in boxes]
    assert areas == pytest.approx([60_000 * size / sum(sizes) for size in sizes], rel=1e-6)
    assert min(box.x for box in boxes) == 5
    assert max(box.x + box.width for box in boxes) == pytest.approx(305)
    assert max(box.y + box.height for box in boxes) == pytest.approx(207)
    ratios = [max(box.width / box.height, box.height / box.width) for box in boxes]
    assert sorted(ratios)[len(ratios) // 2] < 3


def test_small_siblings_share_a_tile() -> None:
    nodes = build_tree([TensorEntry(f"m.t{n}x", "float32", (n + 1, n + 1), None) for n in range(100)])
    tiles = lay_out(nodes, Box(0.0, 0.0, 900.0, 400.0))
    assert len(tiles) == 42
    assert tiles[-1].name == "60 more" or any(tile.name == "60 more" for tile in tiles)
    shares = [tile for tile in tiles if tile.depth == 1]
    assert sum(tile.node.num_bytes for tile in shares) == nodes[0].num_bytes


def find_chromium() -> str | None:
    """One that is installed, or that Playwright has downloaded."""
    names = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
    downloaded = sorted((Path.home() / ".cache" / "ms-playwright").glob("chromium*/chrome-linux*/*"))
    found = [str(path) for path in downloaded if path.name in {"chrome", "headless_shell", "chrome-headless-shell"}]
    return next(filter(None, [*map(shutil.which, names), *found]), None)


CHROMIUM = find_chromium()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; the page is parsed all the same")
def test_a_browser_shows_it_and_complains_of_nothing(call, root, tmp_path) -> None:
    page_of(call, root)
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--enable-logging=stderr", f"--screenshot={picture}", "--window-size=1000,2000"]
    url = (root.parent / "report.html").as_uri()
    ended = subprocess.run([CHROMIUM, *options, url], capture_output=True, text=True, check=True)
    assert picture.stat().st_size > 10_000
    assert not re.findall(r"CONSOLE.*", ended.stderr)
    dumped = subprocess.run([CHROMIUM, *options[:4], "--dump-dom", url], capture_output=True, text=True, check=True)
    assert "How the save went" in dumped.stdout
