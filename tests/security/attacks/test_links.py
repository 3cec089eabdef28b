"""A worker's link port: what a peer does there ends its own connection, in bounded memory and time; the honest router's
link goes on. In plain text any peer may be a router; with mutual TLS, one with a router's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.addresses import split
from cluster.link.framing import MAX_FRAME_BYTES, to_frame
from cluster.protocol.link import FRAME_ENTRIES
from cluster.security.peer_names import WORKER_NAME
from router.link.links import Links
from tests.harness.waiting import until
from tests.router.link.conftest import Reading, info
from tests.security.attacks.link_peer import Attacked, Peer, peers
from wire import link_pb2
from worker.link import connection, listener, session
from worker.link.turns import HANDSHAKES_PER_TURN

Frame = link_pb2.RouterFrame
LIMIT = 8
CROWD = 64


@pytest.fixture(params=["plain", "tls"])
async def attacked(request: pytest.FixtureRequest, certs: Path) -> AsyncIterator[Attacked]:
    made = Attacked(certs / "ours" if request.param == "tls" else None)
    await made.start()
    yield made
    await made.check_well()
    async with asyncio.timeout(20):
        await made.stop()


async def drip(peer: object, data: bytes, pause: float) -> None:
    for byte in data:
        peer.send_bytes(bytes([byte]))  # type: ignore[attr-defined]
        await asyncio.sleep(pause)


# --- greetings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"\x10", (MAX_FRAME_BYTES - 4).to_bytes(4, "little")])
async def test_silence_in_place_of_a_greeting(
    said: bytes, attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, half a length, or the length of the largest frame."""
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.6)
    async with attacked.attacker() as peer:
        peer.send_bytes(said)
        await peer.closed(5)


async def test_a_greeting_that_drips(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no greeting: the time counts from the connection."""
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.6)
    async with attacked.attacker() as peer:
        dripping = asyncio.create_task(drip(peer, to_frame(attacked.hello()), 0.2))
        await peer.closed(5)
        dripping.cancel()


async def test_a_frame_that_drips_is_no_life(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LOST_SECONDS", 1.2)  # the honest router beats
    async with attacked.attacker() as peer:
        await peer.greet()
        dripping = asyncio.create_task(drip(peer, b"\xfc\xff\x00\x00" + bytes(100), 0.2))
        await peer.closed(10)
        dripping.cancel()


async def test_a_list_of_handles_without_end(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ATTACH_SECONDS", 1.0)
    async with attacked.attacker() as peer:
        await peer.greet(attach_done=False)
        some = Frame(
            attach=[link_pb2.LinkAttach(handle=number, transfer_id=bytes(16)) for number in range(100)]
        )

        async def attach() -> None:
            while True:
                peer.send(some)
                await asyncio.sleep(0.05)

        attaching = asyncio.create_task(attach())
        await peer.closed(5)
        attaching.cancel()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        (5).to_bytes(4, "little") + b"\xff" * 5,
        to_frame(Frame(beat=True)),
        to_frame(Frame()) * 1000,
        (MAX_FRAME_BYTES - 3).to_bytes(4, "little"),
    ],
    ids=["http", "length", "no message", "no hello", "empty", "one byte too long"],
)
async def test_noise_closes_the_connection_and_leaves_one_line_at_most(
    noise: bytes, attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with attacked.attacker() as peer:
        peer.send_bytes(noise)
        await peer.closed(5)
    async with attacked.attacker() as peer:
        await peer.greet()
        if noise not in (to_frame(Frame(beat=True)), to_frame(Frame()) * 1000):
            peer.send_bytes(noise)
            await peer.closed(5)
    lines = [one.getMessage() for one in caplog.records if one.name.startswith("worker.link")]
    assert len(lines) <= 1, "one before its greeting leaves no line"


# --- what a router may do, without measure -----------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        Frame(),
        pytest.param(Frame(beat=True), marks=pytest.mark.long),
        pytest.param(Frame(cancel=range(1 << 20, (1 << 20) + 10_000)), marks=pytest.mark.long),
        pytest.param(Frame(status=range(1 << 20, (1 << 20) + 10_000)), marks=pytest.mark.long),
        pytest.param(Frame(close=range(10_000)), marks=pytest.mark.long),
        Frame(credit=[link_pb2.LinkCredit(handle=1, choice=2**32 - 1, limit=2**64 - 1)] * 2000),
    ],
    ids=["empty", "beats", "cancels", "questions", "closes", "credit"],
)
async def test_frames_faster_than_the_worker_reads(frame: Frame, attacked: Attacked) -> None:
    """And no answer is read. What waits at the worker is bounded, so the peer has to wait; others are served."""
    before = psutil.Process().memory_info().rss
    async with attacked.attacker() as peer:
        await peer.greet()
        data = to_frame(frame) * max(1, MAX_FRAME_BYTES // len(to_frame(frame)))
        flooding = asyncio.create_task(peer.flood(data, 1.0))
        while not flooding.done():
            await attacked.check_well()
            await asyncio.sleep(0.05)
        for one in attacked.listener._open:
            assert len(one._session._unread) <= session.PIECE_BYTES // 4, (
                "frames are cut as they are dispatched"
            )
            assert len(one._session._uncut) <= 1 << 20, "what one read of the socket brings"
            assert one._transport.get_write_buffer_size() <= 2 * MAX_FRAME_BYTES
    assert psutil.Process().memory_info().rss - before < 64 << 20


def frames_of_cancels(count: int) -> bytes:
    """Of numbers without attempts, as many in a frame as it may have."""
    begins = range(1 << 20, (1 << 20) + count, FRAME_ENTRIES)
    return b"".join(to_frame(Frame(cancel=range(one, one + FRAME_ENTRIES))) for one in begins)


async def test_a_router_that_does_not_read_its_answers_is_cut(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beats do not count while its questions wait for room."""
    monkeypatch.setattr(connection, "LOST_SECONDS", 1.2)
    async with attacked.attacker(buffer_bytes=8192) as peer:
        await peer.greet()
        asked = frames_of_cancels(10_000)
        flooding = asyncio.create_task(peer.flood(asked + to_frame(Frame(beat=True)), 60.0))
        await until(lambda: attacked.open == 1, "it is cut", 30)
        flooding.cancel()


async def test_a_worker_that_stops_waits_briefly_for_answers_to_be_read() -> None:
    made = Attacked(None)
    await made.start()
    async with made.attacker(buffer_bytes=8192) as peer:
        await peer.greet()
        asked = frames_of_cancels(10_000)
        flooding = asyncio.create_task(peer.flood(asked + to_frame(Frame(beat=True)), 60.0))
        link = list(made.listener._open.links)[-1]
        await until(lambda: link._transport.get_write_buffer_size() > 0, "answers wait", 30)
        async with asyncio.timeout(5):
            await made.stop()
        assert not made.open and link._transport.get_extra_info("socket").fileno() == -1
        flooding.cancel()


# --- connections -------------------------------------------------------------------------------------------


async def test_silent_connections_make_room(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them keep no router out: the oldest that is no router's link is closed for the next one."""
    monkeypatch.setattr(attacked.listener._open, "limit", LIMIT)
    host, port = split(attacked.worker.address)
    with contextlib.ExitStack() as stack:
        for _ in range(40 * LIMIT):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            with contextlib.suppress(OSError):
                await asyncio.wait_for(asyncio.get_running_loop().sock_connect(silent, (host, port)), 5)
            assert attacked.open <= LIMIT
        held = [
            one
            for one in psutil.Process().net_connections("tcp")
            if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
        ]
        assert len(held) <= LIMIT + listener.ACCEPTS_PER_TURN
        assert not attacked.listener.handshakes._running, "none of them has taken a handshake's turn"
        await check_another_router(attacked)


async def check_another_router(attacked: Attacked) -> None:
    other = Links("another", peers(attacked.certs, "router"))
    other.open(info(attacked.worker), Reading(bytes([1]) * 16))
    await until(lambda: other.up() == 1, "another router's link comes up", 10)
    await other.close()


async def linked(
    attacked: Attacked, stack: contextlib.AsyncExitStack, address: str, count: int
) -> list[Peer]:
    """So many links of one address."""
    peers = []
    for number in range(count):
        peer = await stack.enter_async_context(attacked.attacker(address=address))
        hello = attacked.hello(incarnation=number + 100)
        peer.send(hello, Frame(attach_done=link_pb2.AttachDone(next_handle=1)))
        peers.append(peer)
    return peers


async def test_links_of_one_address_keep_no_other_router_out(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be as many as there is room for, and make room for those of others."""
    monkeypatch.setattr(attacked.listener._open, "limit", LIMIT)
    async with contextlib.AsyncExitStack() as stack:
        crowd = await linked(attacked, stack, "127.0.0.2", LIMIT - 1)
        await until(lambda: len(attacked.listener._open.links) == LIMIT, "all of them are links")

        async def beat() -> None:
            while True:
                for peer in crowd:
                    peer.send(Frame(beat=True))
                await asyncio.sleep(0.5)

        beating = asyncio.create_task(beat())
        await check_another_router(attacked)
        await crowd[-1].closed(5)  # the newest
        beating.cancel()
        assert attacked.listener._open.links.count("127.0.0.2") == LIMIT - 2


@pytest.mark.parametrize("places", [1, 2])
async def test_a_flood_closes_no_opening_router_where_links_leave_few_places(
    places: int, attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links are the flooding address's own."""
    monkeypatch.setattr(attacked.listener._open, "limit", LIMIT)
    async with contextlib.AsyncExitStack() as stack:
        await linked(attacked, stack, "127.0.0.2", LIMIT - 1 - places)
        await until(lambda: len(attacked.listener._open.links) == LIMIT - places, "all of them are links")
        opening = await stack.enter_async_context(attacked.attacker(address="127.0.0.3"))
        opening.send(attacked.hello())
        assert await opening.read(), "it is welcomed"
        host, port = split(attacked.worker.address)
        flood = []
        for _ in range(LIMIT):
            reader, writer = await asyncio.open_connection(host, port, local_addr=("127.0.0.2", 0))
            stack.callback(writer.close)
            flood.append(reader)
        for reader in flood[:-1]:
            assert await asyncio.wait_for(reader.read(), 5) == b""
        opening.send(Frame(attach_done=link_pb2.AttachDone(next_handle=1)))
        await until(lambda: attacked.listener._open.links.count("127.0.0.3") == 1, "its link comes up")


async def test_a_refusal_names_neither_the_worker_nor_its_epoch() -> None:
    """Without TLS anyone may greet."""
    attacked = Attacked(None)
    await attacked.start()
    for said in ({"epoch": 0}, {"worker_id": "guessed"}, {"worker_id": "", "epoch": 0}):
        async with attacked.attacker() as peer:
            peer.send(attacked.hello(**said))
            await peer.closed(5)
            (frame,) = peer.came
            assert (frame.welcome.worker_id, frame.welcome.epoch) == ("", 0)
    await attacked.check_well()
    await attacked.stop()


async def test_links_of_routers_are_not_closed_for_others(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attacked.listener._open, "limit", 1)
    host, port = split(attacked.worker.address)
    for _ in range(20):
        reader, writer = await asyncio.open_connection(host, port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert len([one for one in caplog.records if "links of routers are refused" in one.getMessage()]) == 1


async def test_accepting_a_crowd_leaves_others_their_turns(attacked: Attacked) -> None:
    """Connections that wait to be accepted are accepted in groups: between two, everything else has a turn."""
    loop = asyncio.get_running_loop()
    host, port = split(attacked.worker.address)
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    with contextlib.ExitStack() as stack:
        for _ in range(200):  # the kernel completes them, nothing is accepted before the next await
            silent = stack.enter_context(socket.socket())
            silent.connect((host, port))
        loop.call_soon(turn)
        await until(lambda: attacked.open >= 200, "all are accepted", 10)
        assert turns >= 200 // listener.ACCEPTS_PER_TURN


async def test_handshakes_of_a_crowd_leave_others_their_turns(certs: Path) -> None:
    """All first messages have arrived before the worker reads one of them."""
    attacked = Attacked(certs / "ours")
    await attacked.start()
    context = peers(certs / "ours", "router").link_context()
    assert context is not None and attacked.listener._context is not None
    loop = asyncio.get_running_loop()
    turn = 0
    turns: list[int] = []  # of each handshake

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(next_turn)

    select = attacked.listener._context._select

    def begins(*arguments: Any) -> None:
        turns.append(turn)
        select(*arguments)

    attacked.listener._context.context.sni_callback = begins
    with contextlib.ExitStack() as stack:
        for _ in range(CROWD):
            outgoing = ssl.MemoryBIO()
            with contextlib.suppress(ssl.SSLWantReadError):
                context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=WORKER_NAME).do_handshake()
            sock = stack.enter_context(socket.create_connection(split(attacked.worker.address)))
            sock.sendall(outgoing.read())
        loop.call_soon(next_turn)
        await until(lambda: len(turns) == CROWD, "all handshakes have begun", 10)
    assert max(Counter(turns).values()) <= 2 * HANDSHAKES_PER_TURN
    await attacked.check_well()
    await attacked.stop()


async def test_older_links_of_a_router_do_not_stay(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that opens one link after another, and closes none, keeps the newest."""
    monkeypatch.setattr(connection, "MOVE_SECONDS", 1.0)
    async with contextlib.AsyncExitStack() as stack:
        for serial in range(1, 11):
            peer = await stack.enter_async_context(attacked.attacker())
            peer.send(attacked.hello(serial=serial), Frame(attach_done=link_pb2.AttachDone()))
        await until(lambda: attacked.open == 2, "the older ones are cut", 20)
