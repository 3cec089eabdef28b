"""The digests of a pair's parts are agreed in Hello; the receiver's own setting is a minimum."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kv_transfer.layout.digest import SUM64, XXH3_128, Digests
from tests.kv_transfer.pair import LAYERS, PAGE, Decode, config, decode_side
from tests.kv_transfer.scripted_peer import ScriptedPeer

TOKENS = 2 * PAGE
ALL = (0, LAYERS)


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with decode_side(config("grpc")) as side:
        yield side


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        ("all", "off", "all"),
        ("off", "all", "all"),
        ("sample", "off", "sample"),
        ("off", "sample", "sample"),
        ("sample", "all", "all"),
        ("off", "off", "off"),
    ],
)
async def test_the_stricter_setting_is_the_pairs(ours, theirs, agreed):
    async with decode_side(config("grpc", digests=ours)) as decode:
        one = ScriptedPeer(decode.receiver)
        one.hello(digests=theirs, digest_kinds=["crc32", SUM64, XXH3_128])
        welcome = await one.received("welcome")
        assert (welcome.digests, welcome.digest_kind) == (agreed, SUM64)
        await one.close()


async def test_a_pair_without_digests_needs_no_common_kind():
    async with decode_side(config("grpc", digests="off")) as decode:
        one = ScriptedPeer(decode.receiver)
        one.hello(digests="off", digest_kinds=[])
        welcome = await one.received("welcome")
        assert (welcome.digests, welcome.digest_kind) == ("off", "")
        transfer_id = await one.reserve(TOKENS)
        await one.send(transfer_id, 0, ALL, (0, TOKENS), kind="")
        await one.verified(transfer_id, 0)
        await one.close()


@pytest.mark.parametrize("said", ["all", "off"])
@pytest.mark.parametrize("kind", ["", SUM64, "crc32"])
async def test_a_part_without_the_agreed_digest_ends_its_attempt(decode, said, kind):
    """The receiver's own setting is a minimum, for any setting of the sender."""
    one = ScriptedPeer(decode.receiver)
    one.hello(digests=said)
    transfer_id = await one.reserve(TOKENS)
    good = kind if kind != "crc32" else ""
    await one.send(transfer_id, 0, ALL, (0, TOKENS), kind=good, digest_kind=kind)
    aborted = await one.received("aborted", transfer_id)
    assert aborted.error.code == "TransportError" and aborted.error.field == "digests"
    assert not decode.caches[0].any(), "it was scattered all the same"
    await one.close()


async def test_a_sum_of_a_peer_on_another_device_is_verified(decode):
    one = ScriptedPeer(decode.receiver)
    one.hello(digest_kinds=[SUM64])
    transfer_id = await one.reserve(TOKENS)
    await one.send(transfer_id, 0, ALL, (0, TOKENS), kind=SUM64)
    await one.verified(transfer_id, 0)
    corrupted = await one.reserve(TOKENS)
    await one.send(corrupted, 0, ALL, (0, TOKENS), kind=SUM64, digest=bytes(16))
    result = await one.received("part_result", corrupted)
    assert not result.verified
    await one.close()


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_sampled_part_must_carry_its_digest(wanted):
    """Transfer id and part determine which parts are sampled; the others need no digest."""
    rule = Digests("sample", 0.5, XXH3_128)
    async with decode_side(config("grpc", digests="sample", digest_sample_share=0.5)) as decode:
        one = ScriptedPeer(decode.receiver)
        one.hello(digests="sample")
        transfer_id = next(
            name
            for name in (bytes([i]) * 16 for i in range(256))
            if bool(rule.kind_of(name, 0, 0, 0)) is wanted
        )
        await one.reserve(TOKENS, transfer_id)
        await one.send(transfer_id, 0, ALL, (0, TOKENS), kind="")
        if wanted:
            aborted = await one.received("aborted", transfer_id)
            assert aborted.error.field == "digests" and "digest_sample_share" in aborted.error.message
        else:
            await one.verified(transfer_id, 0)
        await one.close()
