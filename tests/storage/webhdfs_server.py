"""A small WebHDFS server on 127.0.0.1: the operations that fsspec's client sends, with the answers of a name node and
its data nodes.

Faithful where it matters: a rename onto an existing file answers 200 `{"boolean": false}` and changes nothing; with
`renameoptions=OVERWRITE` it replaces the file in one step and answers 200 without content. `knows_overwrite = False`
makes it an HttpFS gateway, which ignores that parameter.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_PREFIX = "/webhdfs/v1"


class WebHdfsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {"/"}
        self.changed_ms: dict[str, int] = {}
        self.lock = threading.RLock()
        self.knows_overwrite = True

    @property
    def url(self) -> str:
        return f"webhdfs://127.0.0.1:{self.server_port}"

    def status(self, path: str, suffix: str) -> dict[str, object]:
        if path in self.files:
            length, kind = len(self.files[path]), "FILE"
        elif path in self.folders:
            length, kind = 0, "DIRECTORY"
        else:
            raise FileNotFoundError(path)
        changed_ms = self.changed_ms.get(path, 0)
        return {"pathSuffix": suffix, "type": kind, "length": length, "modificationTime": changed_ms}

    def children(self, path: str) -> list[str]:
        prefix = path.rstrip("/") + "/"
        below = [name for name in [*self.files, *self.folders] if name.startswith(prefix) and name != path]
        return sorted(name for name in below if "/" not in name.removeprefix(prefix))

    def make_folders(self, path: str) -> None:
        while path not in self.folders:
            if path in self.files:
                raise NotADirectoryError(path)
            self.folders.add(path)
            path = path.rpartition("/")[0] or "/"

    def put(self, path: str, content: bytes) -> None:
        self.files[path] = content
        self.changed_ms[path] = time.time_ns() // 1_000_000

    def rename(self, source: str, target: str, *, overwrite: bool) -> bool:
        if source not in self.files or (target.rpartition("/")[0] or "/") not in self.folders:
            return False
        if target in self.folders or (target in self.files and not overwrite):
            return False
        self.put(target, self.files.pop(source))
        return True


@contextmanager
def running_webhdfs() -> Iterator[WebHdfsServer]:
    server = WebHdfsServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebHdfsServer

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer_request()

    do_PUT = do_POST = do_DELETE = do_GET

    def _answer_request(self) -> None:
        url = urlsplit(self.path)
        path = "/" + unquote(url.path.removeprefix(_PREFIX)).strip("/")
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            with self.server.lock:
                self._do(asked["op"].upper(), path, asked, body)
        except FileNotFoundError:
            self._refuse(404, "FileNotFoundException", f"File does not exist: {path}")
        except NotADirectoryError:
            self._refuse(403, "ParentNotDirectoryException", f"{path} is not a directory")

    def _do(self, op: str, path: str, asked: dict[str, str], body: bytes) -> None:
        server = self.server
        if op in {"CREATE", "APPEND", "OPEN"}:
            self._do_at_data_node(op, path, asked, body)
        elif op == "GETFILESTATUS":
            self._tell({"FileStatus": server.status(path, "")})
        elif op == "LISTSTATUS":
            own = server.status(path, "")
            below = [server.status(name, name.rpartition("/")[2]) for name in server.children(path)]
            self._tell({"FileStatuses": {"FileStatus": [own] if own["type"] == "FILE" else below}})
        elif op == "MKDIRS":
            server.make_folders(path)
            self._tell({"boolean": True})
        elif op == "RENAME":
            self._rename(path, asked)
        elif op == "DELETE":
            is_there = server.files.pop(path, None) is not None
            if path in server.folders and not server.children(path):
                server.folders.discard(path)
                is_there = True
            self._tell({"boolean": is_there})
        else:
            self._refuse(400, "UnsupportedOperationException", f"{op} is not supported")

    def _rename(self, path: str, asked: dict[str, str]) -> None:
        overwrite = self.server.knows_overwrite and "OVERWRITE" in asked.get("renameoptions", "").split(",")
        is_done = self.server.rename(path, asked["destination"], overwrite=overwrite)
        if not overwrite:
            self._tell({"boolean": is_done})
        elif is_done:
            self._answer(200, b"")
        else:
            self._refuse(403, "FileAlreadyExistsException", f"rename destination {asked['destination']} is a directory")

    def _do_at_data_node(self, op: str, path: str, asked: dict[str, str], body: bytes) -> None:
        """Sends the client to the data node first, which is this server under a query of its own."""
        server = self.server
        if op != "CREATE" and path not in server.files:
            raise FileNotFoundError(path)
        if "datanode" not in asked:
            self._answer(307, b"", location=f"http://127.0.0.1:{server.server_port}{self.path}&datanode=1")
            return
        if op == "OPEN":
            start = int(asked.get("offset", 0))
            end = start + int(asked["length"]) if "length" in asked else None
            self._answer(200, server.files[path][start:end])
            return
        if op == "CREATE":
            server.make_folders(path.rpartition("/")[0] or "/")
        server.put(path, body if op == "CREATE" else server.files[path] + body)
        self._answer(201 if op == "CREATE" else 200, b"")

    def _tell(self, content: dict[str, object]) -> None:
        self._answer(200, json.dumps(content).encode(), kind="application/json")

    def _refuse(self, status: int, exception: str, message: str) -> None:
        content = {"RemoteException": {"exception": exception, "javaClassName": exception, "message": message}}
        self._answer(status, json.dumps(content).encode(), kind="application/json")

    def _answer(
        self, status: int, content: bytes, *, kind: str = "application/octet-stream", location: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(content)
