"""What the README and docs/ show runs as it stands, and what they point to is there. The blocks of docs/format.md and
docs/cli.md have tests of their own.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import shlex
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from stream_loaders import StreamLoader, state_of
from test_site import RUN_HERE
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from training import mlp
from two_llamas import (
    GROUPS,
    HEADS,
    VOCABULARY,
    Llama,
    Megatron,
    llama_configuration,
    megatron_arguments,
    write_safetensors,
)

import bytecheckpoint as bcp
from bytecheckpoint.name_maps.schema import parse_map
from bytecheckpoint.region import Region, find_tiling_fault
from bytecheckpoint.tools.main import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run(block: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(textwrap.dedent(block), "a block of the docs", "exec"), names)
    return names


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The names of two runs of the README's first block, in one folder."""
    monkeypatch.chdir(tmp_path)
    return [run_printing(blocks_of(README)[0], {}) for _ in range(2)]


def run_printing(block: str, names: dict[str, Any]) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = run(block, names)
    return {**names, "printed": printed.getvalue()}


def test_the_first_example_resumes_when_it_is_run_again(twice: list[dict[str, Any]]) -> None:
    assert [names["printed"] for names in twice] == ["first step: 0\n", "first step: 100\n"]
    assert [names["step"] for names in twice] == [99, 199]
    assert bcp.steps("run") == [99, 100, 150, 199]  # the restored step is held


def test_the_calls_without_a_manager_save_load_and_read_rows(twice: list[dict[str, Any]]) -> None:
    names = run_printing(blocks_of(README)[1], twice[1])
    assert names["printed"].startswith("tensor([[")
    assert Path("ckpt/step_00001000/manifest.bcp").is_file()


def test_the_example_with_data_and_random_numbers_goes_on_in_the_middle_of_an_epoch(
    twice: list[dict[str, Any]],
) -> None:
    first, again = (run(blocks_of(README)[2], {**names, "torch": torch}) for names in twice)
    assert (first["report"], first["step"]) == (None, 127)
    assert (again["report"].step, again["step"]) == (100, 127)
    assert torch.equal(first["batch"], again["batch"])


def test_the_loop_of_the_page_about_the_manager_runs(tmp_path: Path) -> None:
    names = {"root": tmp_path, "state": {"model": mlp()}, "num_steps": 501, "train": float}
    run(blocks_of(ROOT / "docs" / "manager.md")[0], {"bcp": bcp, **names})
    assert bcp.latest(tmp_path) == 500


def test_the_example_of_the_page_about_data_loaders_runs(tmp_path: Path) -> None:
    model, loader = mlp(), StreamLoader({"a": state_of("a")})
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "loader": loader}
    numbers = {"step": 1, "dp_rank": 0, "dp_size": 1}
    run(blocks_of(ROOT / "docs" / "data.md")[0], {"bcp": bcp, "root": tmp_path, **numbers, **names})
    assert loader.num_loads == 1


def test_a_loop_over_streams_goes_on_where_it_was_as_the_page_about_data_loaders_says(tmp_path: Path) -> None:
    _, loop, _, sources = blocks_of(ROOT / "docs" / "data.md")
    texts = [Path(name) for name in "abcd"]
    read = run(sources, {"bcp": bcp, "tokens_of": lambda path: [[ord(path.name)] * 2048 for _ in range(20)]})["read"]
    numbers = {"batch_size": 4, "dp_rank": 0, "dp_size": 1}
    trained: list[str] = []
    for num_steps in (6, 20):
        names = {"state": {}, "root": tmp_path, "paths": texts, "read": read, "num_steps": num_steps, **numbers}
        run(loop, {"bcp": bcp, **names, "train": lambda batch: trained.extend(chr(row[0]) for row in batch)})
    assert sorted(trained) == sorted("abcd" * 20)


def test_all_ways_to_load_a_part_fill_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks_of(DOCS / "how-to" / "load-part.md")
    saved = run_printing(block, {})
    lines = [line for line in block.splitlines() if re.match(r"(report = )?bcp\.load\(", line)]
    assert len(lines) == 4
    for line in lines:
        model = torch.nn.Linear(16, 4)
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        run(line, {"bcp": bcp, "torch": torch, "model": model, "state": state})
        assert torch.equal(model.weight, saved["model"].weight), line
    assert torch.equal(saved["tree"]["model"]["weight"], saved["model"].weight)


def documented_placement() -> Any:
    (block,) = blocks_of(ROOT / "docs" / "placements.md")
    names = {"Placement": Placement, "dataclass": dataclass, "__name__": __name__}
    return run(block, names)["Cyclic"]()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_placement_is_saved_and_loaded(tmp_path: Path, mesh: DeviceMesh) -> None:
    def placed(value: torch.Tensor) -> DTensor:
        spec = DTensorSpec(mesh, (documented_placement(),), TensorMeta(value.shape, value.stride(), value.dtype))
        return DTensor(value, spec, requires_grad=False)

    bcp.save(tmp_path / "checkpoint", {"w": placed(torch.ones(4, 3))})
    loaded = torch.zeros(4, 3)
    bcp.load(tmp_path / "checkpoint", {"w": placed(loaded)})
    assert loaded.all()


def test_the_placement_says_which_rows_a_rank_holds() -> None:
    cyclic = documented_placement()
    parts = [cyclic.checkpoint_regions((8, 5), 3, index) for index in range(3)]
    assert [offsets[0] for offsets, _ in parts[1]] == [1, 4, 7]
    assert find_tiling_fault((8, 5), [Region(*region) for of_rank in parts for region in of_rank]) is None


def test_the_test_of_several_ranks_is_python() -> None:
    """It is not run: workers import what they are sent from a module."""
    (block,) = blocks_of(ROOT / "CONTRIBUTING.md")
    compile(textwrap.dedent(block), "CONTRIBUTING.md", "exec")


def test_the_calls_for_each_framework_are_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plain model in the place of a framework's, where one can stand there."""
    monkeypatch.chdir(tmp_path)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    fsdp1, deepspeed, megatron, pipelines = blocks_of(ROOT / "docs" / "frameworks.md")
    run(fsdp1, {"bcp": bcp, "path": tmp_path / "fsdp1", "fsdp_model": model, "optimizer": optimizer})
    run(megatron, {"bcp": bcp, "model": [model], "optimizer": optimizer, "iteration": 7})
    assert bcp.latest("checkpoints") == 7
    for block in (deepspeed, pipelines):
        compile(block, "docs/frameworks.md", "exec")


def test_the_way_through_a_local_disk_runs(tmp_path: Path) -> None:
    (block,) = blocks_of(ROOT / "docs" / "local_stage.md")
    block = block.replace("/nvme/stage", str(tmp_path / "nvme"))
    for _ in range(2):
        names = run(block, {"bcp": bcp, "root": tmp_path / uuid.uuid4().hex, "state": {"model": mlp()}})
        assert names["handle"].local().step == 2000
    assert list((tmp_path / "nvme").iterdir()) == []


def test_the_way_through_memory_runs(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    managed, block = blocks_of(ROOT / "docs" / "memory.md")
    memory = f'copies=1, root="{tmp_path / "memory"}"'
    names = run(
        managed.replace("copies=1", memory), {"bcp": bcp, "root": tmp_path / "managed", "state": {"model": mlp()}}
    )
    assert (names["manager"].steps(), names["manager"].next_step) == ([1000], 0)
    block = block.replace("/dev/shm/bytecheckpoint", str(tmp_path / "memory"))
    names = run(block, {"bcp": bcp, "root": tmp_path / "run", "state": {"model": mlp()}})
    assert names["handle"].result().tier == "memory"
    assert bcp.latest(tmp_path / "run") == 2002
    assert {str(each.message)[:15] for each in recwarn} <= {"the memory root"}


def test_random_numbers_are_saved_and_restored_as_the_page_says(tmp_path: Path) -> None:
    first, places, own = blocks_of(ROOT / "docs" / "random_numbers.md")
    model = torch.nn.Linear(2, 2)
    made = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "root": tmp_path, "step": 3}
    names = run(first, {"bcp": bcp, **made, "loader": [torch.ones(2)]})
    drawn = torch.rand(())
    names["report"].restore_rng()
    assert torch.rand(()) == drawn
    run(places, {"bcp": bcp, "mesh": SimpleNamespace(get_local_rank=len), "pp_rank": 0, "dp_rank": 1})
    names |= run(own, {**names, "np": np, "random": random, "torch": torch})
    bcp.save(tmp_path, names["state"], step=4)


def test_checkpoints_of_others_are_read_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"lm_head.weight": torch.ones(20, 2)}, "pytorch_model.bin")
    Path("Llama-3.1-8B").mkdir()
    torch.save(model.state_dict(), "Llama-3.1-8B/pytorch_model.bin")
    Path("run").mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run/step-1000")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for folder, suffix in (("run/checkpoint-500", "pt"), ("accelerate_state", "bin")):
        Path(folder).mkdir()
        torch.save(model.state_dict(), f"{folder}/pytorch_model.bin")
        torch.save(optimizer.state_dict(), f"{folder}/optimizer.{suffix}")
        torch.save(scheduler.state_dict(), f"{folder}/scheduler.{suffix}")
    lists = {"optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()]}
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": model.state_dict(), **lists}, "x.ckpt")
    names = {"bcp": bcp, "model": model, "module": model, "optimizer": optimizer, "scheduler": scheduler}
    blocks = blocks_of(ROOT / "docs" / "foreign.md")
    assert len(blocks) == 3
    for block in blocks:
        run(block, names)


def test_checkpoints_are_seen_through_maps_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the small models of another test, under the names of the page."""
    monkeypatch.chdir(tmp_path)
    gpt, llama = Megatron(), Llama()
    bcp.save("megatron/iter_0001000", {"model": gpt, "args": vars(megatron_arguments())})
    write_safetensors(Path("Llama-3.1-8B"), llama, llama_configuration())
    (block,) = blocks_of(ROOT / "docs" / "name_maps.md")
    sizes = f'{{"heads": {HEADS}, "groups": {GROUPS}, "stacked": "no"}}'  # the small one has its layers apart
    run(block.replace('{"heads": 32, "groups": 8}', sizes), {"bcp": bcp, "gpt": gpt, "llama": llama})
    text = (ROOT / "docs" / "name_maps.md").read_text()
    (commands,) = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    for line in commands.replace("128256", str(VOCABULARY)).replace("128512", str(VOCABULARY + 5)).splitlines():
        ended = CliRunner().invoke(cli, shlex.split(line)[2:])
        assert ended.exit_code == 0, ended.output


def test_the_map_that_the_page_shows_is_one() -> None:
    """It names every field that a map can have, but those that the page says are for few."""
    page = (ROOT / "docs" / "name_maps.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    found = parse_map(text, "ours.toml")
    assert (found.sides, len(found.rules), len(found.arounds)) == (("ours", "hf"), 3, 2)
    for path in (Path(bcp.__path__[0]) / "name_maps" / "maps").glob("*.toml"):
        name_map = parse_map(path.read_text(), path.name)
        names = [*name_map.options, path.stem, "-to-".join(reversed(name_map.sides))]
        assert [name for name in names if f"`{name}`" not in page] == []


def test_there_is_no_block_of_python_that_no_test_knows() -> None:
    """tests/test_site.py runs those of RUN_HERE."""
    numbers = {page.name: len(blocks_of(page)) for page in PAGES if page not in RUN_HERE and blocks_of(page)}
    assert numbers == {
        "README.md": 3,
        "CONTRIBUTING.md": 1,
        "placements.md": 1,
        "accelerate.md": 2,  # tests/frameworks/accelerate/test_accelerate_page.py runs them
        "dcp.md": 4,  # tests/integrations/test_dcp_page.py runs them
        "transformers.md": 2,  # tests/frameworks/transformers/test_transformers_page.py runs them
        "lightning.md": 3,  # tests/frameworks/lightning/test_lightning_page.py runs them
        "recipes.md": 3,  # tests/frameworks/recipes/test_recipes_page.py runs them
        "megatron.md": 3,  # tests/frameworks/megatron/test_megatron_page.py runs them
        "deepspeed.md": 3,  # tests/frameworks/deepspeed/test_deepspeed_page.py runs them
        "ray.md": 1,  # tests/frameworks/ray/test_ray_train.py runs it
        "torchtitan.md": 2,  # tests/frameworks/torchtitan runs them
        "verl.md": 3,  # tests/frameworks/verl runs them
        "format.md": 2,
        "frameworks.md": 4,
        "local_stage.md": 1,
        "memory.md": 2,
        "data.md": 4,  # tests/frameworks/test_data_streams.py runs the one for accelerate
        "manager.md": 1,
        "random_numbers.md": 3,
        "foreign.md": 3,
        "from-torch-save.md": 3,  # tests/test_migration_pages.py runs these three
        "from-dcp.md": 3,
        "from-open-source.md": 3,  # and tests/formats/test_dcp_nested.py the last of these
        "from-lightning.md": 4,  # tests/frameworks/lightning/test_lightning_migration.py, and so on
        "from-trainer.md": 4,
        "from-deepspeed.md": 4,
        "from-megatron.md": 3,  # the last in tests/frameworks/test_megatron_checkpoints.py
        "name_maps.md": 1,
    }


@pages
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text())
    assert [link for link in links if not is_there(page, link)] == []


def is_there(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not anchor or anchor in anchors_of(target))


def anchors_of(page: Path) -> set[str]:
    """Of the headings, as they are shown on the web."""
    return set(map(anchor_of, re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)))


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_numbers_of_the_readme_stand_in_the_sections_that_they_link_to() -> None:
    rows = re.findall(r"^\| \[[^\]]+\]\(docs/benchmarks\.md#([\w-]+)\) \|(.*)\|$", README.read_text(), re.MULTILINE)
    assert len(rows) == 6
    sections = re.split(r"^#+ (.*)$", (DOCS / "benchmarks.md").read_text(), flags=re.MULTILINE)
    by_anchor = dict(zip(map(anchor_of, sections[1::2]), sections[2::2], strict=True))
    for anchor, cells in rows:
        assert [number for number in re.findall(r"\d+\.\d+", cells) if f"| {number} (" not in by_anchor[anchor]] == []


@pages
def test_scripts_and_their_options_that_are_named_exist(page: Path) -> None:
    calls = re.findall(r"python (benchmarks/run\.py \w+|examples/\w+\.py)([^\n#`]*)", page.read_text())
    for script, arguments in calls:
        files = [ROOT / script]
        if script.startswith("benchmarks"):
            files = [ROOT / "benchmarks" / f"{script.split()[1]}.py", ROOT / "benchmarks" / "shared" / "comparison.py"]
        text = "".join(file.read_text() for file in files)
        assert all(f'"{option}"' in text for option in re.findall(r"--[\w-]+", arguments)), (script, arguments)


@pages
def test_targets_of_make_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    requirements = (ROOT / "tests" / "frameworks").glob("requirements-*.txt")
    targets |= {f"test-framework-{file.stem.removeprefix('requirements-')}" for file in requirements}
    jobs = (ROOT / "benchmarks" / "trainers").glob("*_job.py")
    targets |= {f"bench-framework-{file.stem.removesuffix('_job')}" for file in jobs}
    assert set(re.findall(r"(?:`|^    )make ([\w-]+)", page.read_text(), re.MULTILINE)) <= targets


def test_the_architecture_names_every_package_and_module_of_the_top_and_no_other() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("\n## Packages\n", 1)[1].split("\n## ", 1)[0].split("| --- | --- |", 1)[1]
    packages = {path.parent.name for part in ("bytecheckpoint", "tools") for path in (ROOT / part).rglob("__init__.py")}
    assert set(re.findall(r"`(\w+)/`", table)) == packages - {"bytecheckpoint"}
    modules = {path.name for path in (ROOT / "bytecheckpoint").glob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", table)) == modules - {"__init__.py"}


def test_the_architecture_is_a_page_that_one_reads() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 250
