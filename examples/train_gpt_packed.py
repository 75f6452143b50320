"""Trains a small GPT on packed documents, and reads each document once an epoch whatever happens: kill it at any moment
and start it again on another number of processes.

    torchrun --nproc-per-node 4 examples/train_gpt_packed.py --out run
    torchrun --nproc-per-node 2 examples/train_gpt_packed.py --out run
    python examples/train_gpt_packed.py --out run

The data is a fixed number of streams, here 12, which 1, 2, 3, 4, 6 and 12 processes can share alike. Each shuffles its
documents and packs them into rows; what its buffers hold is part of the checkpoint. The global batch has one row of
each stream, so that it is the same on any number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, read_corpus, shard_fsdp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import bytecheckpoint as bcp

NUM_STREAMS = 12
LONGEST_DOCUMENT = 200


def train(args: argparse.Namespace, *, rank: int, size: int) -> None:
    torch.manual_seed(args.seed)
    model = GPT(width=args.width, depth=1, dropout=0.0)
    if dist.is_initialized():
        shard_fsdp(model, init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = build_loader(args, rank=rank, size=size)
    state = {
        "model": model,
        "optimizer": optimizer,
        "data": bcp.DataLoaderState(loader, rank=rank, size=size),
    }
    seen = SeenDocuments(args.seen or args.out / "seen", rank=rank)
    save = bcp.save_policies.EverySteps(args.save_every) | bcp.save_policies.Last(args.steps)
    with bcp.CheckpointManager(args.out / "checkpoints", save=save) as manager:
        manager.restore(state)
        batches = iter(loader)  # after the restore: it goes on where the checkpoint is
        for step in range(manager.next_step, args.steps):
            rows = next(batches)
            loss = train_step(model, optimizer, rows % VOCABULARY)
            seen.note(step, rows // VOCABULARY)
            if rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss:.3f}", flush=True)
            manager.save(step, state)
            if manager.should_stop():
                break


def build_loader(args: argparse.Namespace, *, rank: int, size: int) -> DataLoader[Tensor]:
    """Returns the loader of this process: one row of each of its streams makes a batch."""
    streams = {
        stream_id: bcp.data.Packer(bcp.data.ShuffleBuffer(documents, 16, seed=args.seed), args.length + 1)
        for stream_id, documents in read_documents(args).items()
    }
    data = bcp.data.Streams(streams, rank=rank, size=size, endless=True)
    return DataLoader(data, batch_size=NUM_STREAMS // size, num_workers=args.workers)


def read_documents(args: argparse.Namespace) -> dict[str, list[Tensor]]:
    """Returns the documents of each stream, which fill its rows of an epoch exactly.

    Each token says which document it is from: `document * VOCABULARY + byte`. A model with a mask between documents
    takes it from there, and here it shows that each document was read once.
    """
    corpus, num_tokens = read_corpus(), args.rows * (args.length + 1)
    generator = torch.Generator().manual_seed(args.seed)
    streams, number = {}, 0
    for stream in range(NUM_STREAMS):
        text, documents, start = corpus[stream * num_tokens :][:num_tokens].long(), [], 0
        while start < num_tokens:
            length = int(torch.randint(1, LONGEST_DOCUMENT, (), generator=generator))
            documents.append(number * VOCABULARY + text[start : start + length])
            start, number = start + length, number + 1
        streams[f"text-{stream:02d}"] = documents
    return streams


def train_step(model: GPT, optimizer: torch.optim.Optimizer, rows: Tensor) -> float:
    """Makes one update; returns the mean loss of this process's rows, in nats per byte."""
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class SeenDocuments:
    """Notes the documents of each step, as a journal of what the model has read."""

    def __init__(self, path: Path, *, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.with_name(f"{path.name}-{rank}.jsonl").open("ab", buffering=0)

    def note(self, step: int, documents: Tensor) -> None:
        numbers, counts = documents.unique(return_counts=True)
        num_tokens = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        self._file.write(json.dumps({"step": step, "num_tokens": num_tokens}).encode() + b"\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on packed documents.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--seen", type=Path, help="journal of the documents that were read; by default in the folder")
    parser.add_argument("--steps", type=int, default=60, help="training ends here; steps count from 0")
    parser.add_argument("--save-every", type=int, default=10, help="in steps")
    parser.add_argument("--rows", type=int, default=30, help="rows of a stream in an epoch, which are as many steps")
    parser.add_argument("--length", type=int, default=128, help="bytes in a row, without the one to predict last")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="worker processes of the loader")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        train(args, rank=0, size=1)
        return
    dist.init_process_group("gloo")
    if NUM_STREAMS % dist.get_world_size():
        raise SystemExit(f"{NUM_STREAMS} streams are not shared alike by {dist.get_world_size()} processes")
    train(args, rank=dist.get_rank(), size=dist.get_world_size())
    dist.barrier()  # a process that leaves while another still talks to it makes that one fail
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
