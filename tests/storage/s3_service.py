"""S3 for tests: moto's server on 127.0.0.1 in this process, or a real service that BCP_TEST_S3_ENDPOINT names. Faults
stand between moto and its clients.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import botocore.session

from bytecheckpoint.storage.backends.s3_store import S3Store

LONG_S = 120.0
"""The timeout of stores that are to succeed, however slow the machine is: a request is retried for half of it."""


class Refuse(NamedTuple):
    """The service answers with an error and does nothing. Its status may be 200 all the same."""

    status: int
    code: str
    """Where it is empty, so is the answer."""


@dataclass(frozen=True)
class Lose:
    """The service does what it was asked to do, and the connection breaks before the answer."""


class Cut(NamedTuple):
    """The connection breaks when so much of the answer's body has been sent."""

    num_bytes: int


Fault = Refuse | Lose | Cut | None


class Faults:
    """A WSGI application around moto's: notes what is asked, and fails on demand."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self._application = application
        self.requests: list[str] = []
        """`PUT /bucket/key?partNumber&uploadId`, ..."""
        self.ranges: list[str] = []
        self.choose: Callable[[str, dict[str, Any]], Fault] = no_fault
        """Called with a request's line and environment."""
        self._one_at_a_time = threading.Lock()
        """Of requests with a condition: services look and put in one step, moto in two."""

    def reset(self) -> None:
        self.requests.clear()
        self.ranges.clear()
        self.choose = no_fault

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        names = sorted(part.partition("=")[0] for part in environ["QUERY_STRING"].split("&") if part)
        line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}" + (f"?{'&'.join(names)}" if names else "")
        self.requests.append(line)
        if "HTTP_RANGE" in environ:
            self.ranges.append(environ["HTTP_RANGE"])
        fault = self.choose(line, environ)
        if isinstance(fault, Refuse):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{fault.status} No", [("Content-Type", "application/xml")])
            body = f"<Error><Code>{fault.code}</Code><Message>{fault.code} it is</Message></Error>".encode()
            return [body if fault.code and environ["REQUEST_METHOD"] != "HEAD" else b""]
        is_conditional = not environ.keys().isdisjoint({"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"})
        with self._one_at_a_time if is_conditional else nullcontext():
            answer = self._application(environ, start_response)
        return answer if fault is None else _broken(answer, environ["werkzeug.socket"], fault)


def no_fault(_line: str, _environ: dict[str, Any]) -> Fault:
    return None


class FirstFew:
    """The fault for the first requests that match, and how many are still to come."""

    def __init__(self, pattern: str, fault: Fault, *, times: int = 1) -> None:
        self.num_left = times
        self._pattern = pattern
        self._fault = fault
        self._lock = threading.Lock()

    def __call__(self, line: str, _environ: dict[str, Any]) -> Fault:
        with self._lock:
            if not self.num_left or not re.search(self._pattern, line):
                return None
            self.num_left -= 1
            return self._fault


def always(pattern: str, fault: Fault) -> Callable[[str, dict[str, Any]], Fault]:
    return lambda line, _environ: fault if re.search(pattern, line) else None


def _broken(answer: Any, connection: socket.socket, fault: Lose | Cut) -> Iterator[bytes]:
    body = b"".join(answer)
    if isinstance(fault, Cut):
        yield body[: fault.num_bytes]
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError("as a test wants it")


class S3Service(NamedTuple):
    """A service that tests may use: everything below a prefix that is theirs alone."""

    url: str
    bucket: str
    key: str
    secret: str
    faults: Faults | None
    """None where the service is a real one."""

    @property
    def options(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": self.url,
            "client_kwargs": {"region_name": os.environ.get("AWS_REGION", "us-east-1")},
        }

    def client(self) -> Any:
        return _client(self.url, self.key, self.secret, self.options["client_kwargs"]["region_name"])

    def store(self, prefix: str, *, timeout_s: float = LONG_S, **options: object) -> S3Store:
        url = f"s3://{self.bucket}/{prefix}"
        return S3Store(url, {**self.options, **options}, writer_threads=1, timeout_s=timeout_s)

    @contextmanager
    def new_prefix(self) -> Iterator[str]:
        """A prefix that nobody else uses; what is below it goes afterwards."""
        prefix = f"test-{uuid.uuid4().hex}"
        try:
            yield prefix
        finally:
            if self.faults is not None:
                self.faults.reset()
            client = self.client()
            for entry in self.objects(prefix):
                client.delete_object(Bucket=self.bucket, Key=entry)

    def objects(self, prefix: str) -> list[str]:
        found = self.client().list_objects_v2(Bucket=self.bucket, Prefix=f"{prefix}/")
        return [entry["Key"] for entry in found.get("Contents", ())]

    def uploads(self, prefix: str) -> list[str]:
        found = self.client().list_multipart_uploads(Bucket=self.bucket, Prefix=f"{prefix}/")
        return [entry["Key"] for entry in found.get("Uploads", ())]


@cache
def _client(url: str, key: str, secret: str, region: str) -> Any:
    session = botocore.session.Session()
    return session.create_client(
        "s3", endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=secret, region_name=region
    )


@contextmanager
def running_s3_service() -> Iterator[S3Service]:
    if "BCP_TEST_S3_ENDPOINT" in os.environ:
        with _real_service(os.environ["BCP_TEST_S3_ENDPOINT"]) as service:
            yield service
        return
    with moto() as (url, faults):
        service = S3Service(url, "bucket", "access", "s3cr3t/of+nobody", faults)
        service.client().create_bucket(Bucket=service.bucket)
        yield service


@contextmanager
def moto(*, is_tls: bool = False) -> Iterator[tuple[str, Faults]]:
    """A server of moto's, and the faults before it. Servers of one process have the same buckets."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        def log_request(self, *_args: object) -> None:
            pass

        log = log_request

    faults = Faults(DomainDispatcherApplication(create_backend_app))
    tls = "adhoc" if is_tls else None
    server = make_server("127.0.0.1", 0, faults, threaded=True, request_handler=Handler, ssl_context=tls)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{'https' if is_tls else 'http'}://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _real_service(url: str) -> Iterator[S3Service]:
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    bucket = os.environ.get("BCP_TEST_S3_BUCKET")
    if bucket is not None:
        yield S3Service(url, bucket, key, secret, None)
        return
    service = S3Service(url, f"bytecheckpoint-test-{uuid.uuid4().hex[:16]}", key, secret, None)
    client = service.client()
    client.create_bucket(Bucket=service.bucket)
    try:
        yield service
    finally:
        client.delete_bucket(Bucket=service.bucket)
