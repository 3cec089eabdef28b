"""KV in int8: kernels against torch, and one output however a request is computed, cached, preempted or handed over."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from cluster.protocol import kv_format as layout
from engine import build, kv_blocks
from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.paged_cpu import PagedCpuBackend
from engine.attention.sdpa import SdpaBackend
from engine.build import load_model
from engine.model.rotary import tables
from engine.ops.base import LayerOps, OpsShape
from engine.ops.cpu.ops import CpuOps
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.ops.torch_ops import TorchOps
from engine.plan import PlanItem, StepPlan
from engine.request import EngineRequest
from engine.runner import ModelRunner
from tests.engine.kv_moves import BLOCKS, DIM, HEADS, KV, LAYERS, PAGE, move, random
from tests.engine.rank_parts import GREEDY, NEW, compute_prompt
from tests.engine.ranks import engine_of, make_engine, run, runners
from tests.engine.shapes import SHAPES
from tests.engine.steps import buffers_of
from tests.harness.checkpoints import prompt_ids

TOKENS = 70


def cache_of(blocks: int = BLOCKS) -> Tensor:
    spec = kv_blocks.KvSpec.of(LAYERS, KV, PAGE, DIM, torch.int8)
    return torch.zeros(blocks, *spec.shape, dtype=spec.dtype)


# --- layout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("page", [8, 16, 256])
def test_a_block_is_codes_then_scales_and_both_are_aligned(dim, page) -> None:
    spec = kv_blocks.KvSpec.of(3, 2, page, dim, torch.int8)
    assert spec.block_bytes == 3 * 2 * 2 * page * layout.row_bytes("int8", dim)
    blocks = torch.zeros(4, *spec.shape, dtype=torch.int8)
    codes, scales = kv_blocks.split(blocks)
    assert codes.shape == (4, 3, 2, 2, page, dim) and scales.shape == codes.shape[:-1]
    first, second = layout.planes(layout.row_bytes("int8", dim), quantized=True)
    assert (first.row, second.row) == (dim, layout.SCALE_BYTES)
    at = blocks[2, 1, 1, 1].data_ptr()
    assert codes[2, 1, 1, 1, 3].data_ptr() == at + 3 * first.row
    assert scales[2, 1, 1, 1, 3].data_ptr() == at + second.before * page + 3 * second.row
    assert all(one.stride()[0] * one.itemsize % 16 == 0 for one in (codes, scales))
    assert (second.before * page) % 16 == 0 and page * layout.row_bytes("int8", dim) % 16 == 0


def test_a_row_is_rounded_by_its_largest_number() -> None:
    rows = random(1000, 64) * torch.logspace(-6, 6, 1000)[:, None]
    rows[0], rows[1, 5] = 0.0, math.nan
    codes, scales = kv_blocks.quantize(rows)
    back = kv_blocks.dequantize(codes, scales, torch.float32)
    assert not back[0].any() and back[1].isnan().all()
    # Half a step, and what the scale's own rounding takes from the largest
    step = rows[2:].abs().amax(-1, keepdim=True) / 127
    assert bool(((back - rows)[2:].abs() <= 0.76 * step).all())


# --- kernels -----------------------------------------------------------------------------------------


def ops_over(cache: Tensor, kind: str, dtype: torch.dtype, threads: int) -> LayerOps:
    shape = OpsShape(HEADS, KV, DIM, 1e-5, dtype=dtype)
    cos, sin = tables(1.0 / 100.0 ** (torch.arange(0, DIM, 2) / DIM), 256)
    ops: LayerOps = (
        TorchOps(shape, cos, sin, cache)
        if kind == "torch"
        else CpuOps(shape, cos, sin, cache, KernelTeam(threads, dtype, DIM))
    )
    slots = torch.randperm(BLOCKS * PAGE, generator=torch.Generator().manual_seed(1))[:TOKENS]
    ops.begin(torch.arange(100, 100 + TOKENS), slots)
    return ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "threads"), [("torch", 1), ("cpu", 1), ("cpu", 2)])
def test_what_is_written_is_what_attention_is_given(kind, threads, dtype) -> None:
    """Codes and scales are torch's to the last bit, also of a row that is not finite; keys are so after rotation."""
    cache = cache_of()
    ops = ops_over(cache, kind, dtype, threads)
    qkv = random(TOKENS, (HEADS + 2 * KV) * DIM).to(dtype)
    qkv[7, -3], qkv[8, -DIM:] = math.inf, 0.0
    plain = torch.zeros(BLOCKS, LAYERS, 2, KV, PAGE, DIM, dtype=dtype)
    slots = torch.randperm(BLOCKS * PAGE, generator=torch.Generator().manual_seed(1))[:TOKENS]
    exact = ops_over(plain, kind, dtype, threads)
    exact.heads(1, qkv.clone(), None, None)
    codes, scales = kv_blocks.quantize(plain)
    _, k, v = ops.heads(1, qkv.clone(), None, None)
    own_codes, own_scales = kv_blocks.split(cache)
    finite = torch.isfinite(plain).all(-1)
    assert int((~finite).sum()) == 1 and bool(own_scales[~finite].isnan().all())
    assert torch.equal(own_codes[finite], codes[finite])
    assert torch.equal(own_scales[finite], scales[finite])
    read = kv_blocks.read(cache, dtype)[:, 1]
    for which, given in enumerate((k, v)):
        found = read[slots // PAGE, which, :, slots % PAGE]
        assert torch.equal(found.nan_to_num(5.0), given.nan_to_num(5.0))
    assert not cache[:, 0].any(), "another layer"


@pytest.mark.parametrize(("cap", "sunk"), [(0.0, False), (1.5, True)])
@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_the_values(dtype, window, cap, sunk) -> None:
    """Single tokens, a chunk and a whole prompt; what former requests left in the blocks is not read."""
    items = [
        PlanItem("fresh", list(range(21)), 0, [3, 7], 0, 1),
        PlanItem("chunk", list(range(19)), 30, [1, 2, 9, 4], 1, 1),
        PlanItem("decode", [5], 40, [11, 10, 5], 2, 1),
        PlanItem("first", [5], 0, [6], 3, 1),
    ]
    values = random(BLOCKS, LAYERS, 2, KV, PAGE, DIM)
    cache = cache_of()
    codes, scales = kv_blocks.split(cache)
    for plane, own in zip((codes, scales), kv_blocks.quantize(values), strict=True):
        plane.copy_(own)
    read = kv_blocks.read(cache, torch.float32)
    for item in items:
        scales[item.block_ids[-1], ..., item.end % PAGE :] = math.nan
    places = [(i.block_ids[at // PAGE], at % PAGE) for i in items for at in range(i.begin, i.end)]
    k, v = (torch.stack([read[b, 1, which, :, at] for b, at in places]).to(dtype) for which in (0, 1))
    q = random(len(places), HEADS, DIM, seed=9).to(dtype)
    sinks = random(LAYERS, HEADS) if sunk else None
    shape = AttentionShape(HEADS, KV, DIM, PAGE, (window,) * LAYERS, cap=cap, sinks=sinks, dtype=dtype)
    reference = AttentionShape(HEADS, KV, DIM, PAGE, (window,) * LAYERS, cap=cap, sinks=sinks)
    exact = SdpaBackend(reference, read, Team(1))
    exact.begin(buffers_of(items, PAGE))
    expected = exact.attend(1, q.float(), k.float(), v.float())
    backends: list[AttentionBackend] = [
        SdpaBackend(shape, cache, Team(1)),
        *(PagedCpuBackend(shape, cache, KernelTeam(threads, dtype, DIM)) for threads in (1, 2)),
    ]
    close = 1e-5 if dtype is torch.float32 else 3e-2
    for backend in backends:
        backend.begin(buffers_of(items, PAGE))
        torch.testing.assert_close(backend.attend(1, q, k, v).float(), expected, atol=close, rtol=close)


# --- engines -----------------------------------------------------------------------------------------


def engine_tokens(model: Path, *requests: EngineRequest, **config: object) -> dict[str, list[int]]:
    engine = make_engine(model, kv_dtype="int8", **config)  # type: ignore[arg-type]
    outputs = run(engine, *requests)
    return {name: tokens for (name, _), tokens in outputs.tokens.items()}


PROMPTS = {str(i): prompt_ids(40, seed=10 + i) for i in range(3)}
REQUESTS = [EngineRequest(name, prompt, GREEDY) for name, prompt in PROMPTS.items()]
# The families of the long ones have norms of heads, windows, attention sinks
FEW = pytest.mark.parametrize(
    "variant",
    ["llama", *(pytest.param(one, marks=pytest.mark.long) for one in ("qwen3", "mistral", "gpt-oss"))],
)


@cache
def whole(model: Path) -> dict[str, list[int]]:
    return engine_tokens(model, *REQUESTS)


@FEW
@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_tokens": 16},
        {"attention_backend": "sdpa"},
        {"threads": 2},
        pytest.param({"speculation": "ngram"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_one_output_however_it_is_computed(variant, settings, checkpoint) -> None:
    model = checkpoint(variant)
    assert engine_tokens(model, *REQUESTS, **settings) == whole(model)


@FEW
def test_one_output_after_a_preemption_from_the_cache_and_resumed(variant, checkpoint) -> None:
    model = checkpoint(variant)
    expected = whole(model)
    engine = make_engine(model, blocks=12, max_model_len=192, kv_dtype="int8")
    outputs = run(engine, *REQUESTS)
    assert engine.stats().preemptions > 0
    assert {name: outputs.tokens[name, 0] for name in PROMPTS} == expected
    again = run(engine, EngineRequest("again", PROMPTS["2"], GREEDY))
    assert again.cached == {"again": 32} and again.tokens["again", 0] == expected["2"]
    resumed = EngineRequest("r", PROMPTS["1"], GREEDY, output_tokens=expected["1"][:20])
    assert engine_tokens(model, resumed)["r"] == expected["1"][20:]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    [(1, 2), *(pytest.param(*degrees, marks=pytest.mark.long) for degrees in ((1, 1), (2, 1), (2, 2)))],
)
def test_a_hand_off_carries_scales(prefill_tp, decode_tp, checkpoint) -> None:
    """Between any degrees, in two parts, the second of which is cut inside a block: the tokens of one worker."""
    model, prompt = checkpoint("llama"), prompt_ids(70)
    expected = engine_tokens(model, EngineRequest("r", prompt, GREEDY))["r"]
    how = {"kv_dtype": "int8"}
    with runners(model, prefill_tp, **how) as sources, runners(model, decode_tp, **how) as targets:
        prefill, decode = engine_of(sources[0]), engine_of(targets[0])
        first = compute_prompt(prefill, prompt)
        reservation = decode.reserve(EngineRequest("r", prompt, GREEDY), [], growth_tokens=NEW)
        moved = move(sources, prefill.block_ids("r"), targets, reservation.block_ids, len(prompt))
        decode.commit("r", first)
        outputs = run(decode, EngineRequest("own", prompt, GREEDY))
        prefill.abort("r")
    config = sources[0].model_config
    numbers = len(prompt) * config.num_layers * 2 * config.num_kv_heads
    assert moved == numbers * layout.row_bytes("int8", config.head_dim)
    assert [first[0].token_id, *outputs.tokens["r", 0]] == expected
    assert outputs.tokens["own", 0] == expected


def runner_of(model: Path, threads: int = 1, **config: object) -> ModelRunner:
    settings = EngineConfig(
        model=model,
        **{"dtype": "bfloat16", **config},  # type: ignore[arg-type]
        kv_memory_bytes=4 << 20,
        max_model_len=256,
        threads=threads,
    )
    return ModelRunner(load_model(settings))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_decode_step_is_one_list_of_jobs(threads, checkpoint) -> None:
    runner = runner_of(checkpoint("qwen3"), threads, kv_dtype="int8")
    jobs = runner._decode_jobs
    assert jobs is not None
    for rows in (1, 7):
        items = [PlanItem(str(row), [7 + row], 5, [row], row, 1) for row in range(rows)]
        runner._decode_jobs = None
        expected = runner.execute(StepPlan(items, []))
        runner._decode_jobs = jobs
        assert torch.equal(runner.execute(StepPlan(items, [])), expected)


@pytest.mark.parametrize(
    ("variant", "dtype", "most"),
    [
        ("llama", "float32", 0.02),
        pytest.param("llama", "bfloat16", 0.03, marks=pytest.mark.long),
        pytest.param("qwen3", "float32", 0.02, marks=pytest.mark.long),
        pytest.param("qwen3", "bfloat16", 0.03, marks=pytest.mark.long),
        pytest.param("gemma2", "float32", 0.04, marks=pytest.mark.long),
        pytest.param("gpt-oss", "float32", 0.06, marks=pytest.mark.long),
    ],
)
@torch.inference_mode()
def test_logits_are_near_those_of_exact_kv(variant, dtype, most, checkpoint) -> None:
    """After a prompt in one step, and after a token more: root mean square, relative to that of the logits."""
    model, tokens = checkpoint(variant), prompt_ids(60)
    found = []
    for kv_dtype in ("auto", "int8"):
        runner = runner_of(model, dtype=dtype, kv_dtype=kv_dtype)
        items = [
            PlanItem("r", tokens[:59], 0, [0, 1, 2, 3], 0, 1),
            PlanItem("r", tokens[59:], 59, [0, 1, 2, 3], 0, 1),
        ]
        found.append(torch.cat([runner.execute(StepPlan([item], [])).clone() for item in items]))
    distance = (found[1] - found[0]).square().mean(-1).sqrt() / found[0].square().mean(-1).sqrt()
    print(f"{variant}, {dtype}: {distance.tolist()}")
    assert 0 < float(distance.max()) < most


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_dtype": "bf16", "dtype": "float32"}, "computed in float32"),
        ({"kv_dtype": "bf16>int8"}, "two roles"),
        ({"kv_dtype": "int8", "page_size": 12}, "a page_size that 8 divides, not 12"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_is_read(settings, problem, checkpoint) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        build.check(EngineConfig(model=checkpoint("llama"), **settings))
    assert caught.value.field == "kv_dtype"


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_pool_holds_almost_twice_as_many_tokens(tensor_parallel) -> None:
    model = SHAPES["llama-3.1-8b-instruct"]
    config = EngineConfig(model=Path(), dtype="bfloat16", tensor_parallel=tensor_parallel)
    ratio = build.block_bytes(model, config) / build.block_bytes(
        model, config.model_copy(update={"kv_dtype": "int8"})
    )
    assert ratio == 2 * model.head_dim / (model.head_dim + 2)
