"""One placement of eight refreshes the index's nodes that it passes, and forgets slots without an owner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from cluster.index import scripts
from tests.router.placement.scripts import TTL_MS, Cluster

CHAIN = bytes(range(64))
TENDS, PASSES = 0.0, 0.125  # the random argument
SLACK_MS = 600_000  # that a busy machine may take over a test


@pytest.fixture
def cluster(redis_url: str, namespace: str) -> Iterator[Cluster]:
    with redis.Redis.from_url(redis_url) as client:
        made = Cluster(client, namespace)
        made.begin()
        yield made


def node(cluster: Cluster, kind: str) -> bytes:
    return f"{scripts.prefix(cluster.namespace, 'm')}{kind}:".encode() + CHAIN[:8]


@pytest.mark.parametrize("feeds", ["hybrid", "reported"])
def test_one_placement_of_eight_refreshes_the_time_to_live(cluster, feeds):
    cluster.place(200, chain=CHAIN)
    both = node(cluster, "n"), node(cluster, "w")
    assert all(TTL_MS - SLACK_MS < cluster.client.pttl(key) <= TTL_MS for key in both)
    for key in both:
        cluster.client.pexpire(key, 60_000)
    cluster.place(200, chain=CHAIN, random=PASSES, feeds=feeds)
    assert all(cluster.client.pttl(key) <= 60_000 for key in both)
    cluster.place(200, chain=CHAIN, random=TENDS, feeds=feeds)
    assert all(cluster.client.pttl(key) > TTL_MS - SLACK_MS for key in both)


def test_what_a_placement_adds_to_the_index_expires(cluster):
    cluster.place(200, chain=CHAIN[:32], random=PASSES)
    cluster.place(200, chain=CHAIN, random=PASSES)
    cluster.place(200, chain=CHAIN[:48] + bytes(16), random=PASSES)
    nodes = list(cluster.client.scan_iter(f"{scripts.prefix(cluster.namespace, 'm')}*"))
    assert len(nodes) == 6, "one that was split, and two beyond it"
    assert all(cluster.client.pttl(key) > TTL_MS - SLACK_MS for key in nodes)


def test_one_placement_of_eight_forgets_slots_without_an_owner(cluster):
    cluster.place(200, chain=CHAIN)
    cluster.client.hset(node(cluster, "w"), "999", b"\0" * 16)
    cluster.place(200, chain=CHAIN, random=PASSES)
    assert cluster.client.hexists(node(cluster, "w"), "999")
    cluster.place(200, chain=CHAIN, random=TENDS)
    assert not cluster.client.hexists(node(cluster, "w"), "999")
