"""No tensor of a foreign checkpoint is unaccounted for: it is in the manifest, or is named as left out. All readers are
tried; files that frameworks wrote themselves are in tests/frameworks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_files
import pytest
import test_dcp_nested as groups
import test_deepspeed_folders as deepspeed
import test_sharded_files as ranks
import test_trainer_folders as trainer
import torch
import torch.distributed.checkpoint as dcp
from accounting import lost
from safetensors.torch import save_file

from bytecheckpoint.formats.detect import Format
from bytecheckpoint.formats.folder import SourceFolder

pytestmark = pytest.mark.filterwarnings("ignore")
classes = deepspeed.classes


def stray(folder: Path) -> Path:
    """Files that no format knows."""
    torch.save({"stray": torch.rand(7)}, folder / "stray.pt")
    (folder / "old").mkdir()
    save_file({"stray": torch.rand(9)}, folder / "old" / "model.safetensors")
    return folder


def write_trainer(folder: Path, save_model: Callable[..., None], suffix: str) -> Path:
    trainer.write(folder, save_model, suffix)
    second = {"x": torch.rand(3)}
    if save_model is trainer.save_one:
        save_file(second, folder / "model_1.safetensors")
    else:
        torch.save(second, folder / "pytorch_model_1.bin")
    return stray(folder)


def write_megatron(folder: Path) -> Path:
    megatron_files.write(folder, megatron_files.truth(), megatron_files.Grid(2, 2, 1))
    for number, path in enumerate(sorted(folder.glob("*/model_optim_rng.pt"))):
        state = torch.load(path, weights_only=False)
        torch.save(state | {"optimizer": {"fp32": torch.rand(5 + number)}}, path)
        torch.save({"moments": torch.rand(11 + number)}, path.with_name("distrib_optim.pt"))
    return stray(folder)


def write_torch_dist(folder: Path) -> Path:
    dcp.save(
        {"decoder.w": torch.rand(4, 3), "optimizer.state.exp_avg.decoder.w": torch.rand(4, 3)},
        checkpoint_id=folder,
        no_dist=True,
    )
    torch.save({"iteration": 3, "rng": {"cuda": torch.rand(5)}}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return stray(folder)


def write_dcp(folder: Path) -> Path:
    state = {"model": {"w": torch.rand(3)}, "extra": {"rng": torch.rand(6)}, "steps": [torch.rand(2), 5]}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "__7_0.distcp").write_bytes(b"of an earlier save")
    return stray(folder)


def write_ranks(folder: Path) -> Path:
    folder.mkdir()
    for rank in range(ranks.NUM_RANKS):
        with ranks.as_rank(rank):
            state = {name: ranks.sharded_tensor(whole, rank) for name, whole in ranks.WHOLE.items()}
            own = {"buffer": ranks.BUFFER, "noise": torch.full((4,), float(rank))}
            torch.save(state | own, folder / f"model_rank_{rank}.pt")
    return stray(folder)


def write_deepspeed(folder: Path, write: Callable[..., Any], *args: Any, **options: Any) -> Path:
    write(folder, *args, **options)
    return stray(folder)


def write_file(path: Path, write: Callable[[Path], Any]) -> Path:
    path.parent.mkdir()
    write(path)
    return path


def write_parts(folder: Path) -> Path:
    """Of one rank, as torch's writer of parts of safetensors names them."""
    writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    dcp.save({"w": torch.rand(4, 3), "b": torch.rand(3)}, storage_writer=writer, no_dist=True)
    return stray(folder)


def of_group(folder: Path, write: Callable[[Path], Any]) -> Path:
    write(folder)
    return stray(folder)


SOURCES: dict[str, Callable[[Path, Any], Path]] = {
    "safetensors": lambda path, _: write_file(
        path / "x.safetensors", lambda file: save_file({"a": torch.rand(3)}, file)
    ),
    "safetensors of torch": lambda path, _: write_parts(path),
    "torch.save": lambda path, _: write_file(
        path / "x.pt", lambda file: torch.save({"a": [torch.rand(3), {"b": torch.rand(2)}], 3: torch.rand(1)}, file)
    ),
    "lightning": lambda path, _: write_file(path / "x.ckpt", trainer.write_lightning),
    **{
        f"trainer {way.__name__}": lambda path, _, way=way: write_trainer(path, way, "pt")  # type: ignore[misc]
        for way in trainer.WAYS
    },
    "accelerate": lambda path, _: write_trainer(path, trainer.save_one, "bin"),
    "dcp": lambda path, _: write_dcp(path),
    "torch_dist": lambda path, _: write_torch_dist(path),
    "accelerate fsdp": lambda path, _: of_group(path, groups.write_accelerate),
    "open-source ByteCheckpoint": lambda path, _: of_group(path, groups.write_oss),
    "files of ranks": lambda path, _: write_ranks(path),
    "megatron": lambda path, _: write_megatron(path),
    "deepspeed zero 1": lambda path, known: write_deepspeed(path, deepspeed.write_shared, 2, known),
    "deepspeed zero 3": lambda path, known: write_deepspeed(path, deepspeed.write_divided, 2, known, num_buffers=2),
    "deepspeed without zero": lambda path, _: write_deepspeed(path, deepspeed.write_without_zero, is_wrapped=False),
    "deepspeed bfloat16": lambda path, _: write_deepspeed(path, deepspeed.write_without_zero, is_wrapped=True),
}
FORMATS_OF_SOURCES = {
    "safetensors",
    "torch.save",
    "torch.save of ranks",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint folders",
    "deepspeed",
    "megatron",
}


@pytest.mark.parametrize("name", SOURCES)
def test_no_tensor_is_unaccounted_for(tmp_path: Path, classes: Any, name: str) -> None:
    path = SOURCES[name](tmp_path / "c", classes)
    assert lost(path, is_padded=name.startswith("deepspeed zero")) == []


def test_a_tensor_that_is_neither_read_nor_named_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dcp(tmp_path / "c")
    monkeypatch.setattr(SourceFolder, "name_unread_files", lambda *_: None)
    assert [item.partition(":")[0] for item in lost(path)] == ["old/model.safetensors", "stray.pt"]


def test_every_format_is_among_the_sources() -> None:
    assert set(Format.__args__) == FORMATS_OF_SOURCES  # type: ignore[attr-defined]
