"""Whole hand-offs between a device and main memory, over every transport: same bytes, a digest that both compute, memory
named by its device."""

from __future__ import annotations

import pytest
import torch

from kv_transfer import messages as m
from kv_transfer.decode_side import part_landing
from kv_transfer.device import sum64
from kv_transfer.layout.digest import SUM64, XXH3_128
from tests.harness.waiting import until
from tests.kv_transfer.device.fake_cuda import INDEX, FakeCuda, fake_device
from tests.kv_transfer.pair import (
    HOST,
    TRANSPORTS,
    Device,
    assert_same,
    before_verify,
    config,
    decode_side,
    prefill_side,
)

TOKENS = 90
PAIRS = ["device to host", "host to device", "device to device"]


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum64, "kernel", lambda: None)


def sides(pair: str, cuda: FakeCuda) -> tuple[Device, Device]:
    source, target = pair.split(" to ")
    return tuple(fake_device(cuda) if side == "device" else HOST for side in (source, target))  # type: ignore[return-value]


@pytest.mark.parametrize("tensor_parallel", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_hand_off_between_devices(transport, pair, tensor_parallel):
    cuda = FakeCuda()
    source, target = sides(pair, cuda)
    many, few = tensor_parallel
    async with (
        decode_side(config(transport), few, device=target) as decode,
        prefill_side(config(transport), many, device=source) as prefill,
    ):
        report = await prefill.send(decode.ref, TOKENS)
        assert report.transport == transport
        assert_same(prefill, decode, TOKENS)
        (link,) = decode.receiver.links
        assert link.agreement.digest_kind == SUM64
        assert decode.receiver.stats.counts["parts"] == report.parts > 4
        await until(lambda: decode.all_free, "every slot free")
        await until(lambda: not prefill.sender.staging_used_bytes, "staging free")
    assert not cuda.wrong, cuda.wrong


async def test_between_cpus_the_faster_digest_is_used():
    async with decode_side(config("grpc")) as decode, prefill_side(config("grpc")) as prefill:
        await prefill.send(decode.ref, TOKENS)
        (link,) = decode.receiver.links
        assert link.agreement.digest_kind == XXH3_128


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_corrupted_part_of_a_device_is_found_and_sent_again(transport, pair):
    cuda = FakeCuda()
    source, target = sides(pair, cuda)
    async with (
        decode_side(config(transport), device=target) as decode,
        prefill_side(config(transport), device=source) as prefill,
    ):
        flipped: list[int] = []

        def once(data: torch.Tensor) -> None:
            if not flipped:
                flipped.append(1)
                data[5] ^= 1

        before_verify(decode.ranks[0], once)
        await prefill.send(decode.ref, TOKENS)
        assert decode.receiver.stats.counts["part_digest"] == 1
        assert_same(prefill, decode, TOKENS)


async def test_grants_and_descriptors_name_the_device_on_which_a_slot_is_registered(monkeypatch):
    """NIXL finds no memory at another index: tried on main memory that is registered under a device's."""
    granted: list[int] = []
    expect = part_landing.Expectations.expect

    def noted(self, grant):
        granted.append(grant.device)
        expect(self, grant)

    monkeypatch.setattr(part_landing.Expectations, "expect", noted)
    cuda = FakeCuda()
    async with (
        decode_side(config("nixl"), device=fake_device(cuda)) as decode,
        prefill_side(config("nixl"), device=HOST) as prefill,
    ):
        assert decode.ranks[0].hello.device == INDEX and decode.ranks[0].hello.memory == m.DRAM
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
    assert set(granted) == {INDEX}


async def test_a_ring_on_a_device_grows():
    cuda = FakeCuda()
    transfer = config("nixl", ring_max_bytes=1 << 17)
    async with (
        decode_side(transfer, device=fake_device(cuda)) as decode,
        prefill_side(transfer, device=HOST) as prefill,
    ):
        before = cuda.allocated
        decode.ranks[0].handle(m.AddSegment(4))
        await until(lambda: len(decode.rings[0].slots) == 20, "grown")
        assert cuda.allocated - before == 4 * transfer.slot_bytes
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
    assert not cuda.wrong, cuda.wrong
