"""A slot size that no hand-off could use is refused at the start, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from cluster.config.worker import MAX_SLOT_BYTES, TransferConfig
from cluster.errors import ConfigError
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.memory import largest_part, staging_bytes
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.transports.registry import TRANSPORTS, Endpoints
from tests.kv_transfer.pair import assert_same, config, decode_side, prefill_side


@pytest.mark.parametrize("size", [4095, 4097, 33 << 20, 1 << 62])
def test_sizes_without_alignment_or_beyond_a_message_are_refused(size):
    with pytest.raises(ValidationError, match="slot_bytes"):
        TransferConfig(slot_bytes=size)


def receiver(heads: int) -> ReceiverRank:
    """Blocks of 16 tokens, 16 elements of fp32 a token and head, slots of 4,096 bytes."""
    return ReceiverRank(
        rank=0,
        kv_cache=torch.zeros(2, 2, 2, heads, 16, 16),
        kv_head_range=(0, heads),
        endpoints=Endpoints(),
        config=TransferConfig(slot_bytes=4096, ring_bytes=1 << 16, ring_max_bytes=1 << 17),
        decode_epoch=1,
    )


def test_a_slot_holds_one_layer_of_one_block():
    receiver(2).close()
    with pytest.raises(ConfigError, match="6144 bytes") as refused:
        receiver(3)
    assert refused.value.field == "transfer.slot_bytes"


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_parts_are_no_larger_than_their_transport_carries_well(transport, monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "grpc", replace(TRANSPORTS["grpc"], best_part_bytes=1536))
    sent: list[int] = []
    request = SenderRank._request_slot

    def noted(rank, transfer, part) -> None:
        sent.append(part.job.bytes)
        request(rank, transfer, part)

    monkeypatch.setattr(SenderRank, "_request_slot", noted)
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        await prefill.send(decode.ref, 23)
        assert_same(prefill, decode, 23)
    if transport == "grpc":
        assert max(sent) <= 1536
    else:
        assert max(sent) > 1536


def test_cards_have_larger_parts_unless_others_are_given():
    sizes = TransferConfig().for_gpus()
    assert (sizes.slot_bytes, sizes.part_bytes, sizes.staging_bytes) == (16 << 20, 16 << 20, 256 << 20)
    given = TransferConfig(slot_bytes=1 << 20, transport="grpc").for_gpus()
    assert (given.slot_bytes, given.part_bytes, given.transport) == (1 << 20, 1 << 20, "grpc")
    assert TransferConfig.model_validate(sizes.model_dump(mode="json")) == sizes


def test_sizes_that_were_not_given_are_not_written():
    """`baton up`, Ray and the chart's files reach a worker as text."""
    given = TransferConfig(ring_bytes=1 << 30)
    read = TransferConfig.model_validate_json(given.model_dump_json())
    assert read == given and read.for_gpus().slot_bytes == 16 << 20 and read.for_gpus().ring_bytes == 1 << 30


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ring_max_bytes": 128 << 20}, {"ring_bytes": 128 << 20, "slot_bytes": 16 << 20}),
        (
            {"ring_bytes": 32 << 20, "ring_max_bytes": 32 << 20},
            {"slot_bytes": 8 << 20, "part_bytes": 8 << 20},
        ),
        ({"staging_bytes": 16 << 20}, {"slot_bytes": 8 << 20}),
        ({"ring_bytes": 1 << 16}, {"slot_bytes": 4 << 20}),
    ],
    ids=str,
)
def test_given_sizes_bound_the_others(given, expected):
    sizes = TransferConfig(**given).for_gpus()
    assert {name: getattr(sizes, name) for name in {**given, **expected}} == {**given, **expected}
    TransferConfig.model_validate(sizes.model_dump())


@pytest.mark.parametrize("staging", [1 << 16, 64 << 20, 1 << 30])
def test_the_largest_part_fits_a_slot_and_two_fit_staging(staging):
    given = TransferConfig(staging_bytes=staging)
    assert largest_part(given) <= MAX_SLOT_BYTES and 2 * largest_part(given) <= staging_bytes(given)
