"""Which server a deployment's keys are at: asked of Sentinels and cluster nodes that are slow, silent, old or wrong."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cluster.errors import ConfigError
from cluster.redis import finder as module
from cluster.redis import sentinels
from cluster.redis.finder import Finder
from cluster.redis.sentinels import Master, NotFoundError
from cluster.redis.urls import Address, seeds_of
from tests.cluster.redis.finders import OK, finder_of, says
from tests.harness.fake_redis import names_master, names_owner
from tests.harness.waiting import wait_for


def silent(_: list[str]) -> None:
    return None


def test_the_master_that_a_sentinel_names(fake) -> None:
    assert finder_of(fake(says(names_master(5)))).find() == Address("127.0.0.1", 5)


@pytest.mark.parametrize("flags", ["master,s_down", "master,o_down", "slave"])
def test_a_master_that_is_held_for_dead_is_none(fake, flags: str) -> None:
    with pytest.raises(NotFoundError, match="no live master"):
        finder_of(fake(says(names_master(5, flags=flags)))).find()


def test_a_sentinel_of_another_master_is_no_help(fake) -> None:
    with pytest.raises(NotFoundError, match="no live master"):
        finder_of(fake(says(names_master(5, name="other")))).find()


@pytest.mark.parametrize(
    "odd", [OK, b":1\r\n", b"*1\r\n:1\r\n", b"*1\r\n*2\r\n" + b"$4\r\nname\r\n$1\r\nm\r\n"]
)
def test_an_answer_that_is_no_sentinels_ends_nothing(fake, monkeypatch, odd: bytes) -> None:
    """The next Sentinel is asked, and the master is followed on."""
    monkeypatch.setattr(sentinels, "POLL_SECONDS", 0.01)
    wrong, right = fake(says(odd)), fake(says(names_master(5)))
    finder = finder_of(wrong, right)
    assert [finder.find() for _ in range(2)] == [Address("127.0.0.1", 5)] * 2
    found = finder._sentinels
    assert found is not None and found._thread is not None
    asked = len(wrong.asked)
    wait_for(lambda: len(wrong.asked) > asked + 2, 2.0, "it is asked again")
    assert found._thread.is_alive()


def test_a_sentinel_that_sends_a_byte_at_a_time_is_given_up(fake) -> None:
    """Else the thread that follows the master would ask no other one. No read of this answer takes long."""
    slow = fake(says(names_master(5, epoch=1)))
    slow.pause = 0.03
    options = {"socket_timeout": 0.1, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
    connection = sentinels._SentinelConnection(Address("127.0.0.1", slow.port), options)
    with contextlib.closing(connection):
        with pytest.raises(redis.RedisError):
            connection.master("m")
        slow.pause = 0.0
        assert connection.master("m") == Master(Address("127.0.0.1", 5), 1), "it can be asked again"


def test_a_node_that_sends_a_byte_at_a_time_is_given_up(fake, monkeypatch) -> None:
    """Its thread would be waited for at the end of the process."""
    monkeypatch.setattr(module, "ASK_SECONDS", 0.05)
    slow = fake(says(names_owner(7)))
    slow.pause = 0.02
    finder, began = finder_of(slow, kind="cluster"), time.monotonic()
    with pytest.raises(NotFoundError, match="CLUSTER SLOTS failed"):
        finder._ask_node(Address("127.0.0.1", slow.port))
    assert time.monotonic() - began < 1.0, "the whole answer takes 1.4 s"
    slow.pause = 0.0
    monkeypatch.undo()  # a busy machine answers later
    assert finder_of(slow, kind="cluster").find().port == 7


@pytest.mark.parametrize(
    "odd",
    [
        OK, b":1\r\n", b"*1\r\n:1\r\n", b"*-1\r\n", b"*1\r\n*3\r\n:0\r\n:16383\r\n:1\r\n", names_owner(0),
        names_owner(70_000), names_owner(7, host="a\0b"),
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n" + b"$1\r\nh\r\n$1\r\nx\r\n",
    ],
)  # fmt: skip
def test_an_answer_that_is_no_nodes_is_none(fake, odd: bytes) -> None:
    """The next node is asked."""
    wrong, right = fake(says(odd)), fake(says(names_owner(7)))
    with pytest.raises(NotFoundError, match="its answer is malformed"):
        finder_of(wrong, kind="cluster").find()
    assert finder_of(wrong, right, kind="cluster").find().port == 7


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_an_unknown_option_of_the_url_is_refused(fake, kind: str) -> None:
    """It raised TypeError in the threads that ask."""
    with pytest.raises(ConfigError, match="has an option that Redis clients do not know"):
        finder_of(fake(silent), kind=kind, more="&unknown=1")


def test_a_range_beyond_the_slots_takes_no_memory(fake) -> None:
    assert finder_of(fake(says(names_owner(7, last=10**9))), kind="cluster").find().port == 7


def test_the_node_of_the_slot(fake) -> None:
    assert finder_of(fake(says(names_owner(7))), kind="cluster").find() == Address("127.0.0.1", 7)


def test_a_node_without_an_address_of_its_own_is_the_one_asked(fake) -> None:
    node = fake(says(names_owner(7, host="")))
    assert finder_of(node, kind="cluster").find() == Address("127.0.0.1", 7)


def test_a_slot_that_no_node_serves(fake) -> None:
    slot = 9937  # CRC16 of "ns" modulo 16384
    below = fake(says(names_owner(7, last=slot - 1)))
    with pytest.raises(NotFoundError, match="no node serves the slot"):
        finder_of(below, kind="cluster").find()
    exact = fake(says(names_owner(8, first=slot, last=slot)))
    assert finder_of(exact, kind="cluster").find().port == 8


def test_a_server_that_is_no_cluster(fake) -> None:
    refuses = fake(says(b"-ERR This instance has cluster support disabled\r\n"))
    with pytest.raises(NotFoundError, match="CLUSTER SLOTS failed"):
        finder_of(refuses, kind="cluster").find()


def test_a_cluster_without_a_hash_tag_is_refused() -> None:
    seeds = seeds_of("redis+cluster://h:1")
    assert seeds is not None
    with pytest.raises(ConfigError, match="hash_tag"):
        Finder(seeds)


@pytest.mark.parametrize(("kind", "answer"), [("sentinel", names_master(5)), ("cluster", names_owner(5))])
def test_a_slow_seed_is_waited_for(fake, kind: str, answer: bytes) -> None:
    slow = fake(says(answer, after=2 * module.HEAD_START_SECONDS))
    assert finder_of(slow, kind=kind).find().port == 5


def test_a_silent_seed_does_not_use_up_the_time_of_the_next(fake) -> None:
    slow = fake(says(names_master(5), after=0.8))
    assert finder_of(fake(silent), fake(silent), slow).find().port == 5


def test_silent_seeds_are_given_up(fake) -> None:
    seeds = [fake(silent) for _ in range(10)]
    began = time.monotonic()
    with pytest.raises(NotFoundError) as caught:
        finder_of(*seeds).find()
    assert time.monotonic() - began < module.FIND_SECONDS + 1.2, "a worker's lease ends later"
    assert all(seed.address in str(caught.value) for seed in seeds)


def test_a_node_with_an_old_view_does_not_answer_every_time(fake) -> None:
    finder = finder_of(fake(says(names_owner(1))), fake(says(names_owner(2))), kind="cluster")
    assert {finder.find().port for _ in range(2)} == {1, 2}


def test_a_sentinel_with_an_old_view_is_not_believed(fake) -> None:
    old, new = fake(says(names_master(1, epoch=4))), fake(says(names_master(2, epoch=5)))
    finder = finder_of(old, new)
    assert [finder.find().port for _ in range(4)] == [1, 2, 2, 2]


def test_sentinels_that_were_set_up_anew_are_believed_after_a_while(fake, monkeypatch) -> None:
    sentinel = fake(says(names_master(1, epoch=4)))
    finder = finder_of(sentinel)
    assert finder.find().port == 1
    sentinel.answer = says(names_master(2))
    assert finder.find().port == 1
    monkeypatch.setattr(sentinels, "CONFIRM_SECONDS", 0.0)
    assert finder.find().port == 2 and finder.replaced(Address("127.0.0.1", 1))


def test_a_sentinel_whose_epoch_is_wrong_is_outvoted(monkeypatch) -> None:
    """It is believed again once it agrees with the others, or once they have been away for long."""
    monkeypatch.setattr(sentinels, "POLL_SECONDS", 1e3)
    now = 0.0
    monkeypatch.setattr(sentinels, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    seeds = seeds_of("redis+sentinel://a,b,c/m")
    assert seeds is not None
    found, right, wrong = sentinels.Sentinels(seeds, {}), Address("right", 1), Address("wrong", 1)

    def round_of(of_a: Address, epoch: int) -> Address:
        nonlocal now
        for seed, answer in zip(
            seeds.addresses, [Master(of_a, epoch), Master(right, 7), Master(right, 7)], strict=True
        ):
            now += 1.0
            found.newest(seed, answer)
        return found._master.address if found._master is not None else Address("", 0)

    assert round_of(right, 7) == right
    rounds = [round_of(wrong, 1000 + number) for number in range(30)]
    assert rounds[0] == wrong, "as after a failover that only this one knows of yet"
    assert set(rounds[5:]) == {right}
    alone = []
    for number in range(15):
        now += 1.0
        alone.append(found.newest(seeds.addresses[0], Master(wrong, 1030 + number)))
    assert alone == [right] * 10 + [wrong] * 5, "a survivor that stays alone is believed in the end"
    assert [round_of(wrong, 1045 + number) for number in range(9)][5:] == [right] * 4
    assert round_of(right, 7) == right and round_of(Address("next", 1), 8) == Address("next", 1)


def test_two_sentinels_of_different_epochs_do_not_outvote_each_other(fake) -> None:
    old, new = fake(says(names_master(1, epoch=4))), fake(says(names_master(2, epoch=5)))
    finder = finder_of(old, new)
    finder.find()
    found = finder._sentinels
    assert found is not None
    found._outvoted_since = -1e9
    assert [finder.find().port for _ in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("host", "port"), [("", 5), ("a\0b", 5), ("x" * 64, 5), ("127.0.0.1", 0), ("127.0.0.1", 65536)]
)
def test_an_address_that_no_socket_takes_is_none(fake, host: str, port: int) -> None:
    with pytest.raises(NotFoundError, match="is malformed"):
        finder_of(fake(says(names_master(port, host=host)))).find()


def test_seeds_at_ipv6_addresses(fake) -> None:
    try:
        seed = fake(says(names_master(5)), host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert finder_of(seed).find().port == 5
