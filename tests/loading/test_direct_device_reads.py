"""Reads past the host into device memory, by a fake of kvikio that has its calls, into a device that is late."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
import torch
from late_lanes import LateLane

import bytecheckpoint as bcp
from bytecheckpoint.loading import read, scatter
from bytecheckpoint.memory import direct_reader
from bytecheckpoint.memory.host_to_device import CopyStreams

RAW = bcp.LoadOptions(direct="auto", verify=False)


class Future:
    def __init__(self, kvikio: Kvikio, target: torch.Tensor, content: bytes) -> None:
        self._kvikio, self._target, self._content = kvikio, target, content

    def get(self) -> int:
        if self._kvikio.error is not None:
            raise self._kvikio.error
        self._kvikio.num_under_way -= 1
        found = torch.frombuffer(bytearray(self._content), dtype=torch.uint8)
        self._target[: len(found)].copy_(found)
        return len(found)


class CuFile:
    """With the signatures of kvikio.CuFile."""

    kvikio: Kvikio

    def __init__(self, file: Path | str, flags: str = "r") -> None:
        assert flags == "r"
        self._file = Path(file).open("rb")  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert not self.kvikio.num_under_way or self.kvikio.error
        self._file.close()

    def pread(self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None) -> Future:
        assert task_size is None
        assert size is not None
        self._file.seek(file_offset)
        self.kvikio.num_under_way += 1
        self.kvikio.num_bytes += size
        return Future(self.kvikio, buf, self._file.read(size)[: self.kvikio.most_bytes])


class Kvikio(ModuleType):
    """Keeps account of reads."""

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.num_bytes = self.num_under_way = 0
        self.most_bytes: int | None = None
        self.error: Exception | None = None
        self.CuFile = type("CuFile", (CuFile,), {"kvikio": self})


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Kvikio:
    """Every tensor counts as on a device with streams."""
    fake = Kvikio()
    monkeypatch.setitem(sys.modules, "kvikio", fake)
    for module in (read, scatter):
        monkeypatch.setattr(module, "has_streams", lambda _: True)
    monkeypatch.setattr(read, "streams_to", lambda _: CopyStreams([torch.device("cpu")], LateLane))

    class Without:
        def __init__(self, _: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(direct_reader, "on_cuda", Without)
    # Host tensors have addresses, by which they would be filled; a device's have none.
    targets_of = read.Source.targets

    def without_addresses(source: Any, shards: Any, *more: Any) -> Any:
        return targets_of(source, [shard._replace(address=0) for shard in shards], *more)

    monkeypatch.setattr(read.Source, "targets", without_addresses)
    return fake


def state() -> dict[str, torch.Tensor]:
    return {"large": torch.arange(3_000_000.0), "matrix": torch.arange(600_000.0).view(600, 1000), "one": torch.ones(1)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state().items()}


def load(path: Path, options: bcp.LoadOptions, **arguments: Any) -> dict[str, torch.Tensor]:
    found = zeros()
    bcp.load(path, found, options=options, **arguments)
    return found


def test_what_lies_in_one_piece_goes_past_the_host(tmp_path: Path, kvikio: Kvikio) -> None:
    bcp.save(tmp_path, state())
    found = load(tmp_path, RAW)
    assert all(torch.equal(found[name], value) for name, value in state().items())
    assert kvikio.num_bytes >= 12_000_000
    assert not kvikio.num_under_way


def test_columns_of_a_matrix_are_read_beside_it(tmp_path: Path, kvikio: Kvikio) -> None:
    bcp.save(tmp_path, state())
    found = zeros() | {"matrix": torch.zeros(1000, 600).T}
    bcp.load(tmp_path, found, options=RAW)
    assert all(torch.equal(found[name], value) for name, value in state().items())
    assert 12_000_000 <= kvikio.num_bytes < 14_000_000


@pytest.mark.parametrize(
    "options", [bcp.LoadOptions(direct="auto"), bcp.LoadOptions(verify=False)], ids=["verified", "off"]
)
def test_verified_bytes_come_through_the_host(tmp_path: Path, kvikio: Kvikio, options: bcp.LoadOptions) -> None:
    bcp.save(tmp_path, state())
    found = load(tmp_path, options)
    assert all(torch.equal(found[name], value) for name, value in state().items())
    assert kvikio.num_bytes == 0


def test_compressed_tensors_come_through_the_host(tmp_path: Path, kvikio: Kvikio) -> None:
    bcp.save(tmp_path, state(), options=bcp.SaveOptions(codec="zstd"))
    found = load(tmp_path, RAW)
    assert all(torch.equal(found[name], value) for name, value in state().items())
    assert kvikio.num_bytes == 0


def test_a_file_that_ends_early_is_an_error(tmp_path: Path, kvikio: Kvikio) -> None:
    bcp.save(tmp_path, state())
    kvikio.most_bytes = 1000
    with pytest.raises(bcp.CheckpointCorruptError, match="ends at byte") as raised:
        load(tmp_path, RAW)
    assert raised.value.kind == "truncated"


def test_a_driver_that_fails_is_an_error_that_says_what_to_do(tmp_path: Path, kvikio: Kvikio) -> None:
    bcp.save(tmp_path, state())
    kvikio.error = RuntimeError("cuFile: no driver")
    with pytest.raises(bcp.StorageError, match=r'no driver.*direct="off".*overwritten'):
        load(tmp_path, RAW)


def test_without_kvikio_a_load_is_as_ever(tmp_path: Path, kvikio: Kvikio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    bcp.save(tmp_path, state())
    found = load(tmp_path, RAW)
    assert all(torch.equal(found[name], value) for name, value in state().items())
    assert kvikio.num_bytes == 0


def test_each_call_reads_into_one_device(tmp_path: Path, kvikio: Kvikio, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call makes the device of its first target the current one."""
    bcp.save(tmp_path, state())
    calls = []

    def on_two_devices(part: Any, targets: Any) -> torch.Tensor:
        memory = device_memory_of(part, targets)
        assert memory is not None
        return memory.to("meta") if memory.nbytes > 10_000_000 else memory

    class Reader:
        def read(self, _path: str, reads: Any) -> None:
            calls.append({read.target.device.type for read in reads})

    device_memory_of = read.device_memory_of
    monkeypatch.setattr(read, "device_memory_of", on_two_devices)
    monkeypatch.setattr(read, "find_direct_reader", Reader)
    load(tmp_path, RAW)
    assert sorted(map(sorted, calls)) == [["cpu"], ["meta"]]
