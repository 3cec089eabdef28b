"""A Redis with authentication: a user with a password and access to our keys only; the password is never shown."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import httpx
import pytest
import redis

from baton.client import Client
from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig
from cluster.redis.connect import connect
from cluster.redis.embedded import EmbeddedRedis
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.harness.router import run_router, stub_workers
from tests.harness.waiting import wait_for
from tests.security.conftest import NAME

PASSWORD = f"pass-{secrets.token_hex(8)}"
# What docs/security.md names for one user of all components.
RIGHTS = "+@read +@write +@scripting +@connection +time -@dangerous +info"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """The URL of a server whose default user is off and whose user `baton` may touch keys of {test-…} only."""
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("guarded"))
    with redis.Redis.from_url(server.url) as admin:
        for pattern in ("{test-*", "{baton-*"):
            admin.execute_command(
                "ACL", "SETUSER", "baton", "on", f">{PASSWORD}", f"~{pattern}", *RIGHTS.split()
            )
        admin.execute_command("ACL", "SETUSER", "default", "off")
    yield server.url.replace("unix://", f"unix://baton:{PASSWORD}@")
    server.stop()


def test_the_user_may_touch_our_keys_only(guarded):
    with connect(guarded) as client:
        client.set("{test-x}:a", 1)
        for forbidden in (("SET", "other", 1), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*forbidden)
    with connect(guarded.replace(PASSWORD, "wrong")) as client, pytest.raises(redis.RedisError) as caught:
        client.ping()
    assert PASSWORD not in str(caught.value)


def test_a_router_places_with_it_and_does_not_show_the_password(guarded, checkpoint, tmp_path):
    namespace = f"test-{secrets.token_hex(4)}"
    config = {
        "model": str(checkpoint("llama")),
        "served_model_name": NAME,
        "redis_url": guarded,
        "namespace": namespace,
    }
    with stub_workers(guarded, namespace), run_router(tmp_path, config) as router:
        wait_for(lambda: httpx.get(f"{router.http}/ready").status_code == 200, 60, "ready")
        with Client(router.grpc) as client:
            said = client.generate("abc", max_tokens=3, explain=True)
        assert said.explanation is not None
        assert json.loads(said.explanation)[0]["from_redis"] is True
        known = "baton_redis_evicts_index_only 1.0"
        wait_for(lambda: known in httpx.get(f"{router.http}/metrics").text, 30, "it may ask for that too")
        view = httpx.get(f"{router.http}/v1/cluster").text
        assert json.loads(view)["redis"] == {"ok": True}
        assert PASSWORD not in view + router.log.read_text()


def test_a_wrong_password_is_reported_without_showing_it(guarded, checkpoint, tmp_path):
    wrong = f"wrong-{secrets.token_hex(4)}"
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": guarded.replace(PASSWORD, wrong),
        "namespace": "test-x",
    }
    with run_router(tmp_path, config) as router:
        view = httpx.get(f"{router.http}/v1/cluster").text
        assert json.loads(view)["redis"] == {"ok": False}
        assert httpx.post(f"{router.http}/v1/completions", json={"prompt": "a"}).status_code == 503
        text = router.log.read_text()
        assert wrong not in text + view


@pytest.mark.long
def test_a_whole_cluster_with_a_password(guarded, checkpoint, tmp_path):
    with run_cluster(tmp_path, checkpoint("llama"), "--redis-url", guarded, *PROCESS) as cluster:
        with Client(cluster.grpc) as client:
            prompt = "a prompt that is long enough for a block or two of the prefix cache"
            client.generate(prompt, max_tokens=2)
            said = client.generate(prompt, max_tokens=2)
        assert said.usage is not None and said.usage.cached_tokens > 0
        shown = json.dumps(cluster.state) + httpx.get(f"{cluster.http}/v1/cluster").text
        directories = (tmp_path, Path(cluster.state["logs"]))
        logs = "".join(file.read_text() for directory in directories for file in directory.glob("*.log"))
        assert PASSWORD not in shown + logs


def test_configurations_are_shown_without_secrets():
    router = RouterConfig(model="m", redis_url="redis://:p4ss@h", secret="s3cret")
    worker = WorkerConfig(role="decode", engine={"model": "m"}, redis_url="redis://:p4ss@h", secret="s3cret")
    for config in (router, worker):
        assert "p4ss" not in repr(config) + str(config)
        assert "s3cret" not in repr(config) + str(config)
