"""Many objects deleted with one request to S3, and services that answer it with something else."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.backends import s3_requests, s3_store
from bytecheckpoint.storage.deletion import discard
from bytecheckpoint.storage.store import SupportsDeleteMany

from .s3_service import FirstFew, Lose, Refuse, always
from .store_contract import put

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto

MANY = "POST .*delete"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Next to no time between two attempts."""
    monkeypatch.setattr(s3_requests, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(s3_requests, "_MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(s3_requests, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(s3_requests, "_MAX_BACKOFF_S", 0.02)


@pytest.fixture
def store(s3, s3_prefix):
    return s3.store(s3_prefix)


def put_many(store, count: int) -> list[str]:
    names = [f"data/{number:04d} & <{number}>" for number in range(count)]
    for name in names:
        put(store, name, b"1")
    return names


def num_requests(faults, method: str) -> int:
    return sum(line.startswith(method) for line in faults.requests)


def test_many_objects_go_with_few_requests(s3_faults, store, monkeypatch):
    monkeypatch.setattr(s3_store, "_MAX_DELETIONS", 10)
    assert isinstance(store, SupportsDeleteMany)
    names = put_many(store, 25)
    s3_faults.requests.clear()
    store.delete_many([*names[:24], "data/never"])
    assert num_requests(s3_faults, "POST") == 3
    assert num_requests(s3_faults, "DELETE") == 0
    assert list(store.list("data")) == [names[24].removeprefix("data/")]


@pytest.mark.parametrize("fault", [Refuse(503, "SlowDown"), Refuse(500, "InternalError"), Lose()])
def test_a_request_that_fails_in_passing_is_sent_again(s3_faults, store, fault):
    names = put_many(store, 5)
    s3_faults.choose = faults = FirstFew(MANY, fault, times=2)
    store.delete_many(names)
    assert faults.num_left == 0
    assert num_requests(s3_faults, "DELETE") == 0
    assert store.list("") == {}


@pytest.mark.parametrize(
    "answer",
    [Refuse(501, "NotImplemented"), Refuse(405, "MethodNotAllowed"), Refuse(400, "MalformedXML"), Refuse(200, "")],
)
def test_a_service_that_does_not_know_the_request_is_asked_once_only(s3_faults, store, answer):
    names = put_many(store, 6)
    s3_faults.choose = always(MANY, answer)
    s3_faults.requests.clear()
    for part in (names[:3], names[3:]):
        store.delete_many(part)
    assert num_requests(s3_faults, "POST") == 1
    assert num_requests(s3_faults, "DELETE") == 6
    assert store.list("") == {}


def test_an_object_that_is_refused_is_an_error_like_that_of_a_single_deletion(s3, s3_prefix, s3_faults, monkeypatch):
    """The answer says for one key that it was not deleted."""
    store = s3.store(s3_prefix)
    names = put_many(store, 4)
    send = store._requests.send

    def keep_last(operation, **parameters):
        if operation == "delete_objects":
            parameters["Delete"]["Objects"].pop()
        return send(operation, **parameters)

    monkeypatch.setattr(store._requests, "send", keep_last)
    s3_faults.choose = always("DELETE", Refuse(403, "AccessDenied"))
    with pytest.raises(StorageError, match="not allowed to delete") as caught:
        store.delete_many(names)
    assert caught.value.kind == "permission"
    assert caught.value.path == f"{store}/{names[3]}"
    assert len(store.list("data")) == 1
    s3_faults.reset()
    store.delete_many(names)
    assert store.list("") == {}


def test_a_deletion_that_may_have_been_carried_out_does_not_promise_that_nothing_changed(s3, s3_prefix, s3_faults):
    store = s3.store(s3_prefix, timeout_s=0.2)
    names = put_many(store, 1)
    s3_faults.choose = always("DELETE", Lose())
    with pytest.raises(StorageError) as caught:
        store.delete(names[0])
    assert "changed" not in str(caught.value)
    s3_faults.reset()
    assert store.list("") == {}


def test_a_bucket_that_may_not_be_deleted_from_keeps_what_is_there(s3_faults, store):
    names = put_many(store, 3)
    s3_faults.choose = always(f"DELETE|{MANY}", Refuse(403, "AccessDenied"))
    with pytest.raises(StorageError) as caught:
        store.delete_many(names)
    assert caught.value.kind == "permission"
    s3_faults.reset()
    s3_faults.requests.clear()
    store.delete_many(names)  # a permission that was given since
    assert num_requests(s3_faults, "POST") == 1
    assert store.list("") == {}


def test_files_of_a_checkpoint_are_discarded_at_once_and_those_that_stay_are_counted(s3_faults, store, caplog):
    names = put_many(store, 30)
    s3_faults.requests.clear()
    discard(store, "", names[:20])
    assert num_requests(s3_faults, "POST") == 1
    assert num_requests(s3_faults, "DELETE") == 0
    assert len(store.list("data")) == 10
    s3_faults.choose = always(f"DELETE|{MANY}", Refuse(403, "AccessDenied"))
    discard(store, "", names[20:])
    assert "10 of 10 files" in caplog.text
