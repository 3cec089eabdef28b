"""int8 weights and rows: kernels compute what plain arithmetic gives; models are those of a fake-quantised reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from engine import build
from engine.build import load_model
from engine.layers.linear import Int8Weight, JobLinear
from engine.layers.moe import Mlp
from engine.ops.cpu.codegen import tile_registers
from engine.ops.cpu.jobs import AHEAD, KERNEL, MULTIPLY_INT8, QUANTIZE
from engine.ops.cpu.products import int8 as products
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.parallel.group import NullGroup
from engine.plan import PlanItem, StepPlan
from engine.quant import int8
from engine.quant.int8 import PanelInt8, Scratch, TorchInt8
from engine.request import EngineRequest
from engine.runner import ModelRunner
from tests.engine.decode_steps import needs_int8
from tests.engine.quant.int8_reference import GREEDY, assert_reference
from tests.engine.ranks import KV_BYTES, engine_of, make_engine, run, runners
from tests.engine.shapes import SHAPES
from tests.harness import fake_quant
from tests.harness.checkpoints import prompt_ids

VARIANTS = [
    "llama-rope-scaled-biases",
    "qwen3-tied",
    "mistral",
    "glm4",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("qwen2", "phi4", "olmo2", "granite", "gemma2", "gemma3")
    ),
]


OUTPUTS, INPUTS = 75, 100  # neither fills a panel


DTYPES = [torch.bfloat16, torch.float32]


# One rounding in the last place; bf16 results are rounded once more.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def random(*shape: int, dtype: torch.dtype, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(dtype: torch.dtype, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Int8Weight:
    weight = random(outputs, inputs, dtype=dtype)
    weight[7] = 0.0
    return int8.quantize_weight(weight, int8.row_maxima_of(weight))


# --- the layer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_keep_within_half_a_step(dtype) -> None:
    weight, packed = random(OUTPUTS, INPUTS, dtype=dtype), weight_of(dtype)
    weight[7] = 0.0
    assert packed.codes.abs().amax(1).tolist() == [0 if row == 7 else 127 for row in range(OUTPUTS)]
    error = (packed.codes.double() * packed.scales.double()[:, None] - weight.double()).abs()
    assert (error <= packed.scales.double()[:, None] * 0.50001).all()


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [False, True])
def test_rows_are_rounded_to_the_nearest_even_integers(dtype, given) -> None:
    """Also rows of zeros and of numbers too small to divide by; numbers that are not finite make their row so."""
    x = random(40, INPUTS, dtype=dtype)
    x[0], x[1], x[2] = 0.0, 1e-35, torch.arange(INPUTS).to(dtype) / 2  # with ties
    x[2, 0] = 127.0
    largest = x.float().abs().amax(1) * 1.7 if given else None
    codes, scales = torch.zeros(40, 128, dtype=torch.uint8), torch.zeros(40)
    team = KernelTeam(2, dtype, 16)

    def quantize() -> None:
        where = (x.data_ptr(), INPUTS, codes.data_ptr(), 128, scales.data_ptr())
        team.run(QUANTIZE, 40, (*where, 0 if largest is None else largest.data_ptr(), 0))

    quantize()
    expected, of_rows = fake_quant.quantize(x, largest)
    assert torch.equal(codes[:, :INPUTS].double() - 128, expected)
    assert torch.equal(scales, of_rows[:, 0])
    assert expected[0].count_nonzero() == 0 and expected[2].abs().max() == (75 if given else 127)
    if not given:
        x[3, 5], x[4, 5], x[5, 5] = math.nan, math.inf, -math.inf
        quantize()
        assert not scales[3:6].isfinite().any() and scales[6:].isfinite().all()


def layer(form: str, dtype: torch.dtype, bias: Tensor | None, threads: int = 1) -> Any:
    weight = weight_of(dtype)
    if form == "torch":
        return TorchInt8(weight, bias, None)
    made = PanelInt8(weight, bias, None, KernelTeam(threads, dtype, 16), Scratch())
    if form == "vectors":
        made._amx = 0
    elif not tile_registers.supported(tile_registers.INT8):
        pytest.skip("this CPU has no AMX")
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "threads"),
    [
        ("torch", 1),
        *(
            pytest.param(form, threads, marks=needs_int8)
            for form in ("vectors", "tiles")
            for threads in (1, 2)
        ),
    ],
)
def test_products_are_those_of_the_reference_whatever_rows_are_beside(dtype, form, threads) -> None:
    """Every size of a tile, several of them, outputs that do not fill a panel, inputs that are padded, no row."""
    weight, bias = weight_of(dtype), random(OUTPUTS, dtype=dtype)
    linear, plain = layer(form, dtype, bias, threads), layer(form, dtype, None, threads)
    x = random(70, INPUTS, dtype=dtype)
    expected = fake_quant.product(x, weight.codes, weight.scales, bias)
    for rows in (*range(14), 31, 32, 33, 64, 70):
        got = linear(x[:rows])
        assert got.dtype is dtype
        torch.testing.assert_close(got.float(), expected[:rows], atol=2e-5, rtol=CLOSE[dtype])
    alone = torch.cat([plain(x[row : row + 1]) for row in range(70)])
    assert torch.equal(plain(x), alone)  # whatever rows are beside it
    assert torch.equal(plain(x)[:, 7], torch.zeros(70, dtype=dtype))
    x[3] = 0.0
    assert torch.equal(linear(x)[3], bias)


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_forms_give_the_same_numbers(dtype) -> None:
    """Long rows of one sign, whose sums are the largest: 4096 · 127 · 127."""
    weight = Int8Weight(torch.full((64, 4096), 127, dtype=torch.int8), torch.ones(64))
    weight.codes[1::2] = -127
    x = torch.ones(33, 4096).to(dtype)
    x[1::2] = -1.0
    team, expected = KernelTeam(1, dtype, 16), fake_quant.product(x, weight.codes, weight.scales, None)
    assert expected.abs().min() == 4096 * 127
    for amx in {0, int(tile_registers.supported(tile_registers.INT8))}:
        made = PanelInt8(weight, None, None, team, Scratch())
        made._amx = amx
        assert torch.equal(made(x), expected.to(dtype))
    assert torch.equal(TorchInt8(weight, None, None)(x), expected.to(dtype))


def test_sums_of_long_rows_are_exact() -> None:
    """Without the kernels: sums beyond 2^24, of which fp32 has only some, in several slices of inputs and channels."""
    codes = torch.randint(90, 128, (1103, 4099), dtype=torch.int8)
    product = TorchInt8(Int8Weight(codes[3:], torch.ones(1100)), None, None)._product(codes[:3])
    assert torch.equal(product.long(), codes[:3].long() @ codes[3:].long().T)
    assert product.min() > 1 << 24


@needs_int8
@pytest.mark.parametrize("form", ["vectors", "tiles"])
def test_blocks_of_rows_and_slices_of_inputs_give_the_same_numbers(form, monkeypatch) -> None:
    dtype, inputs = torch.float32, 2200  # three slices
    weight, x = weight_of(dtype, OUTPUTS, inputs), random(150, inputs, dtype=dtype)
    plain = PanelInt8(weight, None, None, KernelTeam(1, dtype, 16), Scratch())
    plain._amx = 0
    expected = plain(x)
    torch.testing.assert_close(
        expected, fake_quant.product(x, weight.codes, weight.scales, None), atol=2e-5, rtol=1e-6
    )
    monkeypatch.setattr(products, "_ROWS_BYTES", 0)
    monkeypatch.setattr(products, "_TILED_ROWS_BYTES", 0)
    amx = int(form == "tiles")
    if amx and not tile_registers.supported(tile_registers.INT8):
        pytest.skip("this CPU has no AMX")
    assert products.blocks(150, products.padded(inputs), amx) == (5 if amx else 13)
    for threads in (1, 2):
        made = PanelInt8(weight, None, None, KernelTeam(threads, dtype, 16), Scratch())
        made._amx = amx
        for rows in (13, 32, 40, 150):
            assert torch.equal(made(x[:rows]), expected[:rows])


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_are_those_of_the_reference(variant, checkpoint) -> None:
    model = checkpoint(variant)
    engine = make_engine(model, quantization="int8", max_batch_tokens=100)
    prompts = {str(i): prompt_ids(length, seed=i) for i, length in enumerate((70, 110, 5))}
    outputs = run(engine, *(EngineRequest(name, prompt, GREEDY) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert_reference(model, prompt, outputs.tokens[name, 0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_round_as_one(variant, checkpoint) -> None:
    model, prompt = checkpoint(variant), prompt_ids(70)
    with runners(model, 2, quantization="int8") as ranks:
        outputs = run(engine_of(ranks[0]), EngineRequest("r", prompt, GREEDY))
    assert_reference(model, prompt, outputs.tokens["r", 0])


class TwoRanks:
    """The second of two ranks; the first one's values are larger."""

    rank, size = 1, 2

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x * 1.7


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_int8)])
def test_ranks_that_share_inputs_round_by_the_largest_of_all(kernels) -> None:
    dtype = torch.float32
    team = KernelTeam(1, dtype, 16) if kernels else Team(1)
    weight, x = random(OUTPUTS, INPUTS, dtype=dtype), random(40, INPUTS, dtype=dtype, seed=4)
    linear = int8.maker(team, TwoRanks())(weight, None, split_inputs=True)  # type: ignore[arg-type]
    codes, scales = fake_quant.quantize(weight, 1.7 * weight.abs().amax(1))
    rows, of_rows = fake_quant.quantize(x, 1.7 * x.abs().amax(1))
    assert codes.abs().max() == 75 and rows.abs().max() == 75
    expected = (rows @ codes.T).float() * of_rows * scales[:, 0]
    torch.testing.assert_close(linear(x), expected, atol=2e-5, rtol=1e-6)


def runner_of(model: Path, threads: int) -> ModelRunner:
    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        quantization="int8",
        kv_memory_bytes=4 << 20,
        max_model_len=256,
        threads=threads,
    )
    return ModelRunner(load_model(config))


@needs_int8
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "variant",
    [
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("glm4", "gemma2", "gemma3-multimodal")),
    ],
)
def test_a_decode_step_is_one_list_of_jobs(variant, threads, checkpoint) -> None:
    """The logits are those of the operations one by one, to the last bit; also with more norms, capped scores, scaled
    embeddings, gelu and two rotary tables."""
    runner = runner_of(checkpoint(variant), threads)
    jobs = runner._decode_jobs
    assert jobs is not None
    for rows in (1, 7, 40, 1):
        items = [PlanItem(str(row), [7 + row], 5, [row], row, 1) for row in range(rows)]
        runner._decode_jobs = None
        runner.kv_cache.fill_(0.5)
        expected = runner.execute(StepPlan(items, []))
        runner._decode_jobs = jobs
        for _ in range(2):
            runner.kv_cache.fill_(0.5)
            assert torch.equal(runner.execute(StepPlan(items, [])), expected)


@needs_int8
def test_a_model_without_norms_before_its_parts_has_no_list(checkpoint) -> None:
    assert runner_of(checkpoint("olmo2"), 1)._decode_jobs is None


@needs_int8
def test_the_job_before_an_int8_product_prefetches_its_weights() -> None:
    quantize = (QUANTIZE, 1, (1, 64, 2, 64, 3, 0, 0))
    product = (MULTIPLY_INT8, 2, (2, 1, 64, 1 << 20, 9, 3, 9, 64, 2, 0, 1))
    listed = KernelTeam(1, torch.bfloat16, 8).compile([quantize, product, quantize])
    assert listed[:, AHEAD - KERNEL].tolist() == [1 << 20, 0, 0]


@needs_int8
def test_the_kernels_are_used(checkpoint) -> None:
    loaded = load_model(
        EngineConfig(
            model=checkpoint("llama"), dtype="float32", quantization="int8", kv_memory_bytes=KV_BYTES
        )
    )
    linears = [loaded.decoder.head]
    for layer in loaded.decoder.layers:
        assert isinstance(layer.mlp, Mlp)
        linears += [layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down]
    assert all(isinstance(one, PanelInt8) and isinstance(one, JobLinear) for one in linears)


# --- settings ----------------------------------------------------------------------------------------


def test_too_many_inputs_are_refused() -> None:
    make = int8.maker(Team(1), NullGroup())
    with pytest.raises(ConfigError, match="65537 inputs on one rank, more than 65536"):
        make(torch.zeros(1, 65537), None)


@pytest.mark.parametrize("size", [1, 2])
def test_matrices_take_a_byte_a_weight(size) -> None:
    """8B: 7.5 G weights in matrices, head included; 0.53 G in the embedding, in bf16."""
    model = SHAPES["llama-3.1-8b-instruct"]
    config = EngineConfig(model=Path(), dtype="bfloat16", quantization="int8", tensor_parallel=size)
    found = build.weight_bytes(model, config) * size
    embedding = model.vocab_size * model.hidden_size
    assert math.isclose(found, 8_030_261_248 - embedding + 2 * embedding, rel_tol=3e-3)
