"""Saves and loads that succeed and fail in many ways, with marked credentials: none of them is in anything that comes
out, be it a log, an error with all that stands behind it, a representation, the terminal or what is stored.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.tools.main import cli
from distributed.workers import WorkerPool
from faults.fault_proxy import FOR_GOOD, Fault, FaultProxy, running_proxy
from faults.launcher import Launcher
from faults.moto_bucket import Bucket, running_moto, storage_options
from faults.s3_calls import in_a_hurry
from faults.seams import state_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of client libraries

KEY, SECRET, TOKEN = "AKIAM4RKEDK3Y", "m4rked/s3cret+of=nobody", "m4rkedt0ken/=="
URL_USER = "AKIAM4RKEDURL:m4rkedurl/p4ss+word"
CREDENTIALS = (KEY, SECRET, TOKEN, *URL_USER.split(":"), "m4rkedquery")
NOWHERE = "http://127.0.0.1:9"
"""Nobody listens there."""


def forms_of(credential: str) -> set[str]:
    encoded = base64.b64encode(credential.encode()).decode()
    return {credential, quote(credential), quote(credential, safe=""), encoded, json.dumps(credential)[1:-1]}


def shown_in(text: str) -> list[str]:
    return [form for credential in CREDENTIALS for form in forms_of(credential) if form in text]


def options_for(endpoint: str, *, stalled_s: float = 1, **more: Any) -> dict[str, Any]:
    timeouts = {"connect_timeout": stalled_s, "read_timeout": stalled_s}
    marked = {"key": KEY, "secret": SECRET, "token": TOKEN}
    return storage_options(endpoint, config_kwargs=timeouts) | marked | more


class _Echo(BaseHTTPRequestHandler):
    """Refuses everything, and repeats what it was sent."""

    def log_message(self, *_args: object) -> None:
        pass

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = f"{self.path} {self.headers} {KEY} {SECRET} {TOKEN}"
        body = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{escape(said)}</Message></Error>".encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with running_moto() as bucket:
        yield bucket


@pytest.fixture(scope="module")
def proxy(bucket: Bucket) -> Iterator[FaultProxy]:
    with running_proxy(bucket.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with serving(_Echo) as url:
        yield url


class Told:
    """Everything that came out."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.errors: list[BaseException] = []

    def by(self, call: Callable[[], object]) -> None:
        try:
            self.texts.append(repr(call()))
        except Exception as error:  # noqa: BLE001  # every one is looked at
            self.errors.append(error)
            self.texts += ["".join(traceback.format_exception(error)), repr(error), repr(vars(error))]
            self.texts.append(pickle.dumps(error).decode("latin-1"))


def save_and_load(told: Told, url: str, options: dict[str, Any], *, timeout_s: float = 1) -> None:
    with in_a_hurry():
        _save_and_load(told, url, options, timeout_s)


def _save_and_load(told: Told, url: str, options: dict[str, Any], timeout_s: float) -> None:
    saving, loading = bcp.SaveOptions(timeout_s=timeout_s, overwrite=True), bcp.LoadOptions(timeout_s=timeout_s)
    for async_save in (False, True):

        def save(async_save: bool = async_save) -> object:
            handle = bcp.save(
                url, state_of(0, 1.0), step=3, async_save=async_save, storage_options=options, options=saving
            )
            told.texts.append(repr(handle))
            handle.exception()
            told.texts.append(repr(handle))
            return handle.result()

        told.by(save)
    told.by(lambda: bcp.load(url, state_of(0, 0.0), storage_options=options, options=loading))
    told.by(lambda: bcp.open(url, storage_options=options, options=loading))


def outage(kind: str) -> list[Fault]:
    return [Fault(kind, "any", 1, FOR_GOOD, 0, True)]


@pytest.mark.parametrize(
    ("url", "faults"),
    [
        ("s3://bucket/secrets/works", []),
        (f"s3://{URL_USER}@bucket/secrets/user", []),
        ("s3://bucket/secrets/query?token=m4rkedquery", []),
        ("s3://bucket/secrets/refused", outage("refuse")),
        pytest.param("s3://bucket/secrets/reset", outage("reset"), marks=pytest.mark.long),
        pytest.param("s3://bucket/secrets/lost", outage("cut_answer"), marks=pytest.mark.long),
        ("s3://nobucket/x", []),
    ],
)
def test_with_a_server(
    bucket: Bucket,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    url: str,
    faults: list[Fault],
) -> None:
    listen(caplog)
    told, options = Told(), options_for(proxy.url, stalled_s=1 if faults else 30)
    proxy.begin(faults)
    save_and_load(told, url, options, timeout_s=1 if faults else 60)
    proxy.heal()
    stored = bucket.objects("secrets/")
    bucket.clear("secrets/")
    assert (told.errors == []) == (url == "s3://bucket/secrets/works"), told.texts
    assert bool(stored) == (told.errors == [])
    look_for_credentials(told, caplog, capfd)
    for key, content in stored.items():
        assert shown_in(key + content.decode("latin-1")) == []


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("s3://bucket/secrets/x", {}),
        (f"s3:/{URL_USER}@bucket/secrets/x", {}),
        (f"nosuchthing://{URL_USER}@bucket/secrets/x?token=m4rkedquery", {}),
        ("s3://bucket/secrets/x", {"no_such_option": SECRET}),
        ("s3://bucket/secrets/x", {"username": KEY, "password": SECRET}),
        ("/nowhere", {}),
        ("s3://bucket/secrets/x", {"endpoint_url": f"http://{URL_USER.replace('/', '%2F')}@127.0.0.1:9"}),
    ],
)
def test_without_a_server(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], url: str, more: dict[str, Any]
) -> None:
    listen(caplog)
    told = Told()
    options = options_for(NOWHERE) | more
    save_and_load(told, url, options)
    assert len(told.errors) == 4
    look_for_credentials(told, caplog, capfd)


def test_a_server_that_repeats_what_it_was_sent(
    echo: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    listen(caplog)
    told = Told()
    save_and_load(told, "s3://bucket/secrets/run", options_for(echo))
    for command in (["ls"], ["show"], ["verify"]):
        arguments = [f"--storage-option={name}={json.dumps(value)}" for name, value in options_for(echo).items()]
        result = CliRunner().invoke(cli, [*command, "s3://bucket/secrets/run", *arguments])
        assert result.exit_code != 0
        told.texts.append(result.output)
    assert len(told.errors) == 4
    assert all(isinstance(error, bcp.CheckpointError) for error in told.errors)
    look_for_credentials(told, caplog, capfd)


def told_by_rank(rank: int, world_size: int, endpoint: str) -> list[str]:
    told = Told()
    save_and_load(told, "s3://bucket/secrets/run", options_for(endpoint))
    return told.texts


def test_errors_that_travel_between_ranks(workers: WorkerPool, echo: str) -> None:
    for texts in workers.run(told_by_rank, echo, world_size=2):
        assert any("CheckpointError" in text or "StorageError" in text for text in texts)
        assert shown_in("\n".join(texts)) == []


UNSEEN = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from faults.seams import state_of
options = json.loads(sys.argv[1])
bcp.save("s3://bucket/secrets/run", state_of(0, 1.0), async_save=True, storage_options=options)
"""


def test_a_failure_that_nobody_asked_for(launcher: Launcher, echo: str) -> None:
    """Is told on standard error when the program ends."""
    ended = launcher.run(UNSEEN, json.dumps(options_for(echo)))
    assert ended.exit_code != 0
    assert "s3://bucket/secrets/run" in ended.output
    assert shown_in(ended.output) == []


def listen(caplog: pytest.LogCaptureFixture) -> None:
    """To everything, but for what client libraries write for those who debug them: whole requests."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="bytecheckpoint")


def look_for_credentials(told: Told, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = capfd.readouterr()
    for text in (*told.texts, caplog.text, out, err):
        assert shown_in(text) == [], text


def test_the_search_finds_them() -> None:
    for credential in CREDENTIALS:
        for form in forms_of(credential):
            assert shown_in(f"refused: {form}!")
