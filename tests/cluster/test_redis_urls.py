"""Passwords in Redis URLs: added, taken out and hidden wherever redis-py would read them."""

from __future__ import annotations

import pytest
import redis

from cluster.errors import ConfigError
from cluster.redis.urls import split_password, with_password, without_password

PASSWORD = "p4ss"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:p4ss@host:1/0", "redis://***@host:1/0"),
        ("rediss://:p4ss@host", "rediss://***@host"),
        ("unix://u:p4ss@/a/b.sock", "unix://***@/a/b.sock"),
        ("unix:///a/b.sock?password=p4ss&db=1", "unix:///a/b.sock?password=***&db=1"),
        ("unix:///a/b.sock?pass%77ord=p4ss", "unix:///a/b.sock?pass%77ord=***"),
        ("rediss://h:1/0?ssl_password=p4ss", "rediss://h:1/0?ssl_password=***"),
        ("redis://h:6379/0?password=a@p4ss", "redis://h:6379/0?password=***"),
        ("redis://u:p?p4ss@h:1/0", "redis://***"),
        ("redis://u:1?p4ss@h:1/0", "redis://***"),
        ("redis://u:1?p4ss=x@h:1/0", "redis://***"),
        ("redis://u:1?x=p4ss@h:1/0", "redis://***"),
        ("redis://u:1/p4ss@h:1/0", "redis://***"),
        ("redis://u:1#p4ss@h:1/0", "redis://***"),
        ("redis://u:[p4ss@h:1/0", "redis://***"),
        ("redis://host:1", "redis://host:1"),
        ("u:p4ss@host:1", "***"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown
    assert PASSWORD not in shown


@pytest.mark.parametrize(
    ("url", "kept", "password"),
    [
        ("redis://u:p%40ss@h:1/0", "redis://u@h:1/0", "p@ss"),
        ("redis://:p4ss@h:1/0?a=b", "redis://h:1/0?a=b", "p4ss"),
        ("redis://h:6379/0?password=a@b", "redis://h:6379/0", "a@b"),
        ("redis://h:6379/0?pass%77ord=a%2540b", "redis://h:6379/0", "a%40b"),
        ("redis://u:first@h:1?password=second", "redis://u@h:1", "first"),
        ("unix:///s?db=1&password=p4ss", "unix:///s?db=1", "p4ss"),
        ("redis://h:1/0?a=b", "redis://h:1/0?a=b", ""),
        ("redis://user@h:1", "redis://user@h:1", ""),
        ("unix:///s?db=2", "unix:///s?db=2", ""),
        ("", "", ""),
    ],
)
def test_the_password_is_taken_out_and_redis_py_reads_the_same_one(
    url: str, kept: str, password: str
) -> None:
    assert split_password(url) == (kept, password)
    if url:
        before = redis.connection.parse_url(url)
        assert before.get("password", "") == password
        assert redis.connection.parse_url(kept) == {k: v for k, v in before.items() if k != "password"}


def test_a_secret_that_no_setting_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="ssl_password"):
        split_password("rediss://h:1/0?ssl_password=p4ss")


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/0",
        "redis://u@h:1/0",
        "redis://h:1/0?ssl_certfile=/a@b.pem",
        "unix:///s",
        "unix:///s?db=1",
        "unix://u@/s",
    ],
)
def test_a_password_is_added_where_redis_py_reads_it(url: str) -> None:
    with_one = with_password(url, "p@s/s:%?")
    assert redis.connection.parse_url(with_one) == {**redis.connection.parse_url(url), "password": "p@s/s:%?"}
    assert split_password(with_one) == (url, "p@s/s:%?")
    with pytest.raises(ConfigError, match="already"):
        with_password(with_one, "another")
