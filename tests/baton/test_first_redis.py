"""A Redis that is absent, wrong or of no use at a first start: one sentence that says what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from baton.cli import serve
from cluster.config import sources
from cluster.config.router import RouterConfig
from cluster.errors import ConfigError, SetupError
from cluster.redis.connect import why_silent
from cluster.redis.embedded import EmbeddedRedis
from cluster.redis.server import ask_why_unusable
from router.rights import redis_rights
from tests.baton.starts import UNREACHABLE, failed_start


@pytest.mark.parametrize(
    "url", ["p4ssw0rd", "http://u:p4ssw0rd@h", "redis//p4ssw0rd@h", "redis://u:p4ssw0rd@h:port"]
)
def test_an_invalid_redis_url_is_refused_when_settings_are_read(url, checkpoint):
    with pytest.raises(ConfigError) as caught:
        sources.load(RouterConfig, {"model": checkpoint("llama"), "redis_url": url})
    assert caught.value.field == "redis_url" and "p4ssw0rd" not in caught.value.message


def test_an_unreachable_redis_is_reported_once_and_waited_for(checkpoint, capsys):
    config = RouterConfig(model=checkpoint("llama"), redis_url=UNREACHABLE, secret="s")
    serve.check_start(config, None, redis_rights(config))
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("no Redis answers at redis://***@127.0.0.1:1 (")
    assert "starting anyway" in said
    assert "p4ssw0rd" not in said


def says(**lines: object) -> Callable[[object], dict[str, object]]:
    """A server's INFO."""
    return lambda client: lines


def test_an_old_redis_is_named_by_a_router_that_starts_alone(redis_url, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(redis.Redis, "info", says(redis_version="5.0.14", role="master"))
    config = RouterConfig(model=checkpoint("llama"), redis_url=redis_url, secret="s")
    serve.check_start(config, None, redis_rights(config))
    said = " ".join(capsys.readouterr().out.split())
    assert "is Redis 5.0.14, master: Redis 6.2 or later, or Valkey, is needed; starting anyway" in said


@pytest.mark.parametrize(
    "info", [{}, {"redis_version": "6.2-rc1"}, {"redis_version": "unstable", "role": "master"}]
)
def test_an_info_of_another_form_is_no_reason(info, redis_url, monkeypatch):
    monkeypatch.setattr(redis.Redis, "info", says(**info))
    assert ask_why_unusable(redis_url) == ""


def test_a_redis_that_answers_is_not_reported(redis_url):
    assert why_silent(redis_url) == ""


@pytest.fixture
def own_redis(tmp_path) -> Iterator[EmbeddedRedis]:
    """One whose settings a test changes."""
    server = EmbeddedRedis.start(tmp_path / "redis")
    yield server
    server.stop()


def command(server: EmbeddedRedis, *words: str) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command(*words)


def refused_start(model: Path, url: str) -> str:
    cluster, error = failed_start(model, redis_url=url)
    cluster.stop()
    assert error.field == "redis_url"
    return error.message


def test_a_redis_that_takes_no_writes_is_refused_before_workers_wait_for_it(own_redis, checkpoint):
    command(own_redis, "REPLICAOF", "127.0.0.1", "1")
    said = refused_start(checkpoint("llama"), own_redis.url)
    assert "slave: it takes no writes: name the master" in said and "logs" not in said


def test_a_login_that_redis_refuses_is_not_taken_for_silence(own_redis, checkpoint):
    command(own_redis, "CONFIG", "SET", "requirepass", "p4ssw0rd")
    said = refused_start(checkpoint("llama"), own_redis.url)
    assert "refuses the login (it requires a password): write redis://USER:PASSWORD@host" in said
    said = refused_start(checkpoint("llama"), own_redis.url.replace("unix://", "unix://:wr0ng@"))
    assert "refuses the login (invalid username-password pair" in said and "wr0ng" not in said


def test_what_answers_and_is_no_redis_is_named_as_such():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:

        def serve(answer: bytes) -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        port = server.getsockname()[1]
        served = threads.submit(serve, b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert "is no Redis (" in why_silent(f"redis://127.0.0.1:{port}")
        served.result(10)
        served = threads.submit(serve, b"")
        assert "; with TLS write rediss://)" in why_silent(f"redis://127.0.0.1:{port}")
        served.result(10)
    assert "rediss://" not in why_silent(f"redis://127.0.0.1:{port}"), "nothing listens"


def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path):
    with pytest.raises(
        SetupError, match=r"longer than the 107 bytes .* set TMPDIR to a folder with a shorter"
    ):
        EmbeddedRedis.start(tmp_path / ("x" * 100))
