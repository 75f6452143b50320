"""The first inputs of the corpus: small ones that are whole, as this library, torch, safetensors and DeepSpeed write
them. What a fuzzer has found since lies beside them.

    python tests/fuzz/seeds.py      writes them anew, after a change of a format
"""

from __future__ import annotations

import io
import pickle
import sys
import tempfile
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as save_safetensors
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, Sample, encode_manifest, tensor_record
from bytecheckpoint.manifest.envelope import unseal
from bytecheckpoint.region import Region, whole
from bytecheckpoint.storage.compression import FrameEncoder
from bytecheckpoint.storage.safetensors_header import chunk_entry, encode_header
from fuzz.commands import FOLDER, Asked
from fuzz.memory_store import Files, pack
from fuzz.targets import CORPUS


def manifests() -> Iterator[Manifest]:
    yield Manifest(save_id="5f3a9c")
    rows = [Chunk(Region((row, 0), (2, 2)), row // 2, 4096, 8) for row in (0, 2)]
    yield Manifest(  # the example of docs/format.md
        save_id="5f3a9c",
        step=1000,
        files=[
            DataFile("data/5f3a9c-00000-0.safetensors", 4112, (4096, 16), (0x123456789ABCDEF, 0xFEDCBA9876543210)),
            DataFile("data/5f3a9c-00001-0.safetensors", 4104),
        ],
        tensors={
            "step": tensor_record("int64", (), [Chunk(Region((), ()), 0, 4104, 8)]),
            "w": tensor_record("bfloat16", (4, 2), rows),
        },
        aliases={"head": "w"},
        objects={"lr": encode_plain(0.1, "lr")},
        rank_objects={"rng": {1: b"*", 3: b"\x01"}},
        metadata={"note": "demo", "nested": [1, {"x": None}]},
        provenance={"world_size": 2},
    )
    uneven = [
        Chunk(Region((0,), (3,)), 0, 0, 12),
        Chunk(Region((3,), (7,)), 0, 12, 28),
        Chunk(Region((10,), (0,)), 0, 40, 0),
    ]
    packed = [Chunk(whole((1 << 18, 5)), 0, 64, 96, "zstd")]
    yield Manifest(
        save_id="a",
        files=[DataFile("data/a-00000-0.safetensors", 160, (64, 16, 16, 16, 16, 32), (1, 2, 3, 4, 5, 6))],
        tensors={
            "uneven": tensor_record("float32", (10,), uneven),
            "packed": tensor_record("float32", (1 << 18, 5), packed),
            "empty": tensor_record("bool", (0, 7), []),
        },
    )
    shared = [Chunk(whole((4,)), 0, at, 16) for at in (0, 8)]
    yield Manifest(
        save_id="",
        foreign_format="torch.save",
        files=[DataFile("pytorch_model.bin", 24)],
        tensors={f"view{number}": tensor_record("int32", (4,), [chunk]) for number, chunk in enumerate(shared)},
    )
    yield Manifest(  # of a link, with what tells that a file was written again
        save_id="b",
        foreign_format="safetensors",
        linked_to="/elsewhere",
        files=[DataFile("a.safetensors", 24, samples=(Sample(0, 8, 7), Sample(16, 8, 9))), DataFile("b", 8)],
        tensors={"w": tensor_record("int32", (2,), [Chunk(whole((2,)), 0, 16, 8)])},
    )


def headers() -> Iterator[bytes]:
    yield encode_header([], {})
    entries = [
        chunk_entry("w", "bfloat16", (4, 2), region=Region((0, 0), (2, 2)), byte_length=8, codec="none"),
        chunk_entry("step", "int64", (), region=Region((), ()), byte_length=8, codec="none"),
        chunk_entry("z", "float32", (4096,), region=whole((4096,)), byte_length=99, codec="zstd"),
    ]
    yield encode_header(entries, {"save_id": "5f3a9c"})
    yield save_safetensors({"a": torch.ones(2, 3), "b": torch.zeros(0, 4, dtype=torch.int8)}, {"format": "pt"})


def plain_values() -> Iterator[Any]:
    yield {"lr": 0.1, "betas": (0.9, 0.999), "names": ["a", b"b", None, True, -5], 7: "int key"}
    yield {"n": 1 << 100, "c": 1 + 2j, "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "t": torch.ones(2, 2)}
    yield {"a": np.arange(6).reshape(2, 3), "s": np.float32(1.5), "o": OrderedDict(b=1, a=2), "k": Counter("hello")}
    yield {"set": {1, "a", b"b", None}, "frozen": frozenset({2.5}), "path": Path("a/b"), "for": timedelta(1, 2, 3)}
    yield [date(2026, 1, 2), time(3, 4, 5), datetime(2026, 1, 2, 3, tzinfo=UTC), np.str_("a\0"), np.bytes_(b"b\0")]


def states() -> Iterator[Any]:
    """What is given to torch.save."""
    base = torch.arange(12.0).reshape(3, 4)
    yield {
        "weight": base,
        "rows": base[1:],
        "columns": base[:, 1:3],
        "same": base,
        "bias": torch.zeros(2, dtype=torch.bfloat16),
    }
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    yield {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    yield {
        "plain": [1, -(1 << 70), 2.5, "text", b"bytes", None, (True, ()), {1, 2}, 1j, Path("a/b")],
        "numpy": np.arange(3, dtype=np.float32),
        "scalar": np.float64(2.0),
        "ordered": OrderedDict(a=1),
        "counter": Counter("ab"),
        "default": defaultdict(list, {"k": [1]}),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
        "stream": io.BytesIO(b"content"),
        "parameter": torch.nn.Parameter(torch.ones(1)),
    }
    yield {  # of Lightning
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 1, "_last_lr": [0.5]}],
        "pytorch-lightning_version": "2.6.6",
        "epoch": 3,
    }


def torch_file(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def pickle_of(archive: bytes) -> bytes:
    import zipfile

    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        return members.read("archive/data.pkl")


def folder_files(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def distcp_folders(folder: Path) -> Iterator[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        state = {"model": {"w": torch.ones(2, 3)}, "list": [torch.ones(2), 3], "step": 7}
        dcp.save(state, checkpoint_id=folder / "plain", no_dist=True)
        yield folder / "plain"
        dcp.save({"flat": torch.arange(8.0).reshape(2, 2, 2)}, checkpoint_id=folder / "stacked", no_dist=True)
    path = folder / "stacked" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.mcore_data = {"flat": {"nd_reformulated_orig_global_shape": (4, 2)}}
    path.write_bytes(pickle.dumps(metadata))
    yield folder / "stacked"
    yield from megatron_dist_folders(folder)


class Listed:
    """An object that is saved as a list of itself, as Megatron does."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([self._value],)


def megatron_dist_folders(folder: Path) -> Iterator[Path]:
    """With the common state in either of its places, and a setting of one of Megatron's own classes."""
    module = ModuleType("megatron.core.transformer.enums")
    backend = Enum("AttnBackend", {"flash": 1}, module=module.__name__)
    vars(module)["AttnBackend"] = backend
    names = ("megatron", "megatron.core", "megatron.core.transformer")
    common = {"args": Namespace(num_layers=2, attention_backend=backend.flash), "iteration": 3}
    state = {"w": torch.ones(2, 2), "rng_state/shard_0_1": Listed([{"r": torch.ones(1)}])}
    with warnings.catch_warnings(), mock.patch.dict(sys.modules, {name: ModuleType(name) for name in names}):
        warnings.simplefilter("ignore")  # that there is one process only
        sys.modules[module.__name__] = module
        dcp.save(state, checkpoint_id=folder / "common", no_dist=True)
        torch.save(common, folder / "common" / "common.pt")
        state["common_state/shard_0_1"] = Listed(common)
        dcp.save(state, checkpoint_id=folder / "within", no_dist=True)
    for name in ("common", "within"):
        (folder / name / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        yield folder / name


def safetensors_folders() -> Iterator[Files]:
    one = save_safetensors({"a": torch.ones(2), "b": torch.ones(1, 2)}, {"format": "pt", "c": "a"})
    yield {"model.safetensors": one}
    index = b'{"metadata": {"total_size": 16}, "weight_map": {"a": "x-1.safetensors", "d": "x-2.safetensors"}}'
    two = save_safetensors({"d": torch.ones(2, dtype=torch.int16)})
    yield {"model.safetensors.index.json": index, "x-1.safetensors": one, "x-2.safetensors": two}
    parts = {
        f"shard-{number}.safetensors": save_safetensors(
            {"w": torch.ones(2, 2)}, {"DCP_SHARDING_INFO": f'{{"w": {{"saved_offsets": [{2 * number}, 0]}}}}'}
        )
        for number in range(2)
    }
    yield parts


def trainer_folders() -> Iterator[Files]:
    """Of Hugging Face's Trainer and of Accelerate, with models in either kind of file, and files beside them."""
    model, other = torch.nn.Linear(1, 2), {"w": torch.ones(2)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    steps = torch_file({"last_epoch": 1, "_last_lr": [0.5]})
    yield {
        "model.safetensors": save_safetensors(model.state_dict(), {"format": "pt"}),
        "model_1.safetensors": save_safetensors(other),
        "optimizer.pt": torch_file(optimizer.state_dict()),
        "scheduler.pt": steps,
        "trainer_state.json": b"{}",
        "rng_state.pth": b"read by no reader",
    }
    weights = {"weight": "pytorch_model-1.bin", "bias": "pytorch_model-2.bin"}
    yield {
        "pytorch_model.bin.index.json": msgspec.json.encode({"metadata": {}, "weight_map": weights}),
        **{file: torch_file({name: model.state_dict()[name]}) for name, file in weights.items()},
        "pytorch_model_1.bin": torch_file(other),
        "scaler.pt": torch_file({"scale": 2.0}),
    }
    yield {"pytorch_model.bin": torch_file({**other, "tied": other["w"]}), "optimizer_1.bin": steps}


def deepspeed_folders() -> Iterator[Files]:
    shapes = {"a": (3,), "b": (1, 2)}
    states: dict[str, Any] = {
        "module": {"a": torch.ones(3).bfloat16(), "b": torch.ones(1, 2).bfloat16(), "mean": torch.ones(1)},
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())],
        "frozen_param_shapes": None,
        "shared_params": {"tied": "b"},
        "lr_scheduler": {"last_epoch": 3},
        "global_steps": 7,
        "epoch": 4,
    }
    files = {"mp_rank_00_model_states.pt": torch_file(states)}
    for rank, length in enumerate((4, 1)):
        optimizer = {
            "zero_stage": 2,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [torch.ones(length)],
            "base_optimizer_state": {
                "state": {0: {"exp_avg": torch.ones(4), "step": torch.tensor(5.0)}},
                "param_groups": [{"lr": 0.25, "params": [0]}],
            },
        }
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = torch_file({"optimizer_state_dict": optimizer})
    yield files
    divided = {
        "zero_stage": 3,
        "partition_count": 1,
        "fp32_flat_groups": [torch.ones(5)],
        "optimizer_state_dict": {
            "state": {0: {"exp_avg": torch.ones(5)}},
            "param_groups": [{"lr": 0.5, "params": [0]}],
        },
    }
    yield {
        "zero_pp_rank_0_mp_rank_00_model_states.pt": torch_file(states),
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": torch_file({"optimizer_state_dict": divided}),
    }
    weights = {"param": torch.ones(3)}
    yield {
        "mp_rank_00_model_states.pt": torch_file(states),
        "zero/a/fp32.pt": torch_file(weights),
        "zero/a/exp_avg.pt": torch_file(weights),
        "zero/b/fp32.pt": torch_file({"param": torch.ones(2)}),
        "zero/optimizer_state.pt": torch_file({"param_groups": [{"lr": 0.5, "params": [0]}]}),
    }
    inner = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
    wrapper = {"cur_scale": 1.0, "optimizer_state_dict": inner, "fp32_groups": [[torch.ones(3), torch.ones(1, 2)]]}
    unused = {"ds_config": {"zero_optimization": {}}, "shared_params": {}}
    yield {"mp_rank_00_model_states.pt": torch_file({**states, **unused, "optimizer": wrapper})}


def megatron_folders() -> Iterator[Files]:
    """Of two ranks along each axis in turn."""
    for axis in ("tensor", "pipeline", "expert"):
        files = {}
        for rank in range(2):
            layer = "decoder.layers.0"
            model = {
                f"{layer}.self_attention.linear_qkv.weight": torch.ones(4, 2),
                f"{layer}.self_attention.linear_qkv._extra_state": None,
                f"{layer}.mlp.experts.local_experts.0.linear_fc1.weight": torch.ones(4, 2),
                f"{layer}.mlp.experts.local_experts.0.linear_fc2.weight": torch.ones(2, 2),
            }
            sizes = {f"{axis}_model_parallel_size": 2, "num_layers": 1 + (axis == "pipeline")}
            args = Namespace(**sizes, num_experts=1 + (axis == "expert"))
            state = {"model": model, "args": args, "iteration": 3, "checkpoint_version": 3.0, "rng_state": [rank]}
            name = f"mp_rank_0{rank}" if axis == "tensor" else f"mp_rank_00_00{rank}"
            files[f"{name}/model_optim_rng.pt"] = torch_file(state)
        yield files


def rank_files() -> Iterator[list[bytes]]:
    """What each of two ranks saves: DTensors on a mesh, one under two names, and ShardedTensor."""
    dtensors, sharded = [], []
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            rows = init_device_mesh("cpu", (2,))
            both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
            one = DTensor.from_local(torch.ones(2, 2), rows, [Shard(0)], run_check=False)
            two = DTensor.from_local(torch.ones(2, 4), both, [Shard(0), Shard(1)], run_check=False)
            copy = DTensor.from_local(torch.ones(3), rows, [Replicate()], run_check=False)
            dtensors.append(
                torch_file({"w": one, "again": one, "v": [two, two], "copy": copy, "rank": rank, "p": torch.ones(2)})
            )
            sharded.append(torch_file({"w": _sharded_tensor(rank), "rng": torch.full((2,), rank)}))
        finally:
            dist.destroy_process_group()
    yield dtensors
    yield sharded


def _sharded_tensor(rank: int) -> ShardedTensor:
    shards = [ShardMetadata([2 * owner, 0], [2, 2], f"rank:{owner}/cpu") for owner in range(2)]
    metadata = ShardedTensorMetadata(shards, torch.Size((4, 2)), TensorProperties(dtype=torch.float32))
    local = [LocalShard(torch.ones(2, 2), shards[rank])]
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def rank_folders() -> Iterator[Files]:
    for files in rank_files():
        yield {f"model_world_size_2_rank_{rank}.pt": content for rank, content in enumerate(files)}


def group_folders(folder: Path) -> Iterator[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        for name in ("model", "optimizer", "ema"):
            dcp.save({"w": torch.ones(2, 3), "step": 3}, checkpoint_id=folder / "groups" / name, no_dist=True)
    (folder / "groups" / "extra_state").mkdir()
    (folder / "groups" / "extra_state" / "extra_state_rank_0.pt").write_bytes(torch_file({"rng": torch.ones(2)}))
    yield folder / "groups"


def frames() -> Iterator[bytes]:
    encoder = FrameEncoder()
    for item, item_bytes, raw in (
        (0, 1, bytes(100)),
        (2, 4, np.arange(64, dtype=np.float32).tobytes()),
        (4, 16, bytes(32)),
    ):
        yield bytes([item]) + len(raw).to_bytes(3, "little") + encoder.encode("zstd", memoryview(raw), item_bytes)


def commands(folder: Path) -> Iterator[tuple[list[str], Files]]:
    state = {"w": torch.arange(6.0), "lr": 0.5, "rng": bcp.RankLocal(torch.zeros(2, dtype=torch.uint8))}
    bcp.save(folder / "own", state, step=5)
    own = {name: content for name, content in folder_files(folder / "own").items() if "telemetry" not in name}
    yield ["show", FOLDER, "--tree", "--files", "--objects"], own
    yield ["verify", FOLDER, "--json"], own
    yield ["diff", FOLDER, FOLDER], {"pytorch_model.bin": torch_file({"w": torch.ones(2), "lr": 0.5})}


def all_seeds(folder: Path) -> dict[str, list[bytes]]:
    torch.manual_seed(0)
    sealed = [encode_manifest(manifest) for manifest in manifests()]
    files = [torch_file(state) for state in states()]
    distcp = list(distcp_folders(folder))
    return {
        "manifest": [unseal(content) for content in sealed],
        "manifest-file": [content[:-8] for content in sealed],
        "header": list(headers()),
        "plain-data": [encode_plain(value, "x") for value in plain_values()],
        "frame": list(frames()),
        "pickle": [pickle_of(content) for content in files],
        "distcp-metadata": [(path / ".metadata").read_bytes() for path in distcp[:2]],
        "torch-file": files,
        "safetensors": [pack(files) for files in safetensors_folders()],
        "distcp": [pack(folder_files(path)) for path in distcp],
        "trainer": [pack(files) for files in trainer_folders()],
        "deepspeed": [pack(files) for files in deepspeed_folders()],
        "megatron": [pack(files) for files in megatron_folders()],
        "rank-files": [pack(files) for files in rank_folders()],
        "folder-groups": [pack(folder_files(path)) for path in group_folders(folder)],
        "sharded-values": [pickle_of(files[1]) for files in rank_files()],
        "command": [msgspec.msgpack.encode(Asked([*words], files)) for words, files in commands(folder)],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for target, contents in all_seeds(Path(folder)).items():
            (CORPUS / target).mkdir(parents=True, exist_ok=True)
            for number, content in enumerate(contents):
                (CORPUS / target / f"seed-{number}").write_bytes(content)
                sys.stdout.write(f"{target}/seed-{number}: {len(content)} bytes\n")


if __name__ == "__main__":
    main()
