"""Link versions one apart work, in both directions; versions without a common one exclude the worker (rule 13)."""

from __future__ import annotations

import pytest

from cluster.errors import PeerLostError
from cluster.protocol import link as protocol
from cluster.protocol.link import VERSION_1_HANDLES, WINDOW_TOKENS, common_version
from router.link import opener
from router.link.connection import Connection
from tests.harness.waiting import until
from tests.router.link.conftest import end, tokens
from worker.link import session


@pytest.mark.parametrize(
    ("mine", "theirs", "common"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (1, 1), 1),
        ((1, 1), (1, 2), 1),
        ((2, 3), (1, 2), 2),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 1), 0),
        ((1, 1), (2, 3), 0),
        ((1, 1), (0, 0), 0),  # from before the link
    ],
)
def test_the_highest_version_of_both_is_used(monkeypatch, mine, theirs, common):
    monkeypatch.setattr(protocol, "MIN_LINK_VERSION", mine[0])
    monkeypatch.setattr(protocol, "LINK_VERSION", mine[1])
    assert common_version(*theirs) == common


@pytest.mark.parametrize(
    ("router", "worker", "version"), [((1, 2), (1, 1), 1), ((1, 1), (1, 2), 1), ((2, 3), (1, 2), 2)]
)
async def test_a_router_and_a_worker_one_version_apart_have_a_link(
    pair, monkeypatch, router, worker, version
):
    speak(monkeypatch, router, worker)
    welcomes = []
    greet = Connection.connection_made

    def made(connection, transport):
        connection.welcomed.add_done_callback(lambda welcomed: welcomes.append(welcomed.result().version))
        greet(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", made)
    one = pair.read()
    await pair.up()
    tokens(one.log, 0, 3)
    end(one.log)
    await until(lambda: one.end is not None, "it came")
    assert one.tokens == [[0, 1, 2]] and welcomes == [version]


@pytest.mark.parametrize(("router", "worker"), [((2, 3), (1, 1)), ((1, 1), (2, 3))])
async def test_without_a_common_version_there_is_no_link(pair, monkeypatch, router, worker):
    speak(monkeypatch, router, worker)
    one = pair.read()
    await until(lambda: one.error is not None, "it is lost")
    assert isinstance(one.error, PeerLostError) and "accepts no link version from" in str(one.error)
    assert pair.links.suspects == {pair.info.name}


def speak(monkeypatch, router: tuple[int, int], worker: tuple[int, int]) -> None:
    monkeypatch.setattr(opener, "MIN_LINK_VERSION", router[0])
    monkeypatch.setattr(opener, "LINK_VERSION", router[1])

    def common(least: int, most: int) -> int:
        version = min(most, worker[1])
        return version if version >= max(least, worker[0]) else 0

    monkeypatch.setattr(session, "common_version", common)


async def test_handles_have_64_bits(pair):
    """A router that has run for months: 32 bits are used up after 24 days at 1,000 requests/s."""
    pair.links._identity.handle_after = 2**64 - 3
    one, two = pair.read(), pair.read()
    await pair.up()
    tokens(one.log, 0, WINDOW_TOKENS + 1)
    await until(lambda: len(one.tokens[0]) == WINDOW_TOKENS, "its window")
    one.limit += 1
    one.handle.credit(0, one.limit)
    await until(lambda: len(one.tokens[0]) == WINDOW_TOKENS + 1, "credit reaches it")
    pair.cut()
    await pair.up()
    end(one.log)
    await until(lambda: one.end is not None, "its end")
    assert await two.handle.cancel(5.0)
    assert pair.worker.cancelled == [two.transfer_id] and not len(pair.worker.routers)


@pytest.mark.parametrize("worker", [1, 2])
async def test_a_router_whose_handles_need_more_bits_opens_no_link_of_version_1(pair, monkeypatch, worker):
    speak(monkeypatch, (1, 2), (1, worker))
    pair.links._identity.handle_after = VERSION_1_HANDLES + 1
    one = pair.read()
    if worker == 2:
        await pair.up()
        return
    await until(lambda: one.error is not None, "it is lost")
    assert "used up" in str(one.error)
