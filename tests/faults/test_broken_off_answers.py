"""Answers of an object store that end early and in good order, at every byte: what a client library takes for whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from storage.s3_server import S3Server, running_s3
from storage.store_contract import get, put

from bytecheckpoint.storage.backends import s3_requests, s3_upload
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store
from faults.fault_proxy import Fault, FaultProxy, running_proxy
from faults.moto_bucket import storage_options
from faults.s3_calls import in_a_hurry, in_small_parts

DATA = bytes(range(250)) * 40
FIRST, END = 16, 330
"""From the first byte after `HTTP/1.1 200 OK` on: an answer without a status is none to anybody."""


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[S3Server, FaultProxy]]:
    with running_s3() as server, running_proxy(server.server_port) as proxy:
        yield server, proxy


@pytest.fixture
def hurry() -> Iterator[None]:
    # Undone before those around it, or what they have set would stay.
    with in_a_hurry(), in_small_parts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_requests, "_FIRST_PAUSE_S", 0.001)
        patch.setattr(s3_upload, "_PART_BYTES", 4000)
        yield


def read_there(store: Store) -> bytes:
    return get(store, "data/x", 5000, byte_offset=1000)


def write_there(store: Store) -> bytes:
    put(store, "manifest.bcp", DATA[:99])
    return get(store, "manifest.bcp", 99)


def upload_there(store: Store) -> bytes:
    put(store, "data/y", DATA)
    return get(store, "data/y", len(DATA))


@pytest.mark.parametrize(
    ("use", "expected", "where"),
    [
        (lambda store: store.list("data"), {"x": len(DATA)}, "list"),
        (read_there, DATA[1000:6000], "get"),
        (write_there, DATA[:99], "head"),
        (write_there, DATA[:99], "manifest"),
        (upload_there, DATA, "create"),
        (upload_there, DATA, "data"),
        (upload_there, DATA, "complete"),
    ],
    ids=["list", "get", "head", "put", "create upload", "upload part", "complete upload"],
)
@pytest.mark.parametrize("every", [85, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.usefixtures("hurry")
def test_an_answer_that_breaks_off_is_none(
    proxied: tuple[S3Server, FaultProxy], use: Callable[[Store], object], expected: object, where: str, every: int
) -> None:
    server, proxy = proxied
    for num_bytes in range(FIRST, END, every):
        server.objects.clear()
        server.objects["bucket/run/data/x"] = DATA
        proxy.begin([Fault("cut_answer", where, 1, 1, num_bytes, is_reset=False)])
        store = open_store(
            "s3://bucket/run", storage_options=storage_options(proxy.url), writer_threads=1, timeout_s=20
        )
        assert use(store) == expected, (num_bytes, proxy.lines)
        assert [met.fault.where for met in proxy.met] == [where], proxy.lines
        assert server.uploads == {}, (num_bytes, proxy.lines)


@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.usefixtures("hurry")
def test_a_write_whose_answer_is_lost_and_whose_look_breaks_off(
    proxied: tuple[S3Server, FaultProxy], every: int
) -> None:
    server, proxy = proxied
    lost = Fault("cut_answer", "manifest", 1, 1, 0, is_reset=True)
    for num_bytes in range(FIRST, END, every):
        server.objects.clear()
        proxy.begin([lost, Fault("cut_answer", "head", 2, 1, num_bytes, is_reset=False)])
        options = storage_options(proxy.url)
        store = open_store("s3://bucket/run", storage_options=options, writer_threads=1, timeout_s=20)
        assert write_there(store) == DATA[:99], (num_bytes, proxy.lines)
        assert len(proxy.met) == 2
