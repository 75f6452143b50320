"""Services that speak S3 a little differently, or no S3 at all."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bytecheckpoint.errors import CheckpointCorruptError, StorageError
from bytecheckpoint.storage.backends import s3_requests
from bytecheckpoint.storage.backends.s3_store import S3Store

from .s3_service import LONG_S, Refuse, always, moto
from .store_contract import get, put


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Next to no time between two attempts."""
    monkeypatch.setattr(s3_requests, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(s3_requests, "_MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(s3_requests, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(s3_requests, "_MAX_BACKOFF_S", 0.02)


class Dialect(http.server.BaseHTTPRequestHandler):
    """Answers reads in chunks, without saying how long they are, and refuses to delete what is gone."""

    protocol_version = "HTTP/1.1"
    status = 206

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Transfer-Encoding", "chunked")
        if self.status == 206:
            self.send_header("Content-Range", "bytes 2-5/10")
        self.end_headers()
        self.wfile.write(b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n")

    def do_DELETE(self) -> None:
        body = b"<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


class ShortRanges(Dialect):
    """Answers with at most four bytes of ten."""

    size = "10"

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        content = b"0123456789"[first : min(last + 1, first + 4)]
        self.send_response(206 if content else 416)
        if content:
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{self.size}")
        content = content or b"<Error><Code>InvalidRange</Code><Message>past the end</Message></Error>"
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "10")
        self.end_headers()


class ShortRangesOfUnknown(ShortRanges):
    """Does not say how long the object is."""

    size = "*"


class WholeObjects(Dialect):
    status = 200


@contextmanager
def served(handler: type[Dialect]) -> Iterator[S3Store]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store_at(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def store_at(url: str, **options: object) -> S3Store:
    options = {"key": "access", "secret": "s3cr3t/of+nobody", "endpoint_url": url, **options}
    return S3Store("s3://bucket/run", options, writer_threads=1, timeout_s=LONG_S)


def test_a_range_that_comes_in_chunks_is_read():
    with served(Dialect) as store:
        assert get(store, "x", 4, 2) == b"abcd"


def test_an_answer_in_chunks_that_is_no_range_is_refused():
    with served(WholeObjects) as store, pytest.raises(StorageError, match="cannot read parts") as caught:
        get(store, "x", 4)
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize("dialect", [ShortRanges, ShortRangesOfUnknown], ids=["with a size", "without a size"])
def test_the_rest_of_a_range_that_is_answered_in_part_is_asked_for(dialect):
    with served(dialect) as store:
        assert get(store, "x", 9, 1) == b"123456789"
        with pytest.raises(CheckpointCorruptError, match="ends at byte 10") as caught:
            get(store, "x", 9, 3)
    assert caught.value.kind == "truncated"


def test_a_request_is_tried_again_for_as_long_as_it_may_take(monkeypatch):
    """More often than a float has doublings."""
    monkeypatch.setattr(s3_requests, "_FIRST_PAUSE_S", 1e-6)
    monkeypatch.setattr(s3_requests, "_MAX_PAUSE_S", 1e-6)

    def attempt(number):
        if number < 1100:
            raise ConnectionResetError
        return number

    with served(Dialect) as store:
        assert store._requests.persist(attempt, store._policy()) == 1100


def test_deleting_what_a_service_says_is_gone_is_no_error():
    with served(Dialect) as store:
        store.delete("x")


@pytest.mark.filterwarnings("ignore")  # of moto
def test_a_write_that_may_have_been_carried_out_does_not_promise_that_nothing_changed(s3, s3_prefix, s3_faults):
    store = s3.store(s3_prefix, timeout_s=0.2)
    for code, promises in (("InternalError", False), ("AccessDenied", True)):
        s3_faults.choose = always("PUT", Refuse(403 if promises else 500, code))
        with pytest.raises(StorageError) as caught:
            put(store, "x", b"1")
        assert ("nothing that is committed was changed" in str(caught.value)) == promises


@pytest.mark.filterwarnings("ignore")  # of moto
@pytest.mark.parametrize("is_tls", [False, True], ids=["no TLS", "unknown signer"])
def test_a_service_whose_tls_is_not_ours_is_given_up_as_one_where_nobody_listens(monkeypatch, is_tls):
    """Within the time of a first contact, not in half of `timeout_s`."""
    monkeypatch.setattr(s3_requests, "_FIRST_CONTACT_S", 0.05)
    with moto(is_tls=is_tls) as (url, _faults):
        store = store_at(url.replace("http:", "https:"))
        with pytest.raises(StorageError, match=r"verify.*CA_FILE") as caught:
            store.check_writable()
    assert caught.value.kind == "unavailable"
    assert not store._requests._has_answered.is_set()
