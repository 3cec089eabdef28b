"""off, sample, all: which parts are verified, and that a sample can be repeated."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.digest import NONE, XXH3_128, Digests
from tests.kv_transfer.pair import SLOT_BYTES, assert_same, config, decode_side, prefill_side

CPU = torch.device("cpu")
TOKENS = 200
SHARE = 0.5


def chosen(digests: Digests, transfer_id: bytes, parts: int) -> set[int]:
    return {part for part in range(parts) if digests.kind_of(transfer_id, 0, 0, part) != NONE}


def test_a_sample_is_its_share_of_the_parts_and_always_the_same():
    names = [bytes([i]) * 16 for i in range(40)]
    for share in (0.05, 0.125, 0.5):
        digests = Digests(CPU, "sample", share)
        count = sum(len(chosen(digests, name, 100)) for name in names)
        assert abs(count / 4000 - share) < 0.03
        again = Digests(CPU, "sample", share)
        assert all(chosen(digests, name, 100) == chosen(again, name, 100) for name in names)
    assert chosen(Digests(CPU, "all", 0.1), names[0], 50) == set(range(50))
    assert not chosen(Digests(CPU, "off", 0.1), names[0], 50)
    assert Digests(CPU, "all", 0.1).kind_of(names[0], 0, 0, 0) == XXH3_128


@pytest.mark.parametrize("mode", ["off", "sample", "all"])
async def test_corruption_is_found_in_the_parts_that_carry_a_digest(mode):
    """Every part arrives corrupted once; those that are sent again are the ones whose digests said so."""
    transfer = config("grpc", digests=mode, digest_sample_share=SHARE, slot_bytes=SLOT_BYTES)
    async with decode_side(transfer) as decode, prefill_side(transfer) as prefill:
        seen: set[bytes] = set()

        def corrupt(data: torch.Tensor) -> None:
            content = data.numpy().tobytes()
            if content not in seen:
                seen.add(content)
                data[0] ^= 0xFF

        decode.ranks[0].before_verify = corrupt
        handoff = await prefill.open(decode.ref, TOKENS)
        report = await prefill.finish(handoff, TOKENS)
        digests = Digests(CPU, mode, SHARE)
        expected = chosen(digests, handoff.transfer_id, report.parts)
        assert report.parts > 8
        assert decode.receiver.counts["part_digest"] == prefill.sender.resends == len(expected)
        if mode == "all":
            assert_same(prefill, decode, TOKENS)
            assert len(expected) == report.parts
