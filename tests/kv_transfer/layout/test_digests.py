"""Digest settings off, sample and all: which parts are verified, and that a sample is reproducible."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.device.cpu import CpuCopier
from kv_transfer.device.cuda import CudaCopier
from kv_transfer.layout.digest import NONE, SUM64, XXH3_128, Digests, digest, stricter
from tests.kv_transfer.pair import SLOT_BYTES, assert_same, before_verify, config, decode_side, prefill_side

TOKENS = 200
SHARE = 0.5


def chosen(digests: Digests, transfer_id: bytes, parts: int) -> set[int]:
    return {part for part in range(parts) if digests.kind_of(transfer_id, 0, 0, part) != NONE}


def test_a_sample_is_its_share_of_the_parts_and_always_the_same():
    names = [bytes([i]) * 16 for i in range(40)]
    for share in (0.05, 0.125, 0.5):
        digests = Digests("sample", share, XXH3_128)
        count = sum(len(chosen(digests, name, 100)) for name in names)
        assert abs(count / 4000 - share) < 0.03
        again = Digests("sample", share, XXH3_128)
        assert all(chosen(digests, name, 100) == chosen(again, name, 100) for name in names)
    assert chosen(Digests("all", 0.1, XXH3_128), names[0], 50) == set(range(50))
    assert not chosen(Digests("off", 0.1, XXH3_128), names[0], 50)
    assert Digests("all", 0.1, XXH3_128).kind_of(names[0], 0, 0, 0) == XXH3_128


def some_bytes(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)


@pytest.mark.parametrize("kind", [XXH3_128, SUM64])
@pytest.mark.parametrize("cut", [0, 4, 12, 30])
def test_a_digest_of_several_pieces_is_that_of_all_their_bytes(kind, cut):
    data = some_bytes(64)
    whole = digest([data], kind)
    assert digest([data[:cut], data[cut:]], kind) == whole
    for piece in (slice(0, 32), slice(32, 64)):
        other = data.clone()
        other[piece.start] ^= 1
        assert digest([other[:32], other[32:]], kind) != whole


@pytest.mark.parametrize("kind", [XXH3_128, SUM64])
def test_a_digest_detects_changed_bytes_and_swapped_words(kind):
    data = some_bytes(67)  # no whole number of words
    whole = digest([data], kind)
    for at in range(67):
        other = data.clone()
        other[at] ^= 0x80
        assert digest([other], kind) != whole, at
    moved = data.clone()
    moved[0:4], moved[8:12] = data[8:12].clone(), data[0:4].clone()
    assert digest([moved], kind) != whole


def test_sum64_is_the_sum_of_words_and_the_sum_weighted_by_place():
    words = torch.tensor([5, -2, 7], dtype=torch.int32)
    data = torch.cat([words.view(torch.uint8), torch.tensor([9], dtype=torch.uint8)])
    total, weighted = 5 - 2 + 7 + 9, 5 * 1 - 2 * 2 + 7 * 3
    assert digest([data], SUM64) == total.to_bytes(8, "little") + weighted.to_bytes(8, "little")


def test_each_device_has_its_kinds_and_the_stricter_setting_holds():
    assert CpuCopier.digest_kinds == (XXH3_128, SUM64)
    assert CudaCopier.digest_kinds == (SUM64,)
    assert [stricter("off", "sample"), stricter("all", "sample"), stricter("off", "off")] == [
        "sample",
        "all",
        "off",
    ]


@pytest.mark.parametrize("mode", ["off", "sample", "all"])
async def test_corruption_is_found_in_the_parts_that_carry_a_digest(mode):
    """Every part arrives corrupted once; only those with a digest are found and sent again."""
    transfer = config("grpc", digests=mode, digest_sample_share=SHARE, slot_bytes=SLOT_BYTES)
    async with decode_side(transfer) as decode, prefill_side(transfer) as prefill:
        seen: set[bytes] = set()

        def corrupt(data: torch.Tensor) -> None:
            content = data.numpy().tobytes()
            if content not in seen:
                seen.add(content)
                data[0] ^= 0xFF

        before_verify(decode.ranks[0], corrupt)
        handoff = await prefill.open(decode.ref, TOKENS)
        report = await prefill.finish(handoff, TOKENS)
        digests = Digests(mode, SHARE, XXH3_128)
        expected = chosen(digests, handoff.transfer_id, report.parts)
        assert report.parts > 8
        assert decode.receiver.stats.counts["part_digest"] == prefill.sender.stats.resends == len(expected)
        if mode == "all":
            assert_same(prefill, decode, TOKENS)
            assert len(expected) == report.parts
