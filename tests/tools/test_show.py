"""`bcp show`: what it says is what is in the checkpoint."""

from __future__ import annotations

import io
import math
import random

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, encode_manifest, tensor_record
from bytecheckpoint.region import Region
from bytecheckpoint.tools.analysis.element_values import decode_values, has_values
from bytecheckpoint.tools.analysis.module_tree import build_tree
from bytecheckpoint.tools.analysis.summary import TensorEntry, first_in_natural_order, in_natural_order
from bytecheckpoint.tools.analysis.tensor_stats import TensorStats
from bytecheckpoint.tools.render.chunk_map import MAX_COLUMNS, MAX_ROWS, lines_of, map_chunks
from bytecheckpoint.tools.render.number_format import ranges_text, size_text
from bytecheckpoint.tools.render.terminal import Column, Screen, StyledCell, to_json


def test_the_summary_comes_first(call, saved_root) -> None:
    lines = call("show", saved_root).out.splitlines()
    assert lines[0] == str(saved_root / "step_00001000")
    text = "\n".join(lines)
    assert "step          1000" in text
    assert "metadata run  'demo'" in text
    assert "model.head.weight = model.embed.weight" in text
    assert text.index("model.layers.9.bias") < text.index("model.layers.10.bias")


def test_json_adds_up(call, saved_root) -> None:
    shown = call("show", saved_root, "--json").json
    checkpoint = bcp.open(saved_root)
    assert {tensor["fqn"] for tensor in shown["tensors"]} == set(checkpoint.keys())
    assert shown["num_tensors"] == sum(entry["num_tensors"] for entry in shown["entries"])
    num_bytes = sum(tensor["num_bytes"] for tensor in shown["tensors"])
    assert num_bytes == sum(entry["num_bytes"] for entry in shown["entries"])
    assert num_bytes == sum(dtype["num_bytes"] for dtype in shown["dtypes"])
    model = 16 * 8 + 12 * (8 * 8 + 8)
    assert shown["num_parameters"] == model + (1 << 20)
    assert shown["metadata"] == {"run": "demo"}
    for tensor in shown["tensors"]:
        assert tensor["shape"] == list(checkpoint[tensor["fqn"]].shape)


class ModuleOfState(torch.nn.Module):
    """One whose names are like those of an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.out = torch.nn.Linear(3, 4), torch.nn.Linear(4, 5)

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


class HoldsOptimizer:
    """Saves an optimizer as plain data."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "count": 3}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    "entries_of",
    [
        lambda model, optimizer: {"model": model, "optimizer": optimizer},
        lambda model, optimizer: {"train": {"model": model, "optimizer": optimizer}},
        lambda model, optimizer: {"model": model, "optimizer": optimizer.state_dict()},
        lambda model, optimizer: {"model": model, "train": HoldsOptimizer(optimizer)},
        lambda model, optimizer: {"model": model, "optimizers": [optimizer.state_dict()]},
    ],
    ids=["entries", "nested entries", "state_dict", "within an object", "list"],
)
def test_optimizer_state_counts_as_no_parameters_wherever_it_stands(call, tmp_path, entries_of) -> None:
    model = ModuleOfState()
    optimizer = torch.optim.AdamW(model.parameters())
    model.out(model.state(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    bcp.save(tmp_path / "c", entries_of(model, optimizer))
    shown = call("show", tmp_path / "c", "--json").json
    assert shown["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_rows_are_limited_and_the_rest_is_counted(call, saved_root) -> None:
    out = call("show", saved_root, "--limit", 3).out
    total = len(bcp.open(saved_root))
    assert f"... and {total - 3} more" in out
    assert "more" not in call("show", saved_root, "--limit", 0).out


def test_the_first_names_are_those_of_the_whole_order() -> None:
    parts = ["", "0", "00", "2", "10", "a", "a0", "a10", "a2", "b"]
    rng = random.Random(0)
    for _ in range(200):
        names = {".".join(rng.choices(parts, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 30))}
        count = rng.randint(0, 35)
        assert first_in_natural_order(names, count) == in_natural_order(names)[:count]


def test_the_tree_collapses_layers_that_are_equal(call, saved_root) -> None:
    out = call("show", saved_root, "--tree").out
    assert "layers.0-11" in out
    tree = call("show", saved_root, "--tree", "--json").json["tree"]
    model = next(node for node in tree if node["name"] == "model")
    layers = next(node for node in model["children"] if node["name"] == "layers.0-11")
    assert layers["num_tensors"] == 24
    assert {child["name"]: child["shape"] for child in layers["children"]} == {"bias": [8], "weight": [8, 8]}


def test_layers_that_differ_stay_apart() -> None:
    tensors = [TensorEntry(f"layers.{n}.w", "float32", (2, 2) if n % 2 else (4,), None) for n in range(6)]
    tensors.append(TensorEntry("layers.6.w", "bfloat16", (4,), None))
    (root,) = build_tree(tensors)
    assert [child.name for child in root.children] == ["0,2,4.w", "1,3,5.w", "6.w"]
    assert root.num_tensors == 7


def test_odd_names_make_a_tree(call, tmp_path) -> None:
    names = ["a", "a.", "a..b", "a.01", "a.1", "." * 5, "x." * 3000]
    nodes = build_tree([TensorEntry(name, "float32", (), None) for name in names])
    assert sum(node.num_tensors for node in nodes) == len(names)


def test_a_tensor_in_depth(call, saved_root) -> None:
    shown = call("show", saved_root, "--tensor", "model.layers.3.weight", "--json").json
    (tensor,) = shown["tensors"]
    (chunk,) = tensor["chunks"]
    assert tensor["tiles_shape"]
    assert (chunk["offsets"], chunk["lengths"], chunk["byte_length"]) == ([0, 0], [8, 8], 256)
    content = (saved_root / "step_00001000" / chunk["file"]).read_bytes()
    stored = torch.frombuffer(bytearray(content[chunk["byte_offset"] :][:256]), dtype=torch.float32).view(8, 8)
    assert torch.equal(stored, bcp.open(saved_root)["model.layers.3.weight"][...])
    assert "[0:8, 0:8]" in call("show", saved_root, "--tensor", "model.layers.3.weight").out


def test_tensors_by_glob_and_under_their_tied_name(call, saved_root) -> None:
    names = [t["fqn"] for t in call("show", saved_root, "--tensor", "model.layers.1*.bias", "--json").json["tensors"]]
    assert names == [f"model.layers.{n}.bias" for n in (1, 10, 11)]
    out = call("show", saved_root, "--tensor", "model.head.weight").out
    assert "tied to model.embed.weight" in out


def test_a_tensor_that_is_not_there_is_not_found(call, saved_root) -> None:
    ended = call("show", saved_root, "--tensor", "layers.3.weight")
    assert ended.code == 3
    assert "near matches: model.layers.3.weight" in ended.err


def test_files_and_objects(call, saved_root) -> None:
    shown = call("show", saved_root, "--files", "--objects", "--json").json
    (file,) = shown["files"]
    assert file["num_bytes"] == shown["num_bytes"]
    assert file["num_chunks"] == shown["num_chunks"]
    objects = {item["fqn"]: item for item in shown["objects"]}
    assert objects["epoch"] == {"fqn": "epoch", "rank": None, "type": "int", "value": 3}
    assert objects["rng"]["rank"] == 0
    assert objects["rng"]["value"] == "uint8 5"
    out = call("show", saved_root, "--files", "--objects").out
    assert "epoch" in out
    assert file["name"] in out


def draw_chunks(shape, chunks) -> list[str]:
    drawn = map_chunks(tensor_record("uint8", shape, chunks), max_rows=MAX_ROWS, max_columns=MAX_COLUMNS)
    return [] if drawn is None else lines_of(drawn)


def test_a_map_of_chunks() -> None:
    quarters = [Region((r, c), (4, 4)) for r in (0, 4) for c in (0, 4)]
    chunks = [Chunk(region, file, 0, 0) for file, region in enumerate(quarters)]
    assert draw_chunks((8, 8), chunks) == ["AAAABBBB"] * 4 + ["CCCCDDDD"] * 4
    assert draw_chunks((8, 8), chunks[:3])[-1] == "CCCC...."
    large = [Chunk(Region((0, 0), (600, 1000)), 3, 0, 0), Chunk(Region((600, 0), (600, 1000)), 5, 0, 0)]
    assert draw_chunks((1200, 1000), large) == ["A" * 48] * 4 + ["B" * 48] * 4
    line = [Chunk(Region((n * 10,), (10,)), n, 0, 0) for n in range(4)]
    assert draw_chunks((40,), line) == ["A" * 10 + "B" * 10 + "C" * 10 + "D" * 10]
    assert draw_chunks((8, 8), chunks[:1]) == []
    assert draw_chunks((), []) == []
    slices = [Chunk(Region((0, n, 0), (4, 1, 3)), n, 0, 0) for n in range(3)]
    assert draw_chunks((4, 3, 3), slices) == ["ABC"] * 4
    assert draw_chunks((0, 3), [chunks[0], chunks[0]]) == []


def test_the_summary_says_how_tensors_are_cut_and_who_wrote_them(call, tmp_path) -> None:
    from packed_checkpoints import contents_of, write_checkpoint

    from bytecheckpoint.region import grid_regions

    tensor = torch.zeros(8, 8)
    quarters = contents_of("a", tensor, grid_regions((8, 8), (4, 4)), "none")
    rows = contents_of("b", tensor, grid_regions((8, 8), (2, 8)), "none")
    odd = contents_of("c", tensor, [Region((0, 0), (8, 3)), Region((0, 3), (8, 5))], "none")
    one = contents_of("d", tensor, [Region((0, 0), (8, 8))], "none")
    write_checkpoint(tmp_path / "c", [quarters + rows, odd + one])
    shown = call("show", tmp_path / "c", "--json").json
    assert {cut["name"]: (cut["num_tensors"], cut["num_chunks"], cut["num_bytes"]) for cut in shown["cuts"]} == {
        "2 x 2": (1, 4, 256),
        "4 x 1": (1, 4, 256),
        "irregular": (1, 2, 256),
        "whole": (1, 1, 256),
    }
    sizes = sorted(file.stat().st_size for file in (tmp_path / "c" / "data").iterdir())
    writers = {"num_ranks": 2, "min_num_bytes": sizes[0], "median_num_bytes": sum(sizes) / 2}
    assert shown["writers"] == {**writers, "max_num_bytes": sizes[1]}
    out = call("show", tmp_path / "c").out
    assert "written by  2 ranks" in out
    assert "cut into" in out


def test_a_tensor_of_many_chunks_shows_some_and_counts_them(call, tmp_path) -> None:
    count = 20_000
    chunks = [Chunk(Region((n, 0), (1, 4)), n % 100, (n // 100) * 16, 16) for n in range(count)]
    manifest = Manifest(
        save_id="s",
        files=[DataFile(f"data/s-{n:05d}-0.safetensors", 16 * count // 100) for n in range(100)],
        tensors={"w": tensor_record("float32", (count, 4), chunks)},
    )
    (tmp_path / "manifest.bcp").write_bytes(encode_manifest(manifest))
    out = call("show", tmp_path, "--tensor", "w", "--limit", 5).out
    assert "... and 19,995 more chunks" in out
    assert "[4:5, 0:4]" in out
    assert "[5:6, 0:4]" not in out
    shown = call("show", tmp_path, "--files", "--json").json
    assert shown["num_chunks"] == count
    assert {file["num_chunks"] for file in shown["files"]} == {200}
    assert [cut["name"] for cut in shown["cuts"]] == ["20000 x 1"]


def test_the_map_is_shown(call, tmp_path) -> None:
    halves = [Chunk(Region((0, 0), (2, 4)), 0, 0, 32), Chunk(Region((2, 0), (2, 4)), 1, 0, 32)]
    manifest = Manifest(
        save_id="s",
        files=[DataFile("data/a", 32), DataFile("data/b", 32)],
        tensors={"w": tensor_record("float32", (4, 4), halves)},
    )
    (tmp_path / "manifest.bcp").write_bytes(encode_manifest(manifest))
    out = call("show", tmp_path, "--tensor", "w").out
    assert "    AAAA\n    AAAA\n    BBBB\n    BBBB\n" in out


def test_stats_of_compressed_tensors_are_those_of_their_values(call, tmp_path) -> None:
    from packed_checkpoints import codecs_in, contents_of, write_checkpoint

    from bytecheckpoint.region import Region

    tensor = torch.randn(700, 900, generator=torch.Generator().manual_seed(0))
    chunks = contents_of("a", tensor, [Region((0, 0), (300, 900)), Region((300, 0), (400, 900))], "zstd")
    assert codecs_in(write_checkpoint(tmp_path / "c", [chunks])) == {"a": {"zstd"}}
    whole = call("show", tmp_path / "c", "--stats", "--json").json
    (shown,) = whole["tensors"]
    assert whole["compressed"]["num_chunks"] == 2
    assert whole["compressed"]["num_bytes"] < whole["compressed"]["raw_num_bytes"] == 4 * 700 * 900
    assert "compressed  2 chunks; all take 2." in call("show", tmp_path / "c").out
    assert shown["stats"]["mean"] == pytest.approx(tensor.double().mean().item(), abs=1e-9)
    assert shown["stats"]["max"] == tensor.max().item()


def test_stats_are_those_of_the_values(call, tmp_path) -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    values[:3] = torch.tensor([math.nan, math.inf, 0.0])
    state = {
        "f": values,
        "b": values.to(torch.bfloat16),
        "i": torch.tensor([-(2**63), 2**63 - 1, 0]),
        "u": torch.tensor([0, 255], dtype=torch.uint8),
        "t": torch.tensor([True, False, True]),
        "c": torch.tensor([0j, 1 + 2j]),
        "e": torch.empty(0, 3),
        "nan": torch.full((2,), math.nan),
    }
    bcp.save(tmp_path / "c", state)
    shown = {t["fqn"]: t["stats"] for t in call("show", tmp_path / "c", "--stats", "--json").json["tensors"]}
    finite = values[3:].double()
    stats = shown["f"]
    finite = torch.cat([finite, torch.zeros(1, dtype=torch.float64)])
    assert stats["min"] == finite.min().item()
    assert stats["max"] == finite.max().item()
    assert stats["mean"] == pytest.approx(finite.mean().item(), abs=1e-9)
    assert stats["std"] == pytest.approx(finite.std(correction=0).item(), rel=1e-9)
    assert (stats["num_nan"], stats["num_inf"], stats["num_zeros"]) == (1, 1, 1)
    assert (shown["b"]["num_nan"], shown["b"]["num_inf"]) == (1, 1)
    assert shown["b"]["max"] == state["b"][3:].max().item()
    assert (shown["i"]["min"], shown["i"]["max"]) == (-(2**63), 2**63 - 1)
    assert (shown["u"]["max"], shown["u"]["mean"]) == (255, 127.5)
    assert (shown["t"]["max"], shown["t"]["num_zeros"]) == (1, 1)
    assert shown["c"] == {
        "min": None, "max": None, "mean": None, "std": None, "num_nan": 0, "num_inf": 0, "num_zeros": 1,
    }  # fmt: skip
    assert shown["e"]["mean"] is None
    assert (shown["nan"]["num_nan"], shown["nan"]["mean"]) == (2, None)
    assert "NaN" in call("show", tmp_path / "c", "--stats").out


def test_stats_are_printed_beside_the_tree(call, tmp_path) -> None:
    bcp.save(tmp_path / "c", {"w": torch.tensor([1.0, 2.5])})
    lines = [line.split() for line in call("show", tmp_path / "c", "--tree", "--stats").out.splitlines()]
    assert ["w", "float32", "2", "2", "8", "B"] in lines
    assert ["w", "float32", "2", "1", "2.5", "1.75", "0.75", "0", "0", "0"] in lines


def test_stats_of_a_large_tensor_come_from_many_parts(call, saved_root) -> None:
    (tensor,) = call("show", saved_root, "--tensor", "large", "--stats", "--json").json["tensors"]
    numel = 1 << 20
    assert tensor["stats"]["mean"] == pytest.approx((numel - 1) / 2, rel=1e-12)
    assert tensor["stats"]["std"] == pytest.approx(math.sqrt((numel**2 - 1) / 12), rel=1e-12)
    assert tensor["stats"]["num_zeros"] == 1


def test_stats_of_damaged_values_are_refused(call, root) -> None:
    from checkpoint_files import data_file, flip

    flip(data_file(root), data_file(root).stat().st_size // 2)
    ended = call("show", root, "--stats")
    assert ended.code == 1
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("dtype", sorted(name for name in DTYPE_ITEMSIZES if has_values(name) and hasattr(torch, name)))
def test_every_bit_pattern_has_the_value_that_torch_gives_it(dtype) -> None:
    content = bytes(range(256)) * 16
    expected = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if dtype == "bool":
        expected = (expected & 1).view(torch.bool)
        content = bytes(expected.view(torch.uint8).tolist())
    else:
        expected = expected.view(getattr(torch, dtype))
    values = decode_values(dtype, memoryview(content))
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    if not dtype.startswith(("float", "bfloat", "complex")):
        assert values.tolist() == expected.tolist()
        return
    with np.errstate(invalid="ignore"):
        found = torch.from_numpy(values.astype(np.complex128 if wide.is_complex else np.float64))
    assert torch.equal(
        torch.nan_to_num(torch.view_as_real(found) if wide.is_complex else found),
        torch.nan_to_num(torch.view_as_real(expected.to(wide)) if wide.is_complex else expected.to(wide)),
    )


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    stats = TensorStats()
    values = np.random.default_rng(0).normal(1e6, 1, 10_000)
    for part in np.array_split(values, 7):
        stats.add(part)
    assert stats.mean == pytest.approx(values.mean(), rel=1e-14)
    assert stats.std == pytest.approx(values.std(), rel=1e-9)


def test_a_terminal_gets_colours_and_a_pipe_none(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [["model." + "x" * 80, StyledCell("1.0 KiB", "red")]]
    plain, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    for stream in (plain, terminal):
        screen = Screen(stream)
        screen.line("title", style="bold")
        screen.table([Column("tensor"), Column("size", is_right=True)], rows)
    assert "\x1b[" not in plain.getvalue()
    assert rows[0][0] in plain.getvalue()
    assert "\x1b[" in terminal.getvalue()
    assert max(len(line) for line in terminal.getvalue().splitlines()[1:]) < 90
    assert terminal.getvalue().count("x") == 80
    assert "\x1b[31m1.0 KiB" in terminal.getvalue()


def test_sizes_and_ranges_read_well() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 1536, 10 * 1024**3)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "10.0 GiB",
    ]
    assert ranges_text([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_what_json_lacks_becomes_null_or_text() -> None:
    assert to_json({"a": math.nan, 1: b"\x01", "c": (1, {2})}) == {"a": None, "1": "01", "c": [1, "{2}"]}
