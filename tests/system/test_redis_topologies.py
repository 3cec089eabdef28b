"""Redis in production: Sentinels replace its master, and a cluster's slot moves, while requests run."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import redis

from baton.client import Client
from cluster.membership.reader import read_workers
from cluster.redis.connect import connect
from cluster.redis.rights import lacking
from cluster.redis.urls import with_hash_tag
from router.rights import rights
from tests.harness.redis_servers import (
    RedisCluster,
    SentinelGroup,
    client,
    run_cluster,
    run_sentinels,
)
from tests.harness.router import Router, run_router, stub_workers
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.system
BACK_SECONDS = 30.0
LEFT_SECONDS = 7.0
TOKENS = 4


def test_a_slow_master_that_was_replaced_is_left_while_it_still_answers(tmp_path) -> None:
    """Sentinels demote it ten seconds after it answers again; until then it takes writes that the new master lacks."""
    with run_sentinels(tmp_path) as group:
        old = group.master()
        with connect(group.url) as idle, client(old) as slow:
            assert idle.info("server")["tcp_port"] == old
            slow.execute_command("DEBUG", "SLEEP", 2.5)
            wait_for(lambda: group.master() != old, BACK_SECONDS, "another master")
            began = time.monotonic()
            assert slow.info("replication")["role"] == "master"
            wait_for(lambda: idle.info("server")["tcp_port"] != old, LEFT_SECONDS, "it is left")
            assert slow.info("replication")["role"] == "master", "demoted already: this shows nothing"
    print(f"a slow master: left {time.monotonic() - began:.2f} s after it was replaced")


@dataclass
class Load:
    """One request after another. `by_redis` counts those that the script in Redis has placed."""

    grpc: str
    answers: int = 0
    by_redis: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        self.wait_placed()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        with Client(self.grpc) as asks:
            while not self._stop.is_set():
                try:
                    answer = asks.generate("abc", max_tokens=TOKENS, explain=True)
                    assert len(answer.token_ids) == TOKENS
                    self.by_redis += bool(json.loads(answer.explanation)[0]["from_redis"])
                    self.answers += 1
                except Exception as error:
                    self.errors.append(repr(error))

    def wait_placed(self) -> float:
        """Wait until Redis places a request that starts from now on; returns the seconds."""
        began, answers = time.monotonic(), self.answers + 1  # the one that runs may have been placed already
        wait_for(lambda: self.answers > answers, BACK_SECONDS, "a request is answered")
        placed = self.by_redis
        wait_for(lambda: self.by_redis > placed, BACK_SECONDS, "Redis places a request")
        return time.monotonic() - began


def served(directory: Path, url: str, namespace: str, model: str) -> Iterator[tuple[Router, Load]]:
    config = {"model": model, "redis_url": url, "namespace": namespace}
    with stub_workers(url, namespace), run_router(directory, config) as router:
        wait_for(lambda: httpx.get(f"{router.http}/ready").status_code == 200, 60, "ready")
        with Load(router.grpc) as load:
            yield router, load
        assert load.errors == [], "no request fails, whatever Redis does"
        assert load.answers


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory) -> Iterator[SentinelGroup]:
    with run_sentinels(tmp_path_factory.mktemp("sentinels")) as group:
        yield group


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[RedisCluster]:
    with run_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def namespace() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def by_sentinels(sentinels, namespace, checkpoint, tmp_path) -> Iterator[tuple[Router, Load]]:
    sentinels.wait_settled()
    yield from served(tmp_path, sentinels.url, namespace, str(checkpoint("llama")))


@pytest.fixture
def by_cluster(nodes, namespace, checkpoint, tmp_path) -> Iterator[tuple[Router, Load]]:
    yield from served(tmp_path, with_hash_tag(nodes.url, namespace), namespace, str(checkpoint("llama")))


def registered_at(url: str, namespace: str) -> bool:
    workers = read_workers(url, namespace)
    return [worker.lease for worker in workers] == ["live", "live"]


def _measured(what: str, act: Callable[[], object], load: Load) -> None:
    began = time.monotonic()
    act()
    load.wait_placed()
    print(f"{what}: Redis places again after {time.monotonic() - began:.2f} s")


# --- Sentinel -----------------------------------------------------------------------------------------------


def test_a_killed_master_is_replaced(sentinels, namespace, by_sentinels) -> None:
    _, load = by_sentinels
    old = sentinels.master()
    _measured("a killed master", sentinels.servers[old].kill, load)
    assert sentinels.master() != old
    wait_for(
        lambda: registered_at(sentinels.url, namespace), BACK_SECONDS, "the workers are registered there"
    )
    sentinels.servers[old].start()


def test_a_demoted_master_is_left(sentinels, namespace, by_sentinels) -> None:
    old = sentinels.master()
    sentinels.promote()
    wait_for(lambda: sentinels.master() != old, BACK_SECONDS, "another one is the master")
    with client(sentinels.master()) as master:
        before = int(master.get(f"{{{namespace}}}:calls"))

        def places() -> bool:
            """Sentinel demotes the old one up to 10 s later; until then connections to it stay in use."""
            return int(master.get(f"{{{namespace}}}:calls")) > before

        wait_for(places, BACK_SECONDS, "the new master places")
    wait_for(
        lambda: registered_at(sentinels.url, namespace), BACK_SECONDS, "the workers are registered there"
    )


def test_a_master_that_became_read_only_by_hand(sentinels, namespace, by_sentinels) -> None:
    """No connection is closed by Redis: the answer READONLY alone tells."""
    _, load = by_sentinels
    old = sentinels.master()
    (new,) = [port for port in sentinels.servers if port != old]
    for server in sentinels.sentinels.values():
        server.stop()  # they would undo it
    try:
        with client(new) as replica, client(old) as master:
            replica.replicaof("NO", "ONE")
            master.replicaof("127.0.0.1", new)
        before = load.answers
        wait_for(lambda: load.answers > before + 20, BACK_SECONDS, "requests are answered")
    finally:
        with client(new) as replica, client(old) as master:
            master.replicaof("NO", "ONE")
            replica.replicaof("127.0.0.1", old)
        for server in sentinels.sentinels.values():
            server.start()
    load.wait_placed()
    wait_for(lambda: registered_at(sentinels.url, namespace), BACK_SECONDS, "the workers are registered")


def test_sentinels_may_all_be_away_while_the_master_lives(sentinels, namespace, by_sentinels) -> None:
    _, load = by_sentinels
    for server in sentinels.sentinels.values():
        server.kill()
    try:
        load.wait_placed()
        assert registered_at_port(sentinels, namespace)
    finally:
        for server in sentinels.sentinels.values():
            server.start()


def test_a_full_redis_serves(sentinels, namespace, by_sentinels) -> None:
    """Redis 7 with noeviction, far above its limit."""
    _, load = by_sentinels
    with client(sentinels.master()) as master:
        master.config_set("maxmemory-policy", "noeviction")
        master.config_set("maxmemory", 1 << 20)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            master.set("other", 1)
        began = dict(master.zrange(f"{{{namespace}}}:leases", 0, -1, withscores=True))
        before, placed = load.answers, load.by_redis
        wait_for(lambda: load.answers > before + 100, BACK_SECONDS, "requests are answered")
        assert load.by_redis > placed + 90, "Redis places them"

        def renewed() -> bool:
            now = dict(master.zrange(f"{{{namespace}}}:leases", 0, -1, withscores=True))
            return all(now[name] > at for name, at in began.items())

        assert len(began) == 2
        wait_for(renewed, BACK_SECONDS, "leases are renewed")  # a hundred answers may come before
        master.config_set("maxmemory", 256 << 20)
        master.config_set("maxmemory-policy", "volatile-lru")


def registered_at_port(sentinels: SentinelGroup, namespace: str) -> bool:
    """Without a Sentinel to ask."""
    counts = []
    for port in sentinels.servers:
        with client(port) as server:
            counts.append(server.hlen(f"{{{namespace}}}:members"))
    return 2 in counts


# --- Redis Cluster --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [True, False], ids=["with-its-keys", "without"])
def test_the_slot_moves_while_serving(nodes, namespace, by_cluster, keys: bool) -> None:
    _, load = by_cluster
    url = with_hash_tag(nodes.url, namespace)
    _measured("a moved slot", lambda: nodes.move_slot(namespace, keys=keys), load)
    wait_for(lambda: registered_at(url, namespace), BACK_SECONDS, "the workers are registered there")
    with client(nodes.owner(namespace)) as node:
        assert node.hlen(f"{{{namespace}}}:members") == 2
        assert int(node.get(f"{{{namespace}}}:calls")) > 0, "it is the new node that places"


def test_a_half_moved_slot_stops_no_request(nodes, namespace, by_cluster) -> None:
    """While keys are at both nodes, they answer TRYAGAIN or ASK."""
    _, load = by_cluster
    source, target = nodes.owner(namespace), nodes.others(namespace)[0]
    with client(source) as old, client(target) as new:
        slot = nodes.slot(namespace)
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", nodes.ids[source])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", nodes.ids[target])
        names = [f"{{{namespace}}}:{name}" for name in ("load", "members")]
        old.execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "REPLACE", "KEYS", *names)
        before = load.answers
        wait_for(lambda: load.answers > before + 20, BACK_SECONDS, "requests are answered")
        for node in (old, new):
            node.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
    load.wait_placed()
    wait_for(
        lambda: registered_at(with_hash_tag(nodes.url, namespace), namespace),
        BACK_SECONDS,
        "the workers are registered",
    )


def test_a_user_of_a_cluster_needs_one_right_more(nodes, namespace) -> None:
    needed = rights(namespace)
    for port in nodes.servers:
        with client(port) as node:
            node.execute_command("ACL", "SETUSER", "router", "reset", "on", ">word", *needed.rules.split())
    url = with_hash_tag(nodes.url.replace("://", "://router:word@"), namespace)
    with connect(url) as limited, pytest.raises(redis.ConnectionError, match=r"\+cluster\|slots") as caught:
        limited.ping()
    assert "word" not in str(caught.value)
    for port in nodes.servers:
        with client(port) as node:
            node.execute_command("ACL", "SETUSER", "router", "+cluster|slots")
    with connect(url) as limited:
        assert lacking(limited, needed) == []


def test_keys_of_a_namespace_share_a_slot(nodes, namespace, by_cluster) -> None:
    with connect(with_hash_tag(nodes.url, namespace)) as at_slot:
        names = [bytes(name) for name in at_slot.scan_iter(f"{{{namespace}}}*")]
        assert len(names) > 5
        assert {at_slot.execute_command("CLUSTER", "KEYSLOT", name) for name in names} == {
            nodes.slot(namespace)
        }
