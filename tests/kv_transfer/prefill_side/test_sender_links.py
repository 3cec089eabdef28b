"""How a pair's stream begins and ends at the prefill worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cluster.errors import PeerLostError, TransportError
from cluster.security.tls import Peers
from kv_transfer import messages as m
from kv_transfer.layout.compatibility import MAX_RANKS
from kv_transfer.prefill_side import link, rank_connections, sender
from kv_transfer.prefill_side.link import LinkToDecode
from tests.harness.waiting import until as until_true
from tests.kv_transfer.pair import Prefill, assert_same, config, decode_side, layout, prefill_side
from tests.kv_transfer.prefill_side.scripted_decode import scripted_decode, welcome
from wire import handoff_pb2

until = partial(until_true, seconds=15.0)

TOKENS = 16


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(sender, "LAST_NOTICES_SECONDS", 0.05)


@pytest.fixture
def long_probes(monkeypatch) -> None:
    """No probe times out before the test has answered it: on a busy machine a message may take a second."""
    monkeypatch.setattr(rank_connections, "PROBE_SECONDS", 60.0)


def only_link(prefill: Prefill) -> LinkToDecode:
    (found,) = prefill.sender._links.values()
    return found


def endpoints(memory: str) -> list[handoff_pb2.RankEndpoint]:
    return [handoff_pb2.RankEndpoint(rank=0, memory=memory)]


def noting(connected: list[m.Connect], handle: Callable[[Any], None]) -> Callable[[Any], None]:
    """A rank's `handle` that notes each Connect."""

    def noted(message: Any) -> None:
        if isinstance(message, m.Connect):
            connected.append(message)
        handle(message)

    return noted


async def test_new_memory_announced_while_nixl_is_probed_changes_nothing_else(monkeypatch, long_probes):
    """A ring grows when a peer was lost: just then others come."""
    connected: list[m.Connect] = []
    first = welcome(transport="nixl", ranks=endpoints("DRAM"))
    async with scripted_decode(welcome=first) as decode, prefill_side(config("auto")) as prefill:
        monkeypatch.setattr(prefill.ranks[0], "handle", noting(connected, prefill.ranks[0].handle))
        opening = asyncio.create_task(prefill.open(decode.ref, TOKENS))
        await until(lambda: bool(connected), "it is probed")
        (stream,) = decode.streams
        stream.say(welcome=welcome(transport="nixl", ranks=endpoints("VRAM")))
        await until(lambda: len(connected) == 2, "it has the new memory")
        stream.say(probe_result=handoff_pb2.ProbeResult(arrived=True))
        handoff = await opening
        one = only_link(prefill)
        await until(lambda: all(task.done() for task in one._tasks[1:]), "no probe is waited for")
        assert one.agreement.transport == "nixl" and not one.lost
        assert [bool(message.nonce) for message in connected] == [True, False]
        assert connected[-1].ranks[0].memory == "VRAM"
        await handoff.abort("enough")


async def test_a_worker_that_is_named_at_another_address_takes_no_hand_off_of_the_real_one():
    """Without TLS any client of a prefill worker's port can name decode workers, each at any address."""
    async with (
        scripted_decode() as false,
        scripted_decode(acknowledges=True) as real,
        prefill_side(config("grpc")) as prefill,
    ):
        assert false.ref.worker_id == real.ref.worker_id and false.ref.epoch == real.ref.epoch
        given_up = await prefill.open(real.ref, TOKENS)
        real.acknowledges = False
        await given_up.abort("enough")
        await until(lambda: given_up.transfer_id in set(real.drained()), "waits to be acknowledged")
        taken = await prefill.open(false.ref, TOKENS)
        handoff = await prefill.open(real.ref, TOKENS)
        assert (taken.link.decode, handoff.link.decode) == (false.ref, real.ref)
        assert len(false.streams[0].of("reserve")) == 1 and len(real.streams[0].of("reserve")) == 2
        assert taken.link.key != handoff.link.key, "the ranks write to one of them each"
        assert not false.streams[0].of("drained")
        false.acknowledge(false.streams[0], given_up.transfer_id)
        await taken.abort("enough")
        await until(lambda: taken.transfer_id in set(false.drained()), "the false one has its own")
        notices = prefill.sender.notices
        assert given_up.transfer_id in notices._waiting[rank_connections.worker_key(real.ref)]
        await handoff.abort("enough")


@pytest.mark.parametrize("name", ["other#2/0", "decod#2/0", "decode", "decode2#2/0"])
async def test_a_welcome_that_names_another_workers_agent_ends_the_link(name):
    ranks = [handoff_pb2.RankEndpoint(rank=0, agent_name=name, agent_metadata=b"x")]
    false = welcome(transport="nixl", ranks=ranks)
    async with scripted_decode(welcome=false) as decode, prefill_side(config("nixl")) as prefill:
        with pytest.raises(TransportError) as caught:
            await prefill.sender.open(decode.ref)
        assert caught.value.field == "ranks.agent_name"


async def test_a_repeated_welcome_that_names_other_agents_ends_the_link(monkeypatch, long_probes):
    """Each would be connected to, and only the last ones would be disconnected with the link."""
    connected: list[m.Connect] = []
    first = welcome(transport="nixl", ranks=endpoints("DRAM"))
    async with scripted_decode(welcome=first) as decode, prefill_side(config("nixl")) as prefill:
        monkeypatch.setattr(prefill.ranks[0], "handle", connected.append)
        opening = asyncio.create_task(prefill.sender.open(decode.ref))
        await until(lambda: any(isinstance(one, m.Connect) for one in connected), "it is probed")
        other = handoff_pb2.RankEndpoint(rank=0, agent_name="another's", agent_metadata=b"x")
        decode.streams[0].say(welcome=welcome(transport="nixl", ranks=[other]))
        with pytest.raises(TransportError) as caught:
            async with asyncio.timeout(10):
                await opening
        assert caught.value.field == "ranks"
        connects = [one for one in connected if isinstance(one, m.Connect)]
        assert not [rank for one in connects for rank in one.ranks if rank.agent_name == "another's"]


async def test_a_probe_is_repeated_over_the_newest_memory(monkeypatch, long_probes):
    connected: list[m.Connect] = []
    first = welcome(transport="nixl", ranks=endpoints("DRAM"))
    async with scripted_decode(welcome=first) as decode, prefill_side(config("nixl")) as prefill:
        monkeypatch.setattr(prefill.ranks[0], "handle", connected.append)
        prefill.sender.known.is_reached(
            rank_connections.worker_key(decode.ref)
        )  # so a probe that fails is sent again
        opening = asyncio.create_task(prefill.sender.open(decode.ref))
        await until(lambda: bool(connected), "it is probed")
        decode.streams[0].say(welcome=welcome(transport="nixl", ranks=endpoints("VRAM")))
        await until(lambda: len(connected) == 2, "it has the new memory")
        decode.streams[0].say(probe_result=handoff_pb2.ProbeResult(arrived=False))
        await until(lambda: len(connected) == 3, "it is probed again")
        assert [message.ranks[0].memory for message in connected] == ["DRAM", "VRAM", "VRAM"]
        assert connected[-1].reconnect and connected[-1].nonce
        decode.streams[0].say(probe_result=handoff_pb2.ProbeResult(arrived=True))
        await opening


async def test_a_hand_off_that_is_aborted_in_the_message_that_accepts_it_has_ended():
    """Its prefill would compute the prompt for a decode worker that ignores it."""
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        decode.aborts = True
        with pytest.raises(PeerLostError, match="a test"):
            await prefill.open(decode.ref, TOKENS)
        one = only_link(prefill)
        assert not one.lost and not one._reservations
        assert prefill.sender.live == 0


async def test_the_call_to_a_decode_worker_that_was_stopped_ends_with_its_link(monkeypatch):
    """It answers nothing any more, and does not end the stream either."""
    for name, seconds in {"BEAT_SECONDS": 0.02, "LOST_SECONDS": 0.3, "LAST_SECONDS": 0.05}.items():
        monkeypatch.setattr(link, name, seconds)
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        one, (stream,) = only_link(prefill), decode.streams
        decode.beats = False
        await until(lambda: one.lost, "it is lost")
        await until(lambda: stream.closed, "its stream has ended")
        await until(lambda: all(task.done() for task in one._tasks), "nothing waits for it")
        with pytest.raises(PeerLostError):
            await prefill.finish(handoff, TOKENS)
        await handoff.abort("lost")


async def test_messages_queued_when_a_link_ends_are_still_sent(monkeypatch):
    for name, seconds in {"BEAT_SECONDS": 0.02, "LINGER_SECONDS": 0.05}.items():
        monkeypatch.setattr(link, name, seconds)
    async with scripted_decode(acknowledges=True) as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        one, (stream,) = only_link(prefill), decode.streams
        lose = one._lose

        def with_last_words(error: PeerLostError) -> None:
            for _ in range(400):  # more than one message carries
                abort = handoff_pb2.AbortHandoff(transfer_id=bytes(16), reason="last")
                one.send(handoff_pb2.PrefillToDecode(abort=abort))
            lose(error)

        monkeypatch.setattr(one, "_lose", with_last_words)
        await handoff.abort("enough")
        await until(lambda: one.lost, "it is idle")
        await until(lambda: len(stream.of("abort")) == 401, "all of it is said")


async def test_a_welcome_on_an_abandoned_link_connects_no_peer(monkeypatch):
    connected: list[m.Connect] = []
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        await handoff.abort("enough")
        one = only_link(prefill)
        one._lose(PeerLostError("given up"))
        monkeypatch.setattr(prefill.ranks[0], "handle", connected.append)
        one._on_reply(handoff_pb2.DecodeToPrefill(welcome=welcome()))
        assert not connected, "its ranks would never be let go"


def ranks_of(number: int) -> list[handoff_pb2.RankEndpoint]:
    return [handoff_pb2.RankEndpoint(rank=rank) for rank in range(number)]


@pytest.mark.parametrize(
    ("layout_", "number"), [(layout(1), 2), (layout(MAX_RANKS + 1), MAX_RANKS + 1), (layout(2**32 - 1), 5000)]
)
async def test_a_welcome_with_more_ranks_than_its_layout_can_have_ends_the_link(monkeypatch, layout_, number):
    connected: list[m.Connect] = []
    many = welcome(layout=layout_, ranks=ranks_of(number))
    async with scripted_decode(welcome=many) as decode, prefill_side(config("grpc")) as prefill:
        monkeypatch.setattr(prefill.ranks[0], "handle", noting(connected, prefill.ranks[0].handle))
        with pytest.raises(TransportError) as caught:
            await prefill.open(decode.ref, TOKENS)
        assert caught.value.field == "ranks"
        await until(lambda: not prefill.sender._links, "it is lost")
        assert not connected


async def test_a_repeated_welcome_with_more_ranks_than_agreed_ends_the_link(monkeypatch):
    """Also if its layout could have them."""
    connected: list[m.Connect] = []
    first = welcome(layout=layout(2), ranks=ranks_of(2))
    async with scripted_decode(welcome=first) as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        one, (stream,) = only_link(prefill), decode.streams
        monkeypatch.setattr(prefill.ranks[0], "handle", noting(connected, prefill.ranks[0].handle))
        stream.say(welcome=welcome(layout=layout(2), ranks=ranks_of(2)))
        await until(lambda: len(connected) == 1, "it has the new memory")
        stream.say(welcome=welcome(layout=layout(4), ranks=ranks_of(3)))
        await until(lambda: one.lost, "it is lost")
        assert len(connected) == 1
        with pytest.raises(TransportError) as caught:
            await prefill.finish(handoff, TOKENS)
        assert caught.value.field == "ranks"
        await handoff.abort("lost")


async def test_a_link_that_is_lost_just_behind_a_yes_ends_the_hand_off(monkeypatch):
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        first = await prefill.open(decode.ref, TOKENS)
        one = only_link(prefill)
        on_reply = one._on_reply

        def then_lost(reply: handoff_pb2.DecodeToPrefill) -> None:
            on_reply(reply)
            if reply.HasField("reserve_reply"):
                one._lose(PeerLostError("gone"))

        monkeypatch.setattr(one._stream, "on_message", then_lost)
        with pytest.raises(PeerLostError):
            await prefill.open(decode.ref, TOKENS)
        await first.abort("enough")
        await until(lambda: prefill.sender.live == 0, "nothing is left of either")


async def test_certificates_that_change_open_another_link_between_two_hand_offs(monkeypatch):
    """A pair that is never idle for long would keep the connection that the old ones opened."""
    monkeypatch.setattr(link, "BEAT_SECONDS", 0.02)
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        version = 1
        monkeypatch.setattr(Peers, "version", property(lambda peers: version))
        handoff = await prefill.open(decode.ref, TOKENS)
        one = only_link(prefill)
        version = 2
        await asyncio.sleep(0.1)
        assert not one.lost, "a hand-off lives"
        await handoff.abort("enough")
        await until(lambda: one.lost, "it is closed")
        await prefill.sender.open(decode.ref)
        two = only_link(prefill)
        monkeypatch.setattr(link, "MAX_AGE_SECONDS", 0.1)
        await until(lambda: two.lost, "it was old")


@pytest.fixture
def certificates(monkeypatch) -> Callable[[], None]:
    """Changes them."""
    version = 1
    monkeypatch.setattr(link, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(Peers, "version", property(lambda peers: version))

    def change() -> None:
        nonlocal version
        version += 1

    return change


async def test_a_pair_that_is_never_idle_moves_to_another_link(certificates, monkeypatch):
    """Its hand-offs overlap: the next one goes over a new link, and the old link ends with its last hand-off."""
    said: list[Any] = []
    async with scripted_decode(acknowledges=True) as decode, prefill_side(config("grpc")) as prefill:
        handle = prefill.ranks[0].handle

        def noted(message: Any) -> None:
            said.append(message)
            handle(message)

        monkeypatch.setattr(prefill.ranks[0], "handle", noted)
        first = await prefill.open(decode.ref, TOKENS)
        old = only_link(prefill)
        certificates()
        second = await prefill.open(decode.ref, TOKENS)
        new = only_link(prefill)
        assert new is not old and (first.link, second.link) == (old, new)
        assert [len(stream.of("reserve")) for stream in decode.streams] == [1, 1]
        assert prefill.sender.links_by_transport()["grpc"] == 2
        await asyncio.sleep(0.1)
        assert not old.lost, "a hand-off lives"
        await first.abort("enough")
        await until(lambda: old.lost, "its last hand-off has ended")
        # What was sent before the link ended may still be on its way.
        await until(
            lambda: first.transfer_id in [one.transfer_id for one in decode.streams[0].of("drained")],
            "its drain notice has come over its own link",
        )
        assert not new.lost and only_link(prefill) is new
        assert not [one for one in said if isinstance(one, m.Disconnect)], "the second one still writes"
        await second.abort("enough")
        certificates()
        await until(lambda: new.lost, "it is idle, and outdated")
        assert [one for one in said if isinstance(one, m.Disconnect)]


async def test_a_link_that_was_replaced_ends_with_its_hand_offs_after_a_while(certificates, monkeypatch):
    for name, seconds in {"MOVE_SECONDS": 0.1, "LAST_SECONDS": 0.05}.items():
        monkeypatch.setattr(link, name, seconds)
    async with scripted_decode(acknowledges=True) as decode, prefill_side(config("grpc")) as prefill:
        first = await prefill.open(decode.ref, TOKENS)
        certificates()
        second = await prefill.open(decode.ref, TOKENS)
        with pytest.raises(PeerLostError, match="another link"):
            await prefill.finish(first, TOKENS)
        await first.abort("lost")
        assert not second.link.lost
        await until(lambda: decode.streams[0].closed, "its connection is closed")
        await second.abort("enough")


@pytest.mark.parametrize("transport", ["grpc", "nixl"])
async def test_hand_offs_arrive_over_the_old_link_and_the_new_one(certificates, transport):
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        first = await prefill.open(decode.ref, TOKENS)
        certificates()
        second = await prefill.open(decode.ref, TOKENS)
        assert first.link is not second.link
        assert (await prefill.finish(first, TOKENS)).transport == transport
        await until(lambda: first.link.lost, "it is closed")
        assert (await prefill.finish(second, TOKENS)).transport == transport
        assert_same(prefill, decode, TOKENS)
        await until(lambda: decode.all_free, "no slot stays in doubt")
