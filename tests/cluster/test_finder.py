"""Which server a deployment's keys are at: asked of Sentinels and cluster nodes that are slow, silent, old or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cluster.errors import ConfigError
from cluster.redis import finder as module
from cluster.redis import sentinels
from cluster.redis.connect import connect, connect_async
from cluster.redis.failover import FailoverError
from cluster.redis.finder import Finder
from cluster.redis.sentinels import Master, NotFoundError
from cluster.redis.urls import Address, seeds_of
from router.placement.script_call import ScriptCall
from tests.harness.fake_redis import Answer, FakeRedis, names_master, names_owner
from tests.harness.waiting import wait_for

OK = b"+OK\r\n"
READONLY = b"-READONLY You can't write against a read only replica.\r\n"
Make = Callable[..., FakeRedis]


@pytest.fixture
def fake() -> Iterator[Make]:
    made: list[FakeRedis] = []

    def make(answer: Answer, host: str = "127.0.0.1") -> FakeRedis:
        made.append(FakeRedis(answer, host))
        return made[-1]

    yield make
    for one in made:
        one.close()


def silent(_: list[str]) -> None:
    return None


def says(answer: bytes, after: float = 0.0) -> Answer:
    def say(command: list[str]) -> bytes:
        if command[0].upper() in ("SENTINEL", "CLUSTER"):
            time.sleep(after)
            return answer
        return OK

    return say


def finder_of(*seeds: FakeRedis, kind: str = "sentinel", more: str = "") -> Finder:
    hosts = ",".join(one.address for one in seeds)
    name = "/m?" if kind == "sentinel" else "?hash_tag=ns&"
    seeds_found = seeds_of(f"redis+{kind}://{hosts}{name}protocol=2{more}")
    assert seeds_found is not None
    return Finder(seeds_found)


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
    monkeypatch.setattr(sentinels, "LOOK_SECONDS", 0.01)
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
    monkeypatch.setattr(sentinels, "LOOK_SECONDS", 1e3)
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


def test_the_thread_that_asks_sentinels_ends_with_its_last_connection(fake, monkeypatch) -> None:
    monkeypatch.setattr(sentinels, "LOOK_SECONDS", 0.02)
    before = {one for one in threading.enumerate() if one.name == "redis-master"}  # of earlier tests
    server = fake(lambda command: b"+PONG\r\n")
    sentinel = fake(says(names_master(server.port)))
    url = f"redis+sentinel://{sentinel.address}/m?protocol=2"
    clients = [connect(url), connect(url)]
    for client in clients:
        assert client.ping()
    watching = [one for one in threading.enumerate() if one.name == "redis-master" and one not in before]
    assert len(watching) == 1, "one for all connections of a process"
    while clients:
        assert watching[0].is_alive()
        clients.pop().close()
    del client
    gc.collect()
    watching[0].join(10.0)
    assert not watching[0].is_alive()


def test_a_blocking_client_leaves_a_replaced_master_that_still_answers(fake, monkeypatch) -> None:
    monkeypatch.setattr(sentinels, "LOOK_SECONDS", 0.02)
    old, new = fake(lambda command: b"+PONG\r\n"), fake(lambda command: b"+PONG\r\n")
    sentinel = fake(says(names_master(old.port)))
    with connect(f"redis+sentinel://{sentinel.address}/m?protocol=2") as client:
        assert client.ping()
        sentinel.answer = says(names_master(new.port, epoch=1))
        wait_for(lambda: client.ping() and new.connections == 1, 10, "it is at the new master")


async def test_clients_of_the_loop_leave_a_replaced_master_that_still_answers(fake, monkeypatch) -> None:
    monkeypatch.setattr(sentinels, "LOOK_SECONDS", 0.02)
    old, new = fake(answering(b":1\r\n")), fake(answering(b":2\r\n"))
    sentinel = fake(says(names_master(old.port)))
    url = f"redis+sentinel://{sentinel.address}/m?protocol=2"
    script, client = ScriptCall(url, "return 1"), connect_async(url)
    try:
        assert await script([], [], 5.0) == 1
        await client.get("x")
        sentinel.answer = says(names_master(new.port, epoch=1))
        deadline = time.monotonic() + 10
        while new.connections < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
            await script([], [], 5.0)
            await client.get("x")
        assert await script([], [], 5.0) == 2
    finally:
        await script.close()
        await client.aclose()


def test_seeds_at_ipv6_addresses(fake) -> None:
    try:
        seed = fake(says(names_master(5)), host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert finder_of(seed).find().port == 5


def test_each_server_gets_its_own_password_and_errors_show_none(fake) -> None:
    sentinel = fake(says(names_master(1)))
    hosts = f"redis+sentinel://user:of-redis@{sentinel.address}/m?protocol=2&sentinel_password=of-sentinel"
    with connect(hosts) as client, pytest.raises(redis.ConnectionError) as caught:
        client.ping()  # nothing listens on port 1
    assert sentinel.named("AUTH") == [["AUTH", "of-sentinel"]]
    refuses = fake(lambda command: b"-WRONGPASS invalid username-password pair\r\n")
    url = hosts.replace(sentinel.address, refuses.address)
    with connect(url) as client, pytest.raises(redis.RedisError) as again:
        client.ping()
    for error in (caught, again):
        assert "of-redis" not in str(error.value) and "of-sentinel" not in str(error.value)


# --- off the loop ---------------------------------------------------------------------------------------------


async def test_the_loop_runs_while_a_seed_thinks(fake) -> None:
    think = threading.Event()

    def answer(command: list[str]) -> bytes:
        think.wait(20)
        return names_master(5)

    searching = asyncio.create_task(finder_of(fake(answer)).find_async())
    await asyncio.sleep(0)
    think.set()
    assert (await searching).port == 5


async def test_searches_take_no_thread_from_others(fake) -> None:
    """The loop's own threads, which resolve names."""
    go = threading.Event()

    def answer(command: list[str]) -> bytes:
        go.wait(20)
        return names_master(5)

    finders = [finder_of(fake(answer)) for _ in range(40)]
    searches = [asyncio.create_task(finder.find_async()) for finder in finders]
    await asyncio.sleep(0)
    async with asyncio.timeout(1.0):  # a search ends later
        await asyncio.to_thread(go.set)
    assert {found.port for found in await asyncio.gather(*searches)} == {5}


async def test_a_search_outlives_its_callers_and_serves_the_next(fake) -> None:
    go = threading.Event()

    def answer(command: list[str]) -> bytes:
        go.wait(20)
        return names_master(5)

    seed = fake(answer)
    finder = finder_of(seed)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await finder.find_async()
    go.set()
    assert (await finder.find_async()).port == 5
    assert len(seed.named("SENTINEL")) == 1, "callers share a search"
    assert (await finder.find_async()).port == 5
    assert len(seed.named("SENTINEL")) == 2, "a server that was found is not believed twice"


async def test_a_search_that_nobody_awaited_is_too_old_after_a_while(fake, monkeypatch) -> None:
    seed = fake(says(names_master(5)))
    finder = finder_of(seed)
    searching = asyncio.create_task(finder.find_async())
    await asyncio.sleep(0)
    searching.cancel()
    finding = finder._finding
    assert finding is not None
    await finding
    monkeypatch.setattr(module, "FRESH_SECONDS", 0.0)
    await finder.find_async()
    assert len(seed.named("SENTINEL")) == 2


async def test_a_failed_search_is_made_again(fake) -> None:
    seed = fake(says(names_master(5, name="other")))
    finder = finder_of(seed)
    with pytest.raises(NotFoundError):
        await finder.find_async()
    seed.answer = says(names_master(5))
    assert (await finder.find_async()).port == 5


# --- connections ----------------------------------------------------------------------------------------------


def answering(first: bytes) -> Answer:
    return lambda command: first if command[0].upper().startswith("EVAL") else OK


async def test_the_pipelined_connection_asks_where_to_whenever_it_connects(fake) -> None:
    old, new = fake(answering(READONLY)), fake(answering(b":2\r\n"))
    sentinel = fake(says(names_master(old.port)))
    script = ScriptCall(f"redis+sentinel://{sentinel.address}/m?protocol=2", "return 1")
    try:
        with pytest.raises(FailoverError):
            await script([], [], 5.0)
        sentinel.answer = says(names_master(new.port, epoch=1))
        assert [await script([], [], 5.0) for _ in range(3)] == [2, 2, 2]
        assert new.connections == 1 and len(sentinel.named("SENTINEL")) == 2
    finally:
        await script.close()


async def test_a_moved_slot_is_found_in_the_same_call(fake) -> None:
    new = fake(answering(b":2\r\n"))
    old = fake(answering(b":1\r\n"))
    seed = fake(says(names_owner(old.port)))
    script = ScriptCall(f"redis+cluster://{seed.address}?hash_tag=ns&protocol=2", "return 1")
    try:
        assert await script([], [], 5.0) == 1
        old.answer = answering(f"-MOVED 9937 127.0.0.1:{new.port}\r\n".encode())
        seed.answer = says(names_owner(new.port))
        assert await script([], [], 5.0) == 2
    finally:
        await script.close()


async def test_a_slow_sentinel_delays_calls_and_fails_none_that_waits(fake) -> None:
    """The first calls end at their own deadlines; one after the search uses what it found."""
    server = fake(answering(b":2\r\n"))
    sentinel = fake(says(names_master(server.port), after=0.5))
    script = ScriptCall(f"redis+sentinel://{sentinel.address}/m?protocol=2", "return 1")
    try:
        late = 0
        while True:
            try:
                assert await script([], [], 0.2) == 2
                break
            except TimeoutError:
                late += 1
                assert late < 50
        assert late and len(sentinel.named("SENTINEL")) == 1
    finally:
        await script.close()


@pytest.mark.parametrize("tag", ["cluster", "sentinel"])
def test_a_blocking_client_asks_again_after_a_failover(fake, tag: str) -> None:
    old, new = fake(lambda command: READONLY), fake(lambda command: b"+PONG\r\n")
    seed = fake(says(names_owner(old.port) if tag == "cluster" else names_master(old.port)))
    end = "?hash_tag=ns&" if tag == "cluster" else "/m?"
    with connect(f"redis+{tag}://{seed.address}{end}protocol=2") as client:
        with pytest.raises(redis.ReadOnlyError):
            client.ping()
        client.connection_pool.disconnect()
        seed.answer = says(names_owner(new.port) if tag == "cluster" else names_master(new.port, epoch=1))
        assert client.ping()
        assert client.ping() and new.connections == 1, "a connection that is open is used"


async def test_a_client_of_the_loop_asks_again_too(fake) -> None:
    old, new = fake(lambda command: READONLY), fake(lambda command: b"+PONG\r\n")
    seed = fake(says(names_master(old.port)))
    client = connect_async(f"redis+sentinel://{seed.address}/m?protocol=2")
    try:
        with pytest.raises(redis.ReadOnlyError):
            await client.ping()
        await client.connection_pool.disconnect()
        seed.answer = says(names_master(new.port, epoch=1))
        assert await client.ping() and await client.ping() and new.connections == 1
    finally:
        await client.aclose()
