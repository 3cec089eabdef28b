"""The copies of slots in a prefix index that has a Redis of its own: claimed once, kept, left, and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from cluster.index import slot_claim, slot_keys
from cluster.index.slot_claim import SlotClaim


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def make(client: redis.Redis, namespace: str) -> Callable[[], SlotClaim]:
    now = iter(range(0, 1000, 10))
    return lambda: SlotClaim(client, namespace, clock=lambda: float(next(now)))


def owners(client: redis.Redis, namespace: str) -> dict[bytes, bytes]:
    kept: Any = client.hgetall(slot_keys.owners(namespace))
    return {slot: owner.rpartition(b":")[0] for slot, owner in kept.items()}


def test_a_slot_is_claimed_once(make, client, namespace):
    one, two = make(), make()
    assert one.claim(5, "a@1", 1) and owners(client, namespace) == {b"5": b"a@1"}
    assert not two.claim(5, "b@1", 1) and two.highest == 5
    assert two.claim(3, "b@1", 1), "a lower one that the index has not had"
    assert owners(client, namespace) == {b"5": b"a@1", b"3": b"b@1"}
    two.highest = 0
    assert one.keep() and two.keep() and one.highest == two.highest == 5


def test_the_former_slot_is_given_up_and_not_claimed_again(make, client, namespace):
    """Nodes may name it: as a slot of its former owner, which may not hold those blocks any more."""
    one = make()
    assert one.claim(1, "a@1", 1) and one.claim(2, "a@1", 1)
    assert owners(client, namespace) == {b"2": b"a@1"}
    one.release()
    assert owners(client, namespace) == {}
    assert not make().claim(1, "a@1", 1) and not make().claim(2, "b@1", 1)


def test_a_claim_whose_answer_was_lost_is_repeated(make, client, namespace, monkeypatch):
    one = make()
    assert one.claim(1, "a@1", 1)
    call = one._script
    with monkeypatch.context() as patched:
        patched.setattr(one, "_script", lambda **arguments: call(**arguments) and b"7")
        assert not one.claim(2, "a@1", 2), "the index has it, and the worker has not heard so"
    assert one.claim(2, "a@1", 2) and one.claim(2, "a@1", 2)
    assert owners(client, namespace) == {b"2": b"a@1"} and one.keep()


def test_the_same_claim_of_another_process_or_registration_is_refused(make):
    """The slot's nodes and its reports' numbers are those of the former one."""
    one = make()
    assert one.claim(1, "a@1", 1)
    assert not make().claim(1, "a@1", 1)
    assert not one.claim(1, "a@1", 2)
    assert one.keep()


@pytest.mark.parametrize("what", ["emptied", "rolled back"])
def test_a_copy_that_the_index_has_lost_is_not_kept(make, client, namespace, what):
    one = make()
    one.claim(1, "a@1", 1)
    if what == "emptied":
        client.delete(*slot_keys.all_keys(namespace))
    else:
        client.hset(slot_keys.owners(namespace), "1", "b@1:n")
    assert not one.keep()
    one.release()
    assert owners(client, namespace) == ({} if what == "emptied" else {b"1": b"b@1"})


def test_a_worker_that_was_killed_is_forgotten_and_its_slot_later_still(make, client, namespace, monkeypatch):
    for slot in range(1, 41):
        assert make().claim(slot, f"w{slot}@1", 1)
    client.hset(slot_keys.sequences(namespace), mapping={str(slot): 7 for slot in range(1, 41)})
    live = make()
    live.claim(41, "live@1", 1)
    old = dict.fromkeys(client.zrange(slot_keys.seen(namespace), 0, 39), 1.0)
    client.zadd(slot_keys.seen(namespace), old)
    for left in (24, 8, 0):
        assert live.keep()
        assert len(owners(client, namespace)) == left + 1, "some with each call"
    assert client.hlen(slot_keys.sequences(namespace)) == 0
    assert not make().claim(7, "other@1", 1)
    monkeypatch.setattr(slot_claim, "_TIMES", (300_000, 0))
    for _ in range(3):
        assert live.keep()
    assert client.zcard(slot_keys.past(namespace)) == 0
    assert make().claim(7, "other@1", 1), "no node names it any more"


def test_a_sign_of_life_is_shown_once_a_second(client, namespace):
    now = [100.0]
    one = SlotClaim(client, namespace, clock=lambda: now[0])
    assert not one.due and one.keep(), "there is nothing to keep yet"
    one.claim(1, "a@1", 1)
    assert not one.due
    client.delete(slot_keys.owners(namespace))
    assert one.keep(), "not asked"
    now[0] += slot_claim.KEEP_SECONDS
    assert one.due and not one.keep()


@pytest.mark.parametrize("answer", [5_000_000_000, -(1 << 63), b"ok", b"9" * 60, [1]])
def test_a_highest_slot_that_is_none_is_not_believed(make, client, namespace, monkeypatch, answer):
    """The registry would never assign a lower one again, and slots are packed in 32 bits."""
    one = make()
    assert one.claim(1, "a@1", 1)
    monkeypatch.setattr(one, "_script", lambda **arguments: answer)
    with pytest.raises(redis.InvalidResponse, match="a key of it was overwritten"):
        one.keep()
    assert one.highest == 0
