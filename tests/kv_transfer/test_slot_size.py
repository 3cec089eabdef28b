"""A slot size that no hand-off could use is refused at the start, by name."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from cluster.config.worker import TransferConfig
from cluster.errors import ConfigError
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.transports.registry import Endpoints


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
