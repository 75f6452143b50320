"""Serves moto's S3 on 127.0.0.1, with the bucket that is named, until its input ends. Prints its port."""

from __future__ import annotations

import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class OneAtATime:
    """A WSGI application with one request in it at a time: a listing of moto's fails if an object goes meanwhile."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with self._lock:
            return list(self._application(environ, start_response))


class SilentHandler(MotoRequestHandler):
    """Logs nothing."""

    def log(self, *_args: object) -> None: ...

    def log_request(self, *_args: object) -> None: ...


def main() -> None:
    application = OneAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=SilentHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=access/20260101/us-east-1/s3/aws4_request"}
    bucket = f"http://127.0.0.1:{server.server_port}/{sys.argv[1]}"
    urllib.request.urlopen(urllib.request.Request(bucket, method="PUT", headers=signed)).close()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
