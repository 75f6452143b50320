"""A little S3 on 127.0.0.1: as much of it as s3fs uses, with faults on demand, and started in no time."""

from __future__ import annotations

import re
import sys
import threading
import uuid
import zlib
from collections.abc import Iterator, MutableMapping, MutableSequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class S3Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.objects: MutableMapping[str, bytes] = {}
        self.metadata: MutableMapping[str, bytes] = {}
        """What a client has said about an object, as lines of headers."""
        self.uploads: MutableMapping[str, MutableMapping[str, bytes]] = {}
        """The parts by number, and what was said when the upload began: `key` and `metadata`."""
        self.requests: MutableSequence[str] = []
        self.lose_answers_to: str | None = None
        """A pattern of request lines that are carried out, once each, and then answered by closing the connection."""
        self.refuse: tuple[str, int, str] | None = None
        """A pattern of request lines, and the status and code to answer them with."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), OSError):  # clients that leave without a word are what tests are about
            super().handle_error(request, client_address)


@contextmanager
def running_s3() -> Iterator[S3Server]:
    server = S3Server()
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
    server: S3Server

    def log_message(self, *_args) -> None:
        pass

    def _serve(self) -> None:
        try:
            body = self._body()
        except (EOFError, OSError):
            self.close_connection = True
            return
        split = urlsplit(self.path)
        key = unquote(split.path).lstrip("/")
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        line = f"{self.command} /{key}?{'&'.join(sorted(query))}"
        self.server.requests.append(line)
        if self.server.refuse and re.search(self.server.refuse[0], line):
            self._fail(*self.server.refuse[1:])
            return
        with self.server.lock:
            status, headers, answer = getattr(self, f"_{self.command.lower()}")(key, query, body)
        if self.server.lose_answers_to and re.search(self.server.lose_answers_to, line):
            self.server.lose_answers_to = None
            self.close_connection = True
            return
        self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            raise EOFError("the client is gone")
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return body
        plain = b""
        while body:
            size_line, _, body = body.partition(b"\r\n")
            size = int(size_line.split(b";")[0], 16)
            if size == 0:
                return plain
            plain, body = plain + body[:size], body[size + 2 :]
        return plain

    def _answer(self, status: int, headers: dict[str, str], answer: bytes) -> None:
        self.send_response(status)
        length = headers.pop("Content-Length", str(len(answer)))
        for name, value in {"Content-Length": length, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def _fail(self, status: int, code: str) -> None:
        self._answer(*_error(status, code))

    def _get(self, key, query, _body):
        if "/" not in key.rstrip("/"):
            return self._list_uploads(query) if "uploads" in query else self._list(key.rstrip("/"), query)
        data = self.server.objects.get(key)
        if data is None:
            return _error(404, "NoSuchKey")
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None:
            return 200, self._headers_of(key), data
        first, last = int(span[1]), min(int(span[2]), len(data) - 1)
        if first >= len(data):
            return _error(416, "InvalidRange")
        span_header = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return 206, self._headers_of(key) | span_header, data[first : last + 1]

    def _headers_of(self, key):
        said = self.server.metadata.get(key, b"").decode().splitlines()
        return {"ETag": self._etag(key), **dict(line.split(": ", 1) for line in said)}

    def _etag(self, key):
        return f'"{zlib.crc32(self.server.objects[key]):08x}"'

    def _metadata(self):
        said = [f"{name}: {value}" for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")]
        return "\n".join(said).encode()

    def _list_uploads(self, query):
        rows = [
            f"<Upload><Key>{escape(upload['key'].decode().removeprefix('bucket/'))}</Key><UploadId>{name}</UploadId>"
            "<Initiated>2026-01-01T00:00:00Z</Initiated></Upload>"
            for name, upload in self.server.uploads.items()
            if upload["key"].decode().removeprefix("bucket/").startswith(query.get("prefix", ""))
        ]
        listing = f"<IsTruncated>false</IsTruncated>{''.join(rows)}"
        return 200, {}, f"<ListMultipartUploadsResult>{listing}</ListMultipartUploadsResult>".encode()

    def _list(self, bucket, query):
        if bucket != "bucket":
            return _error(404, "NoSuchBucket")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        every = sorted(key.removeprefix("bucket/") for key in self.server.objects)
        keys = [key for key in every if key > query.get("start-after", "")]
        rest = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        files = [key for key in rest if not delimiter or delimiter not in key]
        folders = sorted({key.split(delimiter)[0] + delimiter for key in rest if delimiter and delimiter in key})
        rows = [
            f"<Contents><Key>{escape(prefix + key)}</Key>"
            f"<Size>{len(self.server.objects[f'bucket/{prefix}{key}'])}</Size>"
            "<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>e</ETag></Contents>"
            for key in files
        ]
        rows += [f"<CommonPrefixes><Prefix>{escape(prefix + key)}</Prefix></CommonPrefixes>" for key in folders]
        return 200, {}, f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>".encode()

    def _head(self, key, _query, _body):
        data = self.server.objects.get(key)
        if data is None:
            return 404, {}, b""
        return 200, self._headers_of(key) | {"Content-Length": str(len(data))}, b""

    def _put(self, key, query, body):
        if "partNumber" in query:
            upload = self.server.uploads.get(query["uploadId"])
            if upload is None:
                return _error(404, "NoSuchUpload")
            upload[query["partNumber"]] = body
            return 200, {"ETag": '"p"'}, b""
        return self._create(key, body, self._metadata())

    def _create(self, key, body, metadata):
        if key.split("/")[0] != "bucket":
            return _error(404, "NoSuchBucket")
        if self.headers.get("If-None-Match") == "*" and key in self.server.objects:
            return _error(412, "PreconditionFailed", "<Condition>If-None-Match</Condition>")
        if "If-Match" in self.headers and key not in self.server.objects:
            return _error(404, "NoSuchKey")
        if "If-Match" in self.headers and self.headers["If-Match"] != self._etag(key):
            return _error(412, "PreconditionFailed", "<Condition>If-Match</Condition>")
        self.server.metadata[key] = metadata
        self.server.objects[key] = body
        return 200, {"ETag": self._etag(key)}, b""

    def _post(self, key, query, body):
        if "delete" in query:
            for found in re.findall(rb"<Key>(.*?)</Key>", body):
                self.server.objects.pop(f"{key.rstrip('/')}/{found.decode()}", None)
            return 200, {}, b"<DeleteResult></DeleteResult>"
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.server.uploads[upload] = {"key": key.encode(), "metadata": self._metadata()}
            answer = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return 200, {}, answer.encode()
        upload = self.server.uploads.get(query["uploadId"])
        if upload is None:
            return _error(404, "NoSuchUpload")
        numbers = sorted(int(name) for name in upload if name.isdigit())
        content = b"".join(upload[str(number)] for number in numbers)
        status, headers, answer = self._create(key, content, upload["metadata"])
        if status == 200:
            self.server.uploads.pop(query["uploadId"], None)
        done = b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"
        return status, headers, answer or done

    def _delete(self, key, query, _body):
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"], None)
        else:
            self.server.objects.pop(key, None)
        return 204, {}, b""


def _error(status: int, code: str, more: str = "") -> tuple[int, dict[str, str], bytes]:
    return status, {}, f"<Error><Code>{code}</Code><Message>{code} it is</Message>{more}</Error>".encode()
