"""A byte that is another one, anywhere in what a load reads or passes on: it is never loaded, whatever the way of
reading, and all ranks raise the same error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fake_url_store import url_of
from faults.seams import Seen, seen
from storage.s3_service import S3Service
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.distributed.connection import Connection
from bytecheckpoint.loading import exchange as exchange_module
from distributed.played_hosts import on_host
from distributed.small_pieces import small_pieces
from distributed.workers import WorkerPool

WORLD_SIZE = 3
ROWS, COLUMNS = 900, 301
TINY_BYTES, DEFAULT_BYTES = 20_000, bcp.LoadOptions().scratch_bytes
NUM_DAMAGED_BYTES = 4


class Way(NamedTuple):
    """Of reading. With the default scratch memory whole extents go straight into their targets, with the tiny one all
    goes through scratch memory; of columns, every rank reads a part of every row.
    """

    exchange: str
    placement: Placement
    scratch_bytes: int
    codec: str = "none"


PLACEMENTS = {"replicas": Replicate(), "rows": Shard(0), "columns": Shard(1)}
WAYS = {
    f"{exchange}, {name}, {size}": Way(exchange, placement, scratch_bytes)
    for exchange in ("on", "off")
    for name, placement in PLACEMENTS.items()
    for size, scratch_bytes in (("tiny", TINY_BYTES), ("default", DEFAULT_BYTES))
}
WAYS |= {f"{exchange}, compressed": Way(exchange, Replicate(), DEFAULT_BYTES, "zstd") for exchange in ("on", "off")}


def state_of(placement: Placement, *, is_filled: bool) -> dict[str, Any]:
    """One tensor with many extents and several that share one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    whole = {f"b{number}": torch.randn(17, 5, generator=generator) for number in range(5)}
    whole["w"] = torch.randn(ROWS, COLUMNS, generator=generator)
    if not is_filled:
        whole = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    return {"s": {name: distribute_tensor(t, mesh, [placement], src_data_rank=None) for name, t in whole.items()}}


@contextmanager
def in_small_pieces() -> Iterator[None]:
    """The ranks wait for one another as shortly as on one host they can."""
    with small_pieces(extent_bytes=16384), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "GRACE_S", 0.3)
        yield


def load(path: str, way: Way, *, is_cast: bool = False, storage_options: Any = None) -> Seen | None:
    state = state_of(way.placement, is_filled=False)
    if is_cast:
        state["s"] = {name: tensor.double() for name, tensor in state["s"].items()}
    options = bcp.LoadOptions(exchange=way.exchange, scratch_bytes=way.scratch_bytes, reader_threads=2, timeout_s=60)
    error = seen(lambda: bcp.load(path, state, cast=is_cast, options=options, storage_options=storage_options))
    expected = state_of(way.placement, is_filled=True)
    right = all(
        torch.equal(state["s"][name].to_local().float(), part.to_local()) for name, part in expected["s"].items()
    )
    assert error is not None or right, (way, "what was loaded is wrong, and nobody says so")
    return error


def save_rows(path: str, codec: str, storage_options: Any = None) -> None:
    options = bcp.SaveOptions(codec=codec)
    bcp.save(path, state_of(Shard(0), is_filled=True), options=options, storage_options=storage_options)


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 1 << (position % 8)]))


def places_in(folder: Path, seed: int) -> list[tuple[Path, int]]:
    """Bytes of tensors, in any of the data files: those of the headers are not read."""
    chooser = random.Random(seed)
    places = []
    for file in chooser.choices(sorted((folder / "data").iterdir()), k=NUM_DAMAGED_BYTES):
        first = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        places.append((file, chooser.randrange(first, file.stat().st_size)))
    return places


def load_damaged(rank: int, world_size: int, path: str, way: Way, seed: int) -> list[tuple[str, Seen | None]]:
    """What this rank raises for each damaged byte, which is mended again."""
    errors = []
    with in_small_pieces():
        save_rows(path, way.codec)
        for file, position in places_in(Path(path), seed):
            dist.barrier()
            if rank == 0:
                flip(file, position)
            dist.barrier()
            errors.append((file.name, load(path, way)))
            dist.barrier()
            if rank == 0:
                flip(file, position)
        dist.barrier()
        assert load(path, way) is None
    return errors


@pytest.mark.parametrize("name", WAYS)
def test_a_damaged_byte_of_a_file_is_found_in_every_way_of_reading(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    seed = [*WAYS].index(name)
    by_rank = workers.run(load_damaged, str(tmp_path), WAYS[name], seed, world_size=WORLD_SIZE, timeout_s=60)
    assert [len(errors) for errors in by_rank] == [NUM_DAMAGED_BYTES] * WORLD_SIZE
    check_found_by_all(by_rank)


def check_found_by_all(by_rank: list[list[tuple[str, Seen | None]]]) -> None:
    assert by_rank == [by_rank[0]] * WORLD_SIZE
    for file_name, error in by_rank[0]:
        assert error is not None
        assert (error.cls, error.kind) == ("CheckpointCorruptError", "checksum"), error
        assert file_name.rpartition("/")[2] in error.message


class Place(NamedTuple):
    """Where a checkpoint is that is reached by a URL: in a folder, or in a bucket of a service."""

    folder: str
    service: S3Service | None = None

    @property
    def path(self) -> str:
        return f"s3://{self.service.bucket}/{self.folder}" if self.service else url_of(self.folder)

    @property
    def storage_options(self) -> dict[str, Any] | None:
        return self.service.options if self.service else None

    def names(self) -> list[str]:
        """Of the data files."""
        if self.service:
            return sorted(key for key in self.service.objects(self.folder) if "/data/" in key)
        return sorted(map(str, (Path(self.folder) / "data").iterdir()))

    def read(self, name: str) -> bytes:
        if self.service:
            content: bytes = self.service.client().get_object(Bucket=self.service.bucket, Key=name)["Body"].read()
            return content
        return Path(name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        if self.service:
            self.service.client().put_object(Bucket=self.service.bucket, Key=name, Body=content)
        else:
            Path(name).write_bytes(content)


def load_damaged_at(
    rank: int, world_size: int, place: Place, way: Way, is_cast: bool, seed: int
) -> list[tuple[str, Seen | None]]:
    """What this rank raises for a damaged byte in each of two files, which is mended again."""
    chooser, errors = random.Random(seed), []
    with in_small_pieces():
        save_rows(place.path if place.service else place.folder, way.codec, place.storage_options)
        stored = {name: place.read(name) for name in chooser.sample(place.names(), 2)}
        for name, content in stored.items():
            damaged = bytearray(content)
            damaged[chooser.randrange(8 + int.from_bytes(content[:8], "little"), len(content))] ^= 1
            dist.barrier()
            if rank == 0:
                place.write(name, bytes(damaged))
            dist.barrier()
            errors.append((name, load(place.path, way, is_cast=is_cast, storage_options=place.storage_options)))
            dist.barrier()
            if rank == 0:
                place.write(name, content)
        dist.barrier()
        assert load(place.path, way, is_cast=is_cast, storage_options=place.storage_options) is None
    return errors


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize(
    "name", ["on, columns, tiny", "on, replicas, default", "off, columns, tiny", "off, rows, default"]
)
def test_a_damaged_byte_at_a_url_is_found(workers: WorkerPool, tmp_path: Path, name: str, is_cast: bool) -> None:
    place = Place(str(tmp_path))
    check_found_by_all(
        workers.run(load_damaged_at, place, WAYS[name], is_cast, len(name), world_size=WORLD_SIZE, timeout_s=60)
    )


@pytest.mark.parametrize("name", ["on, columns, tiny", "on, replicas, default", "off, rows, default"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto
def test_a_damaged_byte_in_s3_is_found(workers: WorkerPool, s3: S3Service, s3_prefix: str, name: str) -> None:
    place = Place(s3_prefix, s3._replace(faults=None))
    check_found_by_all(
        workers.run(load_damaged_at, place, WAYS[name], False, len(name), world_size=WORLD_SIZE, timeout_s=120)
    )


@contextmanager
def damaged_on_the_way(position: int) -> Iterator[None]:
    """Of all that this rank passes on, this byte is another one: in a header, or in what follows it."""
    send, num_sent = Connection.send, 0

    def send_damaged(self: Connection, content: memoryview | bytes) -> None:
        nonlocal num_sent
        start, num_sent = num_sent, num_sent + len(content)
        if start <= position < num_sent:
            content = bytearray(content)
            content[position - start] ^= 1 << (position % 8)
        send(self, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", send_damaged)
        yield


def load_over_a_bad_network(rank: int, world_size: int, path: str, way: Way, positions: list[int]) -> list[Seen | None]:
    with in_small_pieces():
        save_rows(path, way.codec)
        errors = []
        for position in positions:
            with damaged_on_the_way(position) if rank == 1 else nullcontext(), on_host(rank):
                errors.append(load(path, way))
            dist.barrier()
        assert load(path, way) is None
    return errors


@pytest.mark.parametrize(
    "name",
    [f"on, {name}, {size}" for name in ("replicas", "columns") for size in ("tiny", "default")] + ["on, compressed"],
)
def test_a_byte_damaged_on_the_way_is_found_wherever_it_is(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    positions = [*random.Random(len(name)).sample(range(32, 8000), 4), 9, 17, 30]  # the last ones are in a header
    by_rank = workers.run(
        load_over_a_bad_network, str(tmp_path), WAYS[name], positions, world_size=WORLD_SIZE, timeout_s=60
    )
    assert by_rank == [by_rank[0]] * WORLD_SIZE
    for position, error in zip(positions, by_rank[0], strict=True):
        assert error is not None, position
        assert "damaged on the way" in error.message, (position, error)
        assert error.kind in {"checksum", "rank_failed"}
    assert any("that rank 1 had read" in error.message for error in by_rank[0])


def ask_for_something_else(rank: int, world_size: int, path: str, num_hosts: int) -> Seen | None:
    from bytecheckpoint.loading import exchange
    from bytecheckpoint.loading.between_ranks import host_exchange

    encode_request = exchange.encode_request

    def damaged(request: Any) -> bytes:
        encoded = bytearray(encode_request(request))
        encoded[len(encoded) // 2] ^= 1
        return bytes(encoded)

    way = WAYS["on, columns, tiny"]
    with in_small_pieces(), pytest.MonkeyPatch.context() as patch, on_host(rank % num_hosts):
        save_rows(path, "none")
        if rank == 1:
            patch.setattr(exchange if num_hosts > 1 else host_exchange, "encode_request", damaged)
        return load(path, way)


@pytest.mark.parametrize("num_hosts", [1, WORLD_SIZE])
def test_a_damaged_request_is_not_answered(workers: WorkerPool, tmp_path: Path, num_hosts: int) -> None:
    errors = workers.run(ask_for_something_else, str(tmp_path), num_hosts, world_size=WORLD_SIZE)
    assert errors == [errors[0]] * WORLD_SIZE
    assert errors[0] is not None
    assert errors[0].kind == "checksum"
    assert "what rank 1 asked for" in errors[0].message
