"""What tests of snapshots share: a state with every kind of memory in it, ways to change it as hard as possible while
it is being saved, and a writer that is slow enough for that to matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_tensors import DTYPES, LAYOUTS, SHAPE, bits_of, random_bits

import bytecheckpoint as bcp
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.saving import write
from bytecheckpoint.storage.object_io import BLOCK_BYTES, FileImage

OPTIONS = {
    "copy": bcp.SaveOptions(snapshot="copy"),
    "waves": bcp.SaveOptions(snapshot="copy", staging_bytes=32 << 20),
    "lazy": bcp.SaveOptions(snapshot="lazy"),
    "lazy waves": bcp.SaveOptions(snapshot="lazy", staging_bytes=32 << 20),
    "copy, many files": bcp.SaveOptions(snapshot="copy", max_file_bytes=5 << 20),
}
KINDS = ("copy", "lazy")


def save(path: object, state: dict[str, Any], kind: str, **arguments: Any) -> bcp.SaveHandle:
    """An asynchronous save after which, whatever its kind, the state may be changed."""
    handle = bcp.save(str(path), state, async_save=True, options=OPTIONS[kind], **arguments)
    if kind.startswith("lazy"):
        handle.staged()
    return handle


def every_memory(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every dtype, layout and owner of memory, and of lengths around what pages and blocks end at."""
    state = {f"dtype.{str(dtype).removeprefix('torch.')}": random_bits(dtype, SHAPE, seed) for dtype in DTYPES}
    state |= {f"layout.{name}": place(random_bits(torch.float32, SHAPE, seed + 1)) for name, place in LAYOUTS.items()}
    lengths = (1, 4095, 4096, 4097, (64 << 10) - 1, 64 << 10, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1)
    state |= {f"length.{length}": random_bits(torch.uint8, (length,), seed + length) for length in lengths}
    state["large.transposed"] = random_bits(torch.float32, (2500, 2000), seed).T
    state |= unusual_views(seed)
    return state | owned_by_others(folder, seed)


def unusual_views(seed: int) -> dict[str, torch.Tensor]:
    base = random_bits(torch.uint8, (3 << 20,), seed)
    numbers = torch.randn(5, 7, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
    return {
        "overlap.first": base[: 2 << 20],
        "overlap.last": base[1 << 20 :],
        "overlap.inner": base[(1 << 20) + 5 : (1 << 20) + 200_005],
        "tied.one": base,
        "tied.two": base,
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "expanded": torch.randn(1, 5).expand(300, 5),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "empty.transposed": torch.empty(0, 3).T,
    }


def owned_by_others(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Shared memory, numpy's, and mapped files, shared and private."""
    content = random_bits(torch.uint8, (300_001,), seed).numpy()
    for name in ("shared.bin", "written.bin", "private.bin"):
        content.tofile(folder / name)
    written = np.memmap(folder / "written.bin", dtype=np.uint8, mode="r+")
    private = np.memmap(folder / "private.bin", dtype=np.uint8, mode="c")
    return {
        "owner.shared": random_bits(torch.float64, (513, 9), seed).share_memory_(),
        "owner.shared.strided": random_bits(torch.float64, (513, 9), seed).share_memory_()[:, 1::3],
        "owner.numpy": torch.from_numpy(content.copy()),
        "owner.file": torch.from_file(str(folder / "shared.bin"), shared=True, size=content.size, dtype=torch.uint8),
        "owner.memmap": torch.from_numpy(written),
        "owner.private_memmap": torch.from_numpy(private),
    }


def bits_of_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


def saved_bits(path: object) -> dict[str, bytes]:
    """Every tensor of a checkpoint."""
    return bits_of_all(bcp.open(str(path)).state_dict())


def differing(saved: Mapping[str, bytes], expected: Mapping[str, bytes]) -> list[str]:
    """Names of what is missing, too much or different: short, where the values themselves are megabytes."""
    return sorted(name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name))


def raw_memory(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The storages of the tensors, each once, as bytes: what is written there changes every view."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values() if storage.nbytes()]


@contextmanager
def mutating(tensors: Mapping[str, torch.Tensor], num_threads: int = 3) -> Iterator[None]:
    """Within the block, threads write over all of the memory of these tensors, again and again, and take and drop
    memory meanwhile. All of it has changed when the block is entered.
    """
    memory = raw_memory(tensors)
    for part in memory:
        part.fill_(0xA5)
    stop = threading.Event()

    def mutate(number: int) -> None:
        while not stop.is_set():
            for part in memory[number::num_threads] + memory:
                part.add_(number + 1)
                torch.empty(part.numel() % 100_000).fill_(number)

    with running([lambda number=number: mutate(number) for number in range(num_threads)], stop):
        yield


@contextmanager
def running(loops: list[Callable[[], None]], stop: threading.Event) -> Iterator[None]:
    """Within the block, each runs on a thread of its own; what one raises is raised in the end."""
    errors: list[BaseException] = []

    def guarded(loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(loop,), daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@contextmanager
def between_blocks(do: Callable[[int], object]) -> Iterator[None]:
    """Within the block, `do` is called with the byte offset before each block of a data file is asked for."""
    write_image = write.write_image

    def written(store: Any, name: str, image: FileImage, *arguments: Any) -> Any:
        @contextmanager
        def content(block: Block) -> Iterator[memoryview]:
            do(block.byte_offset)
            with block.content() as bytes_:
                yield bytes_

        blocks = [block._replace(content=partial(content, block)) for block in image.blocks]
        return write_image(store, name, image._replace(blocks=blocks), *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "write_image", written)
        yield


def slowed(seconds: float) -> AbstractContextManager[None]:
    """Within the block, each block of a data file is written this much later."""
    return between_blocks(lambda _: time.sleep(seconds))


@contextmanager
def paused() -> Iterator[threading.Event]:
    """Within the block, no byte is asked for until the event is set; it is in the end."""
    go = threading.Event()

    def wait(_: int) -> None:
        assert go.wait(30)

    with between_blocks(wait):
        try:
            yield go
        finally:
            go.set()
