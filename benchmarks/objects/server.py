"""Serves a fast S3 on 127.0.0.1 that keeps objects in memory: as much of S3 as bytecheckpoint, s3fs, boto3 and obstore
ask of one. It checks nothing, so that what is measured is the client. Prints its port.

    python benchmarks/objects/server.py [--latency 0.02]
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Answer = tuple[int, dict[str, str], bytes | memoryview | list[memoryview]]
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_SOCKET_BYTES = 4 << 20


class ObjectServer(ThreadingHTTPServer):
    """Every bucket exists."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.latency_s = latency_s
        self.objects: dict[str, list[memoryview]] = {}
        """Parts of each object, by bucket and key."""
        self.uploads: dict[str, dict[int, memoryview]] = {}
        self.num_requests = 0
        self.memory = PartPool()
        self.lock = threading.Lock()


class PartPool:
    """Memory of removed objects, which new ones reuse: fresh pages would be measured otherwise, and their cost on a
    virtual machine differs from minute to minute.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}

    def take(self, num_bytes: int) -> memoryview:
        try:
            return memoryview(self._free[num_bytes].pop())
        except (KeyError, IndexError):
            return memoryview(bytearray(num_bytes))

    def give_back(self, parts: Iterable[memoryview]) -> None:
        """Takes parts that nothing else holds."""
        for part in parts:
            self._free.setdefault(len(part.obj), []).append(part.obj)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server: ObjectServer

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        super().setup()

    def log_message(self, *_args: object) -> None:
        """Nothing is logged."""

    def handle_expect_100(self) -> bool:
        """Sends at once the answer that a client awaits before its body."""
        goes_on = super().handle_expect_100()
        self.wfile.flush()
        return goes_on

    def serve(self) -> None:
        body = self._body()
        split = urlsplit(self.path)
        key = unquote(split.path).strip("/")
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        if self.server.latency_s:
            time.sleep(self.server.latency_s)
        self.server.num_requests += 1
        status, headers, content = getattr(self, f"_{self.command.lower()}")(key, query, body)
        parts = content if isinstance(content, list) else [content]
        self.send_response(status)
        headers = {"Content-Length": str(sum(map(len, parts))), "ETag": '"e"', "Last-Modified": _DATE, **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.flush()
            for part in parts:
                self.request.sendall(part)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve  # noqa: N815  http.server's names

    def _body(self) -> memoryview:
        body = self.server.memory.take(int(self.headers.get("Content-Length") or 0))
        position = 0
        while position < len(body):
            position += self.rfile.readinto(body[position:]) or sys.exit("a body was cut short")
        return plain(body) if "aws-chunked" in self.headers.get("Content-Encoding", "") else body

    def _get(self, key: str, query: dict[str, str], _body: memoryview) -> Answer:
        if "/" not in key:
            return self._list(key, query)
        parts = self.server.objects.get(key)
        if parts is None:
            return failed(404, "NoSuchKey")
        size = sum(map(len, parts))
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return 200, {}, parts
        first, last = int(span[1]), min(int(span[2] or size - 1), size - 1)
        if first >= size:
            return failed(416, "InvalidRange")
        return 206, {"Content-Range": f"bytes {first}-{last}/{size}"}, cut(parts, first, last + 1)

    def _list(self, bucket: str, query: dict[str, str]) -> Answer:
        if "uploads" in query:
            return 200, {}, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>"
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start = f"{bucket}/"
        keys = sorted(key.removeprefix(start) for key in list(self.server.objects) if key.startswith(start))
        rest = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        files = [key for key in rest if not delimiter or delimiter not in key]
        folders = sorted({key.split(delimiter)[0] + delimiter for key in rest if delimiter and delimiter in key})
        rows = [
            f"<Contents><Key>{escape(prefix + key)}</Key>"
            f"<Size>{sum(map(len, self.server.objects[f'{bucket}/{prefix}{key}']))}</Size>"
            '<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"e"</ETag></Contents>'
            for key in files
        ]
        rows += [f"<CommonPrefixes><Prefix>{escape(prefix + key)}</Prefix></CommonPrefixes>" for key in folders]
        content = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        return 200, {}, content.encode()

    def _head(self, key: str, _query: dict[str, str], _body: memoryview) -> Answer:
        parts = self.server.objects.get(key)
        if parts is None:
            return (404 if "/" in key else 200), {}, b""
        return 200, {"Content-Length": str(sum(map(len, parts)))}, b""

    def _put(self, key: str, query: dict[str, str], body: memoryview) -> Answer:
        if "partNumber" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {}, b""
        source = self.headers.get("x-amz-copy-source")
        if source is not None:
            copied = bytearray().join(self.server.objects[unquote(source).strip("/")])
            self.server.objects[key] = [memoryview(copied)]
            return 200, {}, b'<CopyObjectResult><ETag>"e"</ETag></CopyObjectResult>'
        if "/" in key:
            self.server.objects[key] = [body]
        return 200, {}, b""

    def _post(self, key: str, query: dict[str, str], body: memoryview) -> Answer:
        if "delete" in query:
            for found in re.findall(rb"<Key>(.*?)</Key>", bytes(body)):
                self.server.memory.give_back(self.server.objects.pop(f"{key}/{found.decode()}", ()))
            return 200, {}, b"<DeleteResult></DeleteResult>"
        if "uploads" in query:
            with self.server.lock:
                upload = f"upload{len(self.server.uploads)}"
                self.server.uploads[upload] = {}
            bucket, _, name = key.partition("/")
            described = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
            return 200, {}, f"<InitiateMultipartUploadResult>{described}</InitiateMultipartUploadResult>".encode()
        parts = self.server.uploads[query["uploadId"]]
        self.server.objects[key] = [parts[number] for number in sorted(parts)]
        parts.clear()
        return 200, {}, b'<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'

    def _delete(self, key: str, query: dict[str, str], _body: memoryview) -> Answer:
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]].clear()
        else:
            self.server.memory.give_back(self.server.objects.pop(key, ()))
        return 204, {}, b""


def plain(body: memoryview) -> memoryview:
    """Returns a body that was sent in signed or checked chunks without their headers: moved together in place."""
    position = num_bytes = 0
    while True:
        end = bytes(body[position : position + 200]).index(b"\r\n") + position
        size = int(bytes(body[position:end]).split(b";")[0], 16)
        if size == 0:
            return body[:num_bytes]
        body[num_bytes : num_bytes + size] = body[end + 2 : end + 2 + size]
        num_bytes += size
        position = end + 4 + size


def cut(parts: list[memoryview], first: int, end: int) -> list[memoryview]:
    found, start = [], 0
    for part in parts:
        found_part = part[max(0, first - start) : max(0, end - start)]
        if len(found_part):
            found.append(found_part)
        start += len(part)
    return found


def failed(status: int, code: str) -> Answer:
    return status, {}, f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>".encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    server = ObjectServer(parser.parse_args().latency)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
