"""The blocks of docs/integrations/transformers.md run in one program, and the example on two processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rank_programs import run_ranks

import bytecheckpoint as bcp

transformers = pytest.importorskip("transformers")

from frameworks.transformers.trainer_runs import (  # noqa: E402
    Tokens,
    are_equal,
    arguments,
    parameters,
    small_model,
)

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("default"),  # of the packages
    pytest.mark.timeout(600),  # each start of the example imports torch and transformers
]
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "integrations" / "transformers.md"
EXAMPLE = ROOT / "examples" / "transformers_trainer.py"
MAX_LINES = 80


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    model = small_model()
    names: dict[str, Any] = {"model": model, "arguments": arguments(tmp_path, max_steps=4), "dataset": Tokens()}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert are_equal(dict(loaded.named_parameters()), parameters(names["trainer"]))


def test_the_example_trains_and_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    run_ranks(EXAMPLE, ["--out", tmp_path, "--steps", 10])
    assert bcp.open(tmp_path / "checkpoint-10").info.world_size == 1
    run_ranks(EXAMPLE, ["--out", tmp_path, "--steps", 20, "--batch-size", 4], world_size=2)
    assert bcp.open(tmp_path / "checkpoint-20").info.world_size == 2
    assert (tmp_path / "model.safetensors").exists()


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES
