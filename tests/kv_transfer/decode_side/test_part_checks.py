"""Headers and Finish are checked against the reservation: a part lands in its own request's blocks, behind the held ones,
with its flow's heads; and a hand-off is complete only when every token of every layer has landed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kv_transfer.decode_side.part_ledger import MAX_PARTS_PER_ROW
from tests.harness.waiting import until
from tests.kv_transfer.pair import HEADS, LAYERS, PAGE, Decode, config, decode_side
from tests.kv_transfer.scripted_peer import ScriptedPeer

TOKENS = 5 * PAGE + 2
ALL = (0, LAYERS)
ROOMY = {"slot_bytes": 1 << 15, "ring_bytes": 1 << 19}  # a whole request fits one slot


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with decode_side(config("grpc", **ROOMY)) as side:
        yield side


@pytest.fixture
async def peer(decode: Decode) -> AsyncIterator[ScriptedPeer]:
    scripted = ScriptedPeer(decode.receiver)
    scripted.hello()
    await scripted.received("welcome")
    yield scripted
    await scripted.close()


async def ended_with(decode: Decode, peer: ScriptedPeer, transfer_id: bytes, code: str, word: str) -> None:
    aborted = await peer.received("aborted", transfer_id)
    assert aborted.error.code == code
    assert word in aborted.error.message + aborted.error.field
    await until(lambda: transfer_id in decode.engine.aborted, "its blocks are given back")
    assert transfer_id not in decode.engine.committed
    assert not peer.ended, "the pair's other hand-offs ended with it"


async def test_an_honest_hand_off_commits(decode, peer):
    transfer_id = await peer.reserve(TOKENS)
    await peer.send(transfer_id, 0, (0, 2), (0, TOKENS))
    await peer.send(transfer_id, 1, (2, 3), (0, TOKENS))
    peer.finish(transfer_id, (0, 0, 2))
    await peer.received("committed", transfer_id)
    assert decode.engine.committed == [transfer_id]
    await until(lambda: decode.all_free, "every slot free")


@pytest.mark.parametrize("tokens", [(0, TOKENS), (PAGE, TOKENS), (2 * PAGE - 1, TOKENS), (0, PAGE)])
async def test_nothing_is_written_below_the_held_tokens(decode, peer, tokens):
    """Other requests share those blocks."""
    decode.engine.held_tokens = 2 * PAGE
    decode.caches[0].fill_(7.0)
    transfer_id = await peer.reserve(TOKENS)
    await peer.send(transfer_id, 0, ALL, tokens)
    await ended_with(decode, peer, transfer_id, "TransportError", "geometry")
    assert bool((decode.caches[0] == 7.0).all()), "a held block was overwritten"


@pytest.mark.parametrize(
    ("layers", "tokens", "changed"),
    [
        (ALL, (0, TOKENS + 1), {}),  # within the last block, but beyond the tokens to be shipped
        ((1, LAYERS + 1), (0, TOKENS), {}),
        (ALL, (0, TOKENS), {"head_begin": 1, "head_end": HEADS + 1}),
        (ALL, (0, TOKENS), {"head_end": 1, "token_end": 2 * TOKENS}),
        (ALL, (0, TOKENS), {"head_end": 1, "layer_end": 2 * LAYERS}),
        (ALL, (0, TOKENS), {"token_end": TOKENS - 1}),  # more bytes than they make
        (ALL, (0, TOKENS), {"bytes": 0, "token_begin": TOKENS}),
        (ALL, (0, TOKENS), {"token_end": 2**63 + 5}),
        (ALL, (0, TOKENS), {"token_begin": 2**64 - TOKENS, "token_end": 0}),
        (ALL, (0, TOKENS), {"layer_begin": 2**32 - LAYERS, "layer_end": 0}),
    ],
)
async def test_a_header_that_leaves_its_request_is_refused(decode, peer, layers, tokens, changed):
    transfer_id = await peer.reserve(TOKENS)
    await peer.send(transfer_id, 0, layers, tokens, **changed)
    await ended_with(decode, peer, transfer_id, "TransportError", "geometry")
    assert not decode.caches[0].any()


@pytest.mark.parametrize("heads", [(0, 1), (0, 2)])
async def test_the_heads_of_a_part_are_its_flows(decode, heads):
    """Rank 1 of two may ship head 1 only."""
    peer = ScriptedPeer(decode.receiver, tensor_parallel=2)
    peer.hello()
    transfer_id = await peer.reserve(TOKENS)
    await peer.send(transfer_id, 0, ALL, (0, TOKENS), heads=(0, 1), source=0)
    await peer.verified(transfer_id, 0)
    await peer.send(transfer_id, 0, ALL, (0, TOKENS), heads=heads, source=1, value=3.0)
    await ended_with(decode, peer, transfer_id, "TransportError", "geometry")
    assert not bool((decode.caches[0] == 3.0).any())
    await peer.close()


async def test_one_layer_sent_repeatedly_does_not_complete_a_hand_off(decode, peer):
    transfer_id = await peer.reserve(TOKENS)
    for part in range(LAYERS):
        await peer.send(transfer_id, part, (0, 1), (0, TOKENS))
        await peer.verified(transfer_id, part)
    peer.finish(transfer_id, (0, 0, LAYERS))
    await ended_with(decode, peer, transfer_id, "TransportError", "Finish")
    assert decode.engine.aborted[transfer_id] == 0, "half-received blocks entered the prefix cache"


async def test_a_missing_rank_leaves_a_hand_off_incomplete(decode):
    peer = ScriptedPeer(decode.receiver, tensor_parallel=2)
    peer.hello()
    transfer_id = await peer.reserve(TOKENS)
    await peer.send(transfer_id, 0, ALL, (0, TOKENS), heads=(0, 1), source=0)
    await peer.verified(transfer_id, 0)
    peer.finish(transfer_id, (0, 0, 1))
    await ended_with(decode, peer, transfer_id, "TransportError", "Finish")
    assert decode.engine.aborted[transfer_id] == 0
    await peer.close()


@pytest.mark.parametrize(
    "flows",
    [
        [],  # nothing was shipped
        [(0, 0, 0)],
        [(0, 0, 1)],  # fewer than have landed
        [(0, 0, 2), (0, 0, 2)],
        [(0, 0, 2), (1, 0, 0)],  # there is no rank 1
        [(0, 0, 2), (0, 1, 1)],
    ],
)
async def test_a_wrong_finish_ends_the_attempt(decode, peer, flows):
    """Although every token has landed in every layer."""
    transfer_id = await peer.reserve(TOKENS)
    await peer.send(transfer_id, 0, (0, 2), (0, TOKENS))
    await peer.send(transfer_id, 1, (2, 3), (0, TOKENS))
    await peer.verified(transfer_id, 1)
    peer.finish(transfer_id, *flows)
    await ended_with(decode, peer, transfer_id, "TransportError", "Finish")
    peer.say(drained={"transfer_id": transfer_id})
    await until(lambda: decode.all_free, "every slot free")


@pytest.mark.parametrize("asked_first", [True, False])
async def test_a_part_that_finish_does_not_count_keeps_no_slot(decode, peer, asked_first):
    """A slot granted for it would never be written to, and never be free."""
    transfer_id = await peer.reserve(TOKENS)
    if asked_first:
        peer.want(transfer_id, 1, 64)
        await peer.granted(transfer_id, 1)
    else:
        peer.finish(transfer_id, (0, 0, 1))
        await until(lambda: decode.receiver._live[transfer_id].finish is not None, "Finish was read")
        peer.want(transfer_id, 1, 64)
    if asked_first:
        await peer.send(transfer_id, 0, ALL, (0, TOKENS))
        peer.finish(transfer_id, (0, 0, 1))
    await ended_with(decode, peer, transfer_id, "TransportError", "Finish")
    peer.say(drained={"transfer_id": transfer_id})
    await until(lambda: decode.all_free, "every slot free")


async def test_a_slot_for_ranks_that_share_no_heads_ends_the_attempt(decode):
    async with decode_side(config("grpc", **ROOMY), tensor_parallel=2) as two:
        peer = ScriptedPeer(two.receiver, tensor_parallel=2)
        peer.hello()
        transfer_id = await peer.reserve(TOKENS)
        peer.want(transfer_id, 0, 64, source=0, target=1)
        await ended_with(two, peer, transfer_id, "TransportError", "source_rank")
        await peer.close()


async def test_part_numbers_are_bounded(decode, peer):
    """Otherwise a peer could make the receiver keep an entry for any number of parts."""
    transfer_id = await peer.reserve(TOKENS)
    peer.want(transfer_id, MAX_PARTS_PER_ROW * LAYERS * TOKENS, 64)
    await ended_with(decode, peer, transfer_id, "TransportError", "is beyond the limit")


async def test_only_whole_blocks_stay_after_an_abort(decode, peer):
    """Two layers of everything, the third of the first two blocks and, after a gap, of the fourth."""
    transfer_id = await peer.reserve(TOKENS)
    await peer.send(transfer_id, 0, (0, 2), (0, TOKENS))
    await peer.send(transfer_id, 1, (2, 3), (0, 2 * PAGE))
    await peer.send(transfer_id, 2, (2, 3), (3 * PAGE, 4 * PAGE))
    await peer.verified(transfer_id, 2)
    peer.say(abort={"transfer_id": transfer_id, "reason": "enough"})
    await until(lambda: transfer_id in decode.engine.aborted, "aborted")
    assert decode.engine.aborted[transfer_id] == 2 * PAGE


async def test_held_tokens_stay_after_an_abort_and_need_no_parts(decode, peer):
    decode.engine.held_tokens = 2 * PAGE
    transfer_id = await peer.reserve(2 * PAGE)
    peer.finish(transfer_id)
    await peer.received("committed", transfer_id)
    other = await peer.reserve(TOKENS)
    peer.say(abort={"transfer_id": other, "reason": "enough"})
    await until(lambda: other in decode.engine.aborted, "aborted")
    assert decode.engine.aborted[other] == 2 * PAGE
