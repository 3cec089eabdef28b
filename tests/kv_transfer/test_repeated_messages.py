"""Every message of a hand-off repeated or late changes nothing; one that is never answered has a time limit."""

from __future__ import annotations

import pytest

from cluster.errors import PeerLostError
from cluster.faults.orders import Order, OrderedFaults
from kv_transfer.prefill_side import link, sender
from tests.harness.fault_orders import give_orders, read_injected
from tests.harness.waiting import until
from tests.kv_transfer.pair import TRANSPORTS, assert_same, config, decode_side, prefill_side

TOKENS = 200
KINDS = (
    "reserve",
    "slot_request",
    "finish",
    "drained",
    "part",
    "reserve_reply",
    "slot_grant",
    "part_result",
    "committed",
)


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ["twice", "delay"])
async def test_a_repeated_or_late_message_changes_nothing(kind, act, transport, tmp_path):
    if kind == "part" and transport == "nixl":
        transport = "grpc"  # the bytes go by no message there
    async with (
        decode_side(config(transport), faults=OrderedFaults(tmp_path, "d")) as decode,
        prefill_side(config(transport), faults=OrderedFaults(tmp_path, "p")) as prefill,
    ):
        orders = [Order(str(at), f"message.{kind}", act, at, 0.15) for at in (1, 2, 3)]
        give_orders(tmp_path, orders)
        for _ in range(3):
            await prefill.send(decode.ref, TOKENS)
            assert_same(prefill, decode, TOKENS)
        await until(lambda: len(read_injected(tmp_path)) == 3, "all three")
        assert len(decode.engine.committed) == 3
        assert not decode.engine.aborted
        await until(lambda: decode.all_free, "every slot free")
        await until(lambda: not prefill.ranks[0].staging_used_bytes, "staging free")
        assert not prefill.sender.stats.resends


@pytest.mark.parametrize("kind", ["reserve", "reserve_reply"])
async def test_a_reservation_that_is_not_answered_is_given_up(kind, transport, tmp_path, monkeypatch):
    for module in (link, sender):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    async with (
        decode_side(config(transport), faults=OrderedFaults(tmp_path, "d")) as decode,
        prefill_side(config(transport), faults=OrderedFaults(tmp_path, "p")) as prefill,
    ):
        give_orders(tmp_path, [Order("1", f"message.{kind}", "drop")])
        with pytest.raises(PeerLostError):
            await prefill.open(decode.ref, TOKENS)
        await until(lambda: decode.receiver.live == 0, "D keeps nothing")
        assert len(decode.engine.aborted) == (kind == "reserve_reply")
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
        await until(lambda: decode.all_free, "every slot free")
