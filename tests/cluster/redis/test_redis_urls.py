"""Passwords in Redis URLs: added, taken out and hidden wherever redis-py would read them."""

from __future__ import annotations

import pytest
import redis

from cluster.addresses import _redis_host
from cluster.config.shared import ClusterFields
from cluster.config.sources import with_secrets
from cluster.errors import ConfigError
from cluster.redis.connect import check_url
from cluster.redis.urls import (
    Address,
    seeds_of,
    split_password,
    with_hash_tag,
    with_password,
    without_password,
)

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
        ("redis+sentinel://u:p4ss@h:1,[::1]:2,h3/m?db=1", "redis+sentinel://***@h:1,[::1]:2,h3/m?db=1"),
        (
            "rediss+sentinel://[::1],h/m?sentinel_password=p4ss",
            "rediss+sentinel://[::1],h/m?sentinel_password=***",
        ),
        ("redis+sentinel://u:a,p4ss@h:1,h:2/m", "redis+sentinel://***@h:1,h:2/m"),
        ("redis+sentinel://u:p?p4ss@h:1,h:2/m", "redis+sentinel://***"),
        ("redis+sentinel://u:1?p4ss@h:1,h:2/m", "redis+sentinel://***"),
        ("redis+sentinel://u:1/p4ss@h:1,h:2/m", "redis+sentinel://***"),
        ("redis+sentinel://u:1,p4ss#@h:1,h:2/m", "redis+sentinel://***"),
        ("redis+cluster://:p4ss@h:1,h:2?hash_tag=ns", "redis+cluster://***@h:1,h:2?hash_tag=ns"),
        ("redis+cluster://h:1,h:2?password=a@p4ss", "redis+cluster://h:1,h:2?password=***"),
        ("redis+other://u:p4ss@h:1", "redis+other://***"),
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
    with pytest.raises(ConfigError, match="sentinel_password"):
        split_password("redis+sentinel://h:1/m?sentinel_password=p4ss")


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


# --- several servers ------------------------------------------------------------------------------------------


def test_sentinels_and_the_master_they_watch() -> None:
    url = "rediss+sentinel://us%40er:p%2Fw@h1:1,[fe80::1]:2,h3/m%20x?db=2&ssl_ca_certs=/a&sentinel_password=s%40p"
    seeds = seeds_of(url)
    assert seeds is not None and seeds.kind == "sentinel" and seeds.name == "m x" and seeds.tls
    assert seeds.addresses == (Address("h1", 1), Address("fe80::1", 2), Address("h3", 26379))
    assert seeds.options == {"username": "us@er", "password": "p/w", "db": 2, "ssl_ca_certs": "/a"}
    assert seeds.ask_options == {"password": "s@p", "ssl_ca_certs": "/a", "ssl": True}
    assert "p/w" not in repr(seeds) and "s@p" not in repr(seeds)
    assert str(seeds.addresses[1]) == "[fe80::1]:2"


def test_sentinels_get_no_password_that_is_not_theirs() -> None:
    seeds = seeds_of("redis+sentinel://user:p4ss@h/m?password=other")
    assert seeds is not None and seeds.ask_options == {"ssl": False}


def test_nodes_of_a_cluster_share_user_and_password() -> None:
    seeds = seeds_of(with_hash_tag("redis+cluster://u:p4ss@h1,h2:2/0", "name space"))
    assert seeds is not None and seeds.kind == "cluster" and seeds.name == "name space" and not seeds.tls
    assert seeds.addresses == (Address("h1", 6379), Address("h2", 2))
    assert seeds.options == {"username": "u", "password": "p4ss"}
    assert seeds.ask_options == {"username": "u", "password": "p4ss", "ssl": False}


def test_one_server_has_no_seeds() -> None:
    assert [seeds_of(url) for url in ("redis://h:1/0", "unix:///s", "")] == [None] * 3


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://h:1", "master's name"),
        ("redis+sentinel://h:1/a/b", "master's name"),
        ("redis+sentinel:///m", "host:port"),
        ("redis+sentinel://h:1,/m", "host:port"),
        ("redis+sentinel://h:p4ss/m", "port is a number"),
        ("redis+sentinel://h:65536/m", "port is a number"),
        ("redis+sentinel://h:0/m", "port is a number"),
        ("redis+sentinel://::1:26379/m", "brackets"),
        ("redis+sentinel://[::1/m", "brackets"),
        ("redis+sentinel://[::1]x/m", "brackets"),
        ("redis+sentinel://h/m?db=p4ss", "Invalid value for 'db'"),
        ("redis+cluster://h:1/1", "database 0"),
        ("redis+cluster://h:1?db=3", "database 0"),
        ("redis+other://u:p4ss@h:1", "redis\\+sentinel"),
        ("http+cluster://u:p4ss@h:1", "redis\\+sentinel"),
        ("http://u:p4ss@h:1", "redis\\+sentinel"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_and_not_repeated(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_url(url)
    assert PASSWORD not in str(caught.value) and caught.value.field == "redis_url"


def test_a_password_goes_in_and_out_of_a_url_of_several_servers() -> None:
    for url in ("redis+sentinel://[::1]:1,h:2/m?db=1", "redis+cluster://h:1,h:2", "rediss+sentinel://u@h/m"):
        with_one = with_password(url, "p@s/s:%?,")
        assert split_password(with_one) == (url, "p@s/s:%?,")
        seeds = seeds_of(with_one)
        assert seeds is not None and seeds.options["password"] == "p@s/s:%?,"


def test_the_namespace_is_a_clusters_hash_tag() -> None:
    tagged = with_hash_tag("redis+cluster://h:1?a=b", "n{s")
    assert tagged == "redis+cluster://h:1?a=b&hash_tag=n%7Bs"
    assert with_hash_tag(tagged, "other") == "redis+cluster://h:1?a=b&hash_tag=other"
    assert with_hash_tag("redis+sentinel://h:1/m", "ns") == "redis+sentinel://h:1/m"
    with pytest.raises(ConfigError, match="namespace"):
        with_hash_tag("redis+cluster://h:1", "")
    given = ClusterFields(redis_url="redis+cluster://h:1", redis_password="p", namespace="ns")
    assert with_secrets(given).redis_url == "redis+cluster://:p@h:1?hash_tag=ns"


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("redis://u:a,b@h:1/0", "h"),
        ("redis+sentinel://u:a,b@h:1,i:2/m", "h"),
        ("redis+sentinel://[::1]:1,[::2]:2/m", "::1"),
        ("redis+cluster://h,i?hash_tag=x", "h"),
        ("unix:///s", ""),
        ("", ""),
    ],
)
def test_the_first_host_shows_which_way_redis_lies(url: str, host: str) -> None:
    assert _redis_host(url) == host
