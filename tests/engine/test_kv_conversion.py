"""KV in bf16 that is converted to int8 as it is scattered."""

from __future__ import annotations

import math

import pytest
import torch

from engine import kv_blocks, kv_conversion
from engine.ops.cpu.conversion import write_part as write_part_by_kernel
from engine.request import EngineRequest
from kv_transfer.layout.conversion import Conversion
from tests.engine.kv_moves import PAGE, move, random
from tests.engine.rank_parts import GREEDY, NEW, compute_prompt
from tests.engine.ranks import engine_of, run, runners
from tests.harness.checkpoints import prompt_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [8, 16])
def test_a_part_is_converted_as_torch_does_it(page, dtype) -> None:
    """Of some layers and heads, cut at both ends; a row that is not finite, zeros, numbers half way between codes."""
    dim, layers, heads, tokens, offset = 24, 2, 3, 3 * page - 2, page - 3
    numbers = random(tokens * layers * 2 * heads, dim).mul_(torch.logspace(-30, 30, tokens * 12)[:, None])
    numbers[3], numbers[4, 5], numbers[5] = 0.0, -math.inf, torch.arange(dim) - 5.5
    numbers[5, 0] = 127.0
    found = []
    for write in (kv_blocks.write_part, write_part_by_kernel):
        cache = torch.full((9, 4, 2, 5, page, dim + 2), 7, dtype=torch.int8)
        write(cache[:, 1:3, :, 2:5], numbers.to(dtype).flatten(), torch.tensor([8, 0, 3, 5]), offset)
        found.append(cache)
    (codes, scales), (own_codes, own_scales) = map(kv_blocks.split, found)
    assert int(scales.isnan().sum()) == 1 and torch.equal(scales.isnan(), own_scales.isnan())
    sound = ~scales.isnan()
    assert torch.equal(codes[sound], own_codes[sound]) and torch.equal(scales[sound], own_scales[sound])
    assert kv_conversion.writer(found[0], dtype) is write_part_by_kernel


@pytest.mark.parametrize("write_part", [kv_blocks.write_part, write_part_by_kernel])
@pytest.mark.parametrize("decode_tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_kv_in_bf16_is_converted_as_it_is_scattered(decode_tp, write_part, checkpoint) -> None:
    """The blocks are, to the last bit, what rounding the prefill worker's numbers gives, and no other block is written."""
    model, prompt = checkpoint("llama"), prompt_ids(70)
    how = {"dtype": "bfloat16", "max_model_len": 256, "kv_memory_bytes": 4 << 20}
    with runners(model, 1, kv_dtype="bf16", **how) as sources:
        prefill = engine_of(sources[0])
        first = compute_prompt(prefill, prompt)
        config, blocks = sources[0].model_config, prefill.block_ids("r")
        with runners(model, decode_tp, kv_dtype="int8", **how) as targets:
            decode = engine_of(targets[0])
            reservation = decode.reserve(EngineRequest("r", prompt, GREEDY), [], growth_tokens=NEW)
            conversion = Conversion(torch.bfloat16, config.head_dim, write_part)
            for target in targets:
                target.kv_cache.fill_(7)
            moved = move(sources, blocks, targets, reservation.block_ids, len(prompt), conversion)
            for target in targets:
                own = slice(*target.kv_head_range)
                sent = sources[0].kv_cache[:, :, :, own]
                for number, (block, to) in enumerate(zip(blocks, reservation.block_ids, strict=False)):
                    used = min(PAGE, len(prompt) - number * PAGE)
                    codes, scales = kv_blocks.split(target.kv_cache[to])
                    expected = kv_blocks.quantize(sent[block])
                    assert torch.equal(codes[..., :used, :], expected[0][..., :used, :])
                    assert torch.equal(scales[..., :used], expected[1][..., :used])
                    assert bool((codes[..., used:, :] == 7).all())
                others = set(range(len(target.kv_cache))) - set(reservation.block_ids)
                assert bool((target.kv_cache[list(others)] == 7).all())
            decode.commit("r", first)
            outputs = run(decode, EngineRequest("own", prompt, GREEDY))
        prefill.abort("r")
    assert moved == len(prompt) * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    assert len(outputs.tokens["r", 0]) == NEW - 1
    assert outputs.cached["own"] == 64, "converted blocks are cached under the hashes of computed ones"
