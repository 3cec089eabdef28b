"""KV that a decode worker keeps in another format than it arrives in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.config.worker import WorkerConfig
from cluster.errors import ConfigError
from engine import kv_blocks
from kv_transfer.device.base import REACHED
from kv_transfer.device.cpu import CpuCopier
from kv_transfer.layout.conversion import Conversion
from kv_transfer.layout.rows import CacheRegion
from tests.kv_transfer.pair import BLOCKS, DIM, HEADS, LAYERS, PAGE, config, decode_side, prefill_side
from worker.ranks import local

TO_INT8 = Conversion(torch.float32, DIM, kv_blocks.write_part)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1)])
async def test_parts_are_converted_as_they_land(prefill_tp, decode_tp) -> None:
    """The bytes on the wire are the prefill worker's, in slots and digests too."""
    tokens, transfer = 27, config("grpc")
    async with (
        decode_side(transfer, decode_tp, conversion=TO_INT8) as decode,
        prefill_side(transfer, prefill_tp) as prefill,
    ):
        report = await prefill.send(decode.ref, tokens)
        assert report.bytes_shipped == tokens * LAYERS * 2 * HEADS * DIM * 4
        sent, here = torch.cat(prefill.caches, 3), torch.cat(decode.caches, 3)
        for number in range(-(-tokens // PAGE)):
            used = min(PAGE, tokens - number * PAGE)
            codes, scales = kv_blocks.split(here[decode.engine.block_ids[number]])
            expected = kv_blocks.quantize(sent[number, ..., :used, :])
            assert torch.equal(codes[..., :used, :], expected[0]) and torch.equal(
                scales[..., :used], expected[1]
            )
            assert not codes[..., used:, :].any() and not scales[..., used:].any()
        assert decode.all_free


def test_a_block_that_does_not_exist_is_refused() -> None:
    cache = torch.zeros(BLOCKS, LAYERS, 2, HEADS, PAGE, DIM + 2, dtype=torch.int8)
    part = torch.zeros(LAYERS * 2 * HEADS * DIM * 4, dtype=torch.uint8)
    region = CacheRegion(range(LAYERS), range(HEADS), range(1), [BLOCKS])
    with pytest.raises(IndexError, match=f"of a cache of {BLOCKS}"):
        CpuCopier(cache, TO_INT8).scatter(part, region, REACHED)


def worker(model: Path, role: str, **engine: object) -> WorkerConfig:
    return WorkerConfig.model_validate(
        {"role": role, "secret": "s", "engine": {"model": model, "dtype": "bfloat16", **engine}}
    )


@pytest.mark.parametrize(
    ("policy", "prefill", "decode"),
    [("auto", "auto", "auto"), ("int8", "int8", "int8"), ("bf16>int8", "bf16", "int8")],
)
def test_a_policy_names_the_format_of_each_role(policy, prefill, decode, checkpoint) -> None:
    for role, expected in (("prefill", prefill), ("decode", decode)):
        settings = worker(checkpoint("llama"), role, kv_dtype=policy)
        local.check(settings)
        assert local.own_engine(settings).kv_dtype == expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_policy_that_one_role_refuses_is_refused_by_both(role, checkpoint) -> None:
    with pytest.raises(ConfigError, match="computed in float32"):
        local.check(worker(checkpoint("llama"), role, kv_dtype="bf16>int8", dtype="float32"))


def test_slots_hold_a_part_as_it_arrives(checkpoint) -> None:
    """A layer of a block: 2 · 2 heads · 64 tokens · 16 numbers, 8,192 bytes in bf16 and 4,608 in int8."""
    how = {"kv_dtype": "int8", "page_size": 64}
    settings = worker(checkpoint("llama"), "decode", **how)
    small = settings.model_copy(update={"transfer": config("grpc", slot_bytes=5120)})
    local.check(small)
    mixed = {"engine": small.engine.model_copy(update={"kv_dtype": "bf16>int8"})}
    with pytest.raises(ConfigError, match="has 8192 bytes"):
        local.check(small.model_copy(update=mixed))
