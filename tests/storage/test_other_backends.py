"""The contract of stores on servers that speak other languages than S3: WebDAV in this process, Azure's where there is
an emulator; and reads from a web server.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import pytest
import torch
from reserved_port import reserved_port

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointError, CheckpointExistsError, StorageError
from bytecheckpoint.storage.backends.fsspec_store import FsspecStore

from .store_contract import StoreContract, get, pattern, put

pytestmark = pytest.mark.filterwarnings("ignore")  # of client libraries and servers


@contextmanager
def _serving_webdav(folder: Path) -> Iterator[str]:
    from wsgidav.wsgidav_app import WsgiDAVApp

    class Handler(WSGIRequestHandler):
        def log_message(self, *_args: object) -> None:
            pass

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True

    application = WsgiDAVApp(
        {
            "provider_mapping": {"/": str(folder)},
            "simple_dc": {"user_mapping": {"*": True}},
            "logging": {"enable": False},
            "verbose": 0,
        }
    )

    one_at_a_time = threading.Lock()

    def limited(environ, start_response):
        # wsgidav reads on where a body ends, and decodes chunked ones itself, which werkzeug's server would do as well.
        if environ.get("CONTENT_LENGTH"):
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body)
        if environ["REQUEST_METHOD"] != "MOVE":
            return application(environ, start_response)
        with one_at_a_time:  # real servers look and move in one step, wsgidav in two
            return list(application(environ, start_response))

    server = Server(("127.0.0.1", 0), Handler)
    server.set_app(limited)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def webdav(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    pytest.importorskip("webdav4")
    pytest.importorskip("wsgidav")
    folder = tmp_path_factory.mktemp("webdav")
    with _serving_webdav(folder) as url:
        yield url, folder


class TestWebdavStore(StoreContract):
    @pytest.fixture
    def store(self, webdav):
        url, _ = webdav
        return FsspecStore(f"webdav://root-{uuid.uuid4().hex}/new", {"base_url": url})

    @pytest.mark.parametrize(("num_bytes", "block_bytes"), [(1, 4096), (100_003, 5000), ((2 << 20) + 5, 1 << 19)])
    def test_blocks_land_in_order(self, store, num_bytes, block_bytes):
        super().test_blocks_land_in_order(store, num_bytes, block_bytes, 0)

    def test_deleting(self, store):
        """Unlike elsewhere, folders stay when their last file goes."""
        put(store, "a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/was")
        assert store.list("a") == {}

    def test_what_is_not_finished_is_not_listed(self, store, webdav):
        put(store, "x", b"1")
        (folder,) = (path.parent for path in webdav[1].glob("root-*/new/x") if path.parent.parent.name in str(store))
        (folder / ".tmp-123").write_bytes(b"")
        assert store.list("") == {"x": 1}

    def test_writability_is_checked_without_a_trace(self, store, webdav):
        store.check_writable()
        assert store.list("") == {}
        (folder,) = (path for path in webdav[1].iterdir() if path.name in str(store))
        assert list(folder.rglob(".tmp-*")) == []


def test_a_webdav_server_where_nobody_listens():
    pytest.importorskip("webdav4")
    with reserved_port() as port, pytest.raises(CheckpointError, match="refused"):
        FsspecStore("webdav://x", {"base_url": f"http://127.0.0.1:{port}"}).check_writable()


class _WebServer(SimpleHTTPRequestHandler):
    """Lists folders, without sizes."""

    def log_message(self, *_args: object) -> None:
        pass


class _WebServerWithRanges(_WebServer):
    def do_GET(self) -> None:
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not first:
            super().do_GET()
            return
        content = Path(self.translate_path(self.path)).read_bytes()
        part = content[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


class _WebServerThatSorts(_WebServerWithRanges):
    def list_directory(self, path: str) -> None:
        links = ["?C=N;O=D", "?C=M;O=A", "/", "#top", "mailto:someone@example.org"]
        links += [f"{found.name}/" if found.is_dir() else found.name for found in Path(path).iterdir()]
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        if self.command == "GET":
            self.wfile.writelines(f'<a href="{link}">a link</a>\n'.encode() for link in links)


class _WebServerWithoutLengths(_WebServer):
    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Length":
            super().send_header(keyword, value)


@contextmanager
def _serving_files(folder: Path, handler: type[_WebServer]) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("step", [None, 4])
@pytest.mark.parametrize("server", [_WebServerWithRanges, _WebServerThatSorts])
def test_a_checkpoint_on_a_web_server_whose_listings_have_no_sizes_is_read(tmp_path, server, step):
    bcp.save(tmp_path / "run", {"x": torch.arange(1000)}, step=step)
    with _serving_files(tmp_path, server) as url:
        state = {"x": torch.zeros(1000, dtype=torch.int64)}
        bcp.load(f"{url}/run", state)
    assert torch.equal(state["x"], torch.arange(1000))


def test_a_web_server_that_tells_no_length_is_named_without_the_password(tmp_path):
    bcp.save(tmp_path / "run", {"x": torch.arange(1000)})
    with (
        _serving_files(tmp_path, _WebServerWithoutLengths) as url,
        pytest.raises(StorageError, match="run/m") as caught,
    ):
        bcp.load(f"{url.replace('://', '://user:of+nobody@')}/run", {"x": torch.zeros(1000, dtype=torch.int64)})
    assert caught.value.kind == "unsupported"
    assert "does not tell the length" in str(caught.value)
    assert "of+nobody" not in str(caught.value)


def test_a_web_server_that_sends_more_than_a_range_is_told_from_a_damaged_file(tmp_path):
    bcp.save(tmp_path / "run", {"x": torch.arange(1000)})
    with _serving_files(tmp_path, _WebServer) as url, pytest.raises(StorageError, match="it sent") as caught:
        bcp.load(f"{url}/run", {"x": torch.zeros(1000, dtype=torch.int64)})
    assert caught.value.kind == "unsupported"


_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every emulator; documented, and no secret."""


def _azurite() -> str | None:
    return os.environ.get("BCP_TEST_AZURITE") or shutil.which("azurite-blob")


@pytest.fixture(scope="module")
def azure(tmp_path_factory) -> Iterator[dict[str, str]]:
    pytest.importorskip("adlfs")
    command = _azurite()
    if command is None:
        pytest.skip("azurite is not installed: `npm install azurite`, and its azurite-blob in BCP_TEST_AZURITE")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
    arguments += ["--disableTelemetry"]
    folder = tmp_path_factory.mktemp("azurite")
    server = subprocess.Popen([command, *arguments, "--location", str(folder)])
    try:
        _wait_for(port, server)
        endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        connection = f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_ACCOUNT_KEY}"
        options = {"connection_string": f"{connection};BlobEndpoint={endpoint};"}
        FsspecStore("abfs://bytecheckpoint/x", options)._fs.mkdir("bytecheckpoint")
        yield options
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen) -> None:
    for _ in range(600):
        assert server.poll() is None, "azurite has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("azurite does not listen")


class TestAzureStore(StoreContract):
    @pytest.fixture
    def store(self, azure):
        return FsspecStore(f"abfs://bytecheckpoint/{uuid.uuid4().hex}", azure)

    def test_many_blocks(self, store):
        data = pattern((70 << 20) + 5)
        put(store, "large", data)
        assert store.list("") == {"large": len(data)}
        with pytest.raises(CheckpointExistsError):
            put(store, "large", data)
        assert get(store, "large", 1000, 40 << 20) == data[40 << 20 :][:1000]

    def test_writability_is_checked_without_a_trace(self, store):
        store.check_writable()
        assert store.list("") == {}


def test_a_container_that_does_not_exist(azure):
    store = FsspecStore("abfs://nowhere/x", azure)
    with pytest.raises(CheckpointError, match="nowhere"):
        store.check_writable()
