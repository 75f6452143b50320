"""The pages of docs/migrate/ whose packages are in the environment of the tests: each block runs, the old lines write
what the new ones load, and `bcp doctor` prints the lines of the page. Pages of frameworks run in tests/frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from migration_pages import FOLDER, assert_doctor_prints, assert_trained_alike, blocks_of, run
from torch.distributed.fsdp import fully_shard
from training import mlp, train

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = sorted(path.name for path in FOLDER.glob("from-*.md"))
HEADINGS = ["Old checkpoints", "What changes", "What does not carry over"]
FEWEST, MOST = 150, 300


def made(seed: int, num_steps: int) -> dict[str, Any]:
    model = mlp(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, [optimizer], num_steps)
    return {"model": model, "optimizer": optimizer}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("page", "old"), [("from-torch-save.md", "old.pt"), ("from-dcp.md", "old/step_1000")], ids=["torch.save", "DCP"]
)
def test_what_the_old_lines_wrote_loads_by_the_new_ones(page: str, old: str) -> None:
    before, after, load = blocks_of(page)
    saved = made(0, 3)
    names = {**saved, "state": None}
    run(before, names)
    run(after, names)
    assert bcp.latest("run") == 1000
    new = made(1, 0)
    run(load, {"bcp": bcp, **new})
    assert_trained_alike(new, saved)
    assert_doctor_prints(old, load)
    again = made(2, 0)
    bcp.load("run", again)
    assert_trained_alike(again, saved)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_the_lines_of_the_open_source_bytecheckpoint_run_as_they_are() -> None:
    before, after, _ = blocks_of("from-open-source.md")
    model = torch.nn.Linear(4, 3)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    run(before, names)
    run(after, names)
    assert names["state"]["extra_state"] == {"epoch": 3}
    assert bcp.latest("run") == 1000


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_short_and_says_what_each_page_says(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert "$ bcp doctor --checkpoint " in text
    words = re.sub(r"```.*?```|<[^>]*>", "", text, flags=re.DOTALL).split()
    assert FEWEST <= len(words) <= MOST


def test_the_index_names_every_page() -> None:
    assert sorted(re.findall(r"\((from-[\w-]+\.md)\)", (FOLDER / "README.md").read_text())) == NAMES
