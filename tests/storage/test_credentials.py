from __future__ import annotations

import base64

import pytest

from bytecheckpoint.storage.credentials import contains_secret, describe_safely, find_secrets, showable_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://joe:hunter2@bucket/run", "s3://bucket/run"),
        ("s3://AKIA1:a/b+c/d@bucket/run", "s3://bucket/run"),
        ("s3:/AKIA1:a/b@bucket/run", "s3:/bucket/run"),
        ("simplecache::s3://joe:hunter2@bucket/run?token=t::x", "simplecache::s3://bucket/run::x"),
        ("http://host:8080/joe@home/run?sig=abc\ndef", "http://host:8080/joe@home/run"),
        ("http://host:8080/a:b@c", "http://host:8080/a:b@c"),
        ("s3://bucket/joe@home/run", "s3://bucket/joe@home/run"),
        ("/data/joe@home/run", "/data/joe@home/run"),
        ("/data/s3:/run", "/data/s3:/run"),
        ("/data/run?1", "/data/run?1"),
        ("/data/s3:/AKIA1:a/b@bucket/run?sig=s1g", "/data/s3:/bucket/run"),
        ("memory://", "memory://"),
        ("abfs://ckpts@acct.dfs.core.windows.net/run?sig=s1g", "abfs://ckpts@acct.dfs.core.windows.net/run"),
        ("simplecache::wasbs://ckpts@acct/run", "simplecache::wasbs://ckpts@acct/run"),
        ("abfs://joe:hunter2@acct/run", "abfs://acct/run"),
        ("sftp://joe@host/run", "sftp://host/run"),
        ("notaz://joe@host/run", "notaz://host/run"),
    ],
)
def test_what_of_a_url_is_shown(url, shown):
    assert showable_url(url) == shown


@pytest.mark.parametrize(
    ("url", "options", "forms"),
    [
        ("s3://b", {"key": "AKIA1", "secret": "a/b+c"}, ["AKIA1", "a/b+c", "a%2Fb%2Bc", "a/b%2Bc"]),
        ("s3://b", {"key": "joe", "secret": "pw"}, [base64.b64encode(b"joe:pw").decode()]),
        ("http://joe:p%20w@h", {}, ["joe:p%20w", "p%20w", "p w", base64.b64encode(b"joe:p w").decode()]),
        ("s3://AKIA1:a/b@bucket", {}, ["a/b", "AKIA1"]),
        ("s3://AKIA1:a1b2c3/d@bucket", {}, ["'AKIA1:a1b2c3'", "a1b2c3"]),
        ("s3://b", {"auth": ("joe", "hunter2")}, ["hunter2", base64.b64encode(b"joe:hunter2").decode()]),
        ("s3://b", {"a": {"deep": [b"d33p"]}}, ["d33p"]),
        ("abfs://b", {"connection_string": "Protocol=https;AccountKey=k3y/k3y/=="}, ["k3y/k3y/=="]),
        ("s3://b", {"endpoint_url": "http://joe:hunter2@host?sig=s1g"}, ["joe:hunter2", "hunter2", "s1g"]),
        ("s3://b", {"token": 'a"\\b'}, [repr('a"\\b')[1:-1]]),
    ],
)
def test_secrets_are_found_in_every_form(url, options, forms):
    secrets = find_secrets(url, options)
    assert [form for form in forms if not any(secret in form for secret in secrets)] == []
    for form in forms:
        assert form not in describe_safely(ValueError(f"refused: {form}"), secrets)


def test_a_container_and_an_account_of_azure_are_no_secrets():
    url, options = "abfss://ckpts@acct.dfs.core.windows.net/run", {"account_name": "acct", "account_key": "k3yk3y"}
    secrets = find_secrets(url, options)
    assert describe_safely(ValueError(f"{url} of acct"), secrets) == f"{url} of acct"
    assert "k3yk3y" in secrets


def test_what_is_no_secret_is_shown():
    options = {
        "endpoint_url": "http://host:9000",
        "config_kwargs": {"s3": {"addressing_style": "path"}, "retries": {"mode": "standard"}},
        "client_kwargs": {"region_name": "us-east-1"},
        "connection_string": "Protocol=https;AccountKey=k3y/k3y/==",
    }
    words = "https://host:9000/path is not in us-east-1"
    assert describe_safely(ValueError(words), find_secrets("s3://bucket/run", options)) == words


def test_a_secret_is_found_behind_an_error_that_is_its_own_cause():
    behind, error = OSError("the key is s3cr3t"), OSError("no access")
    error.__cause__, error.__context__ = error, behind
    assert contains_secret(error, frozenset({"s3cr3t"}))
    assert not contains_secret(error, frozenset({"another"}))
