"""Trainings of torchtitan's debug model by its own Trainer on the CPU, one after the other in a process per rank.

Arguments are a folder, and a JSON for each training: see `Training`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.trainer import Trainer

import bytecheckpoint as bcp
from bytecheckpoint.integrations.torchtitan import BcpCheckpointManager

SEQ_LEN, NUM_STREAMS = 16, 12


@dataclass(kw_only=True)
class Training:
    """One training; paths are below the folder of the program."""

    name: str
    """Its dump folder, and the file of its losses."""
    steps: int = 6
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """Fields of BcpCheckpointManager.Config."""
    streams: bool = False
    """Data from shuffled streams, which any number of ranks reads, and not torchtitan's text loader."""
    dropout: float = 0.1
    """0 for a run that goes on with other ranks, whose dropout would be another."""
    replicate: int = 1
    kill_at: int = 0
    """Step at which each rank kills itself, once `step-3` is committed."""
    term_at: int = 0
    """Step at which rank 0 gets a SIGTERM."""


class DropoutLlama(Llama3Model):
    """torchtitan's model with a dropout, so that random numbers count."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        dropout: float = 0.1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.dropout = config.dropout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.functional.dropout(super().forward(*args, **kwargs), self.dropout)


class StreamsLoader(DataLoader, BaseDataLoader):
    """Samples of bcp.data.Streams: a global batch is the same on any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **kwargs: Any) -> None:
        del config, kwargs
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        sources = {
            f"s{number:02d}": bcp.data.ShuffleBuffer(samples(number), 4, seed=number) for number in range(NUM_STREAMS)
        }
        streams = bcp.data.Streams(sources, rank=dp_rank, size=dp_world_size)
        DataLoader.__init__(self, streams, batch_size=NUM_STREAMS // dp_world_size)


def samples(stream: int) -> list[Any]:
    generator = torch.Generator().manual_seed(stream)
    found = []
    for _ in range(20):
        tokens = torch.randint(0, 2048, (SEQ_LEN + 1,), generator=generator)
        found.append(({"input": tokens[:-1], "positions": torch.arange(SEQ_LEN)}, tokens[1:]))
    return found


def parallelize(model: Any, **arguments: Any) -> Any:
    """Has gradients summed: gloo cannot scale them on the way, as torchtitan asks of NCCL."""
    model = parallelize_llama(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


class RecordedMetrics(MetricsProcessor):
    """Metrics that rank 0 writes into a file, bit for bit."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        record: str = ""
        committed: str = ""
        kill_at: int = 0
        term_at: int = 0

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.own = config

    def log(self, step: int, global_avg_loss: float, *_: Any, **_others: Any) -> None:
        is_first_rank = os.environ["RANK"] == "0"
        if is_first_rank:
            with Path(self.own.record).open("a") as file:
                file.write(f"{step} {global_avg_loss.hex()}\n")
        if step == self.own.kill_at:
            deadline = time.monotonic() + 60
            while not Path(self.own.committed).exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.own.term_at and is_first_rank:
            os.kill(os.getpid(), signal.SIGTERM)


def make_assets(folder: Path) -> None:
    """Writes a tokenizer and texts."""
    words = [f"w{number}" for number in range(200)]
    vocabulary = {word: number for number, word in enumerate(["<bos>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=draw.randrange(5, 30))) for _ in range(24)]  # an epoch is a few steps
    (folder / "texts").mkdir()
    (folder / "texts" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def on_cpu(config: Trainer.Config, folder: Path) -> Trainer.Config:
    """A configuration of the debug model, made smaller, with what runs on the CPU and with data of the tests."""
    model = config.model_spec.model
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others need a GPU
    values = {each.name: getattr(model, each.name) for each in fields(model) if not each.name.startswith("_")}
    config.model_spec.model = DropoutLlama.Config(**{**values, "layers": model.layers[:2]})
    config.model_spec.parallelize_fn = parallelize
    config.optimizer.implementation = "for-loop"
    config.lr_scheduler.total_steps = 6
    config.hf_assets_path = str(folder / "tokenizer")
    config.dataloader.dataset_path = str(folder / "texts")
    config.training.seq_len, config.training.local_batch_size = SEQ_LEN, 2
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed = 1
    config.debug.enable_structured_logging = False
    config.validator.enable = False
    return config


def example() -> Trainer.Config:
    """The configuration of the example, for `torchtitan.train`."""
    folder = Path(os.environ["TITAN_FOLDER"])
    config = on_cpu(import_module("examples.torchtitan_config").debugmodel(), folder)
    config.dump_folder = str(folder / "example")
    return config


def config_of(folder: Path, training: Training, *, world_size: int) -> Trainer.Config:
    config = on_cpu(llama3_debugmodel(), folder)
    config.dump_folder = str(folder / training.name)
    config.training.steps = training.steps
    config.model_spec.model.dropout = training.dropout
    if training.streams:
        config.dataloader = StreamsLoader.Config()
        config.training.local_batch_size = NUM_STREAMS // world_size
    config.parallelism.data_parallel_replicate_degree = training.replicate
    own = {"enable": True, "interval": 3, "last_save_model_only": False, **training.checkpoint}
    config.checkpoint = BcpCheckpointManager.Config(**own)
    committed = folder / training.name / "checkpoint" / "step-3" / "manifest.bcp"
    config.metrics = RecordedMetrics.Config(
        log_freq=1,
        record=str(folder / f"{training.name}.losses"),
        committed=str(committed),
        kill_at=training.kill_at,
        term_at=training.term_at,
    )
    return config


def main() -> None:
    if sys.argv[1].startswith("--"):
        import_module("torchtitan.train").main()
        return
    folder = Path(sys.argv[1])
    for text in sys.argv[2:]:
        training = Training(**json.loads(text))
        trainer = config_of(folder, training, world_size=int(os.environ["WORLD_SIZE"])).build()
        try:
            trainer.train()
        finally:
            trainer.close()
    torch.distributed.destroy_process_group()
