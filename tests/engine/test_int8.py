"""int8 weights and rows: kernels compute what plain arithmetic gives; models are those of a fake-quantised reference."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError, ModelError
from engine import build
from engine.build import load_model
from engine.layers.linear import Int8Weight, JobLinear
from engine.layers.moe import Mlp
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from engine.ops import cpu_int8, cpu_jobs, cpu_tiles
from engine.ops.team import KernelTeam, Team
from engine.parallel.group import NullGroup
from engine.plan import PlanItem, StepPlan
from engine.quant import int8
from engine.quant.formats import INT8, StoredFormat
from engine.quant.int8 import PanelInt8, Scratch, TorchInt8
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from tests.engine.ranks import KV_BYTES, engine_of, make_engine, run, runners
from tests.engine.shapes import SHAPES
from tests.harness import fake_quant
from tests.harness.checkpoints import prompt_ids

NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
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
needs_kernels = pytest.mark.skipif(not cpu_int8.supported(), reason="this CPU has no AVX512-VNNI")
# One rounding in the last place; bf16 results are rounded once more.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
# A number that lies between two integers may be rounded to either, where sums before it were taken in another order. One
# such row moves logits, which reach 40 here, by up to this much.
NEAR_TIE, MOST_TIES = 0.3, 4  # of 32 tokens


def random(*shape: int, dtype: torch.dtype, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(dtype: torch.dtype, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Int8Weight:
    weight = random(outputs, inputs, dtype=dtype)
    weight[7] = 0.0
    return int8.quantize_weight(weight, int8.largest_of(weight))


# --- the layer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_keep_within_half_a_step(dtype) -> None:
    weight, packed = random(OUTPUTS, INPUTS, dtype=dtype), weight_of(dtype)
    weight[7] = 0.0
    assert packed.codes.abs().amax(1).tolist() == [0 if row == 7 else 127 for row in range(OUTPUTS)]
    error = (packed.codes.double() * packed.scales.double()[:, None] - weight.double()).abs()
    assert (error <= packed.scales.double()[:, None] * 0.50001).all()


@needs_kernels
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
        team.run(cpu_jobs.QUANTIZE, 40, (*where, 0 if largest is None else largest.data_ptr(), 0))

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
    elif not cpu_tiles.supported(cpu_tiles.INT8):
        pytest.skip("this CPU has no AMX")
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "threads"),
    [
        ("torch", 1),
        *(
            pytest.param(form, threads, marks=needs_kernels)
            for form in ("vectors", "tiles")
            for threads in (1, 2)
        ),
    ],
)
def test_products(dtype, form, threads) -> None:
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


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_forms_give_the_same_numbers(dtype) -> None:
    """Long rows of one sign, whose sums are the largest: 4096 · 127 · 127."""
    weight = Int8Weight(torch.full((64, 4096), 127, dtype=torch.int8), torch.ones(64))
    weight.codes[1::2] = -127
    x = torch.ones(33, 4096).to(dtype)
    x[1::2] = -1.0
    team, expected = KernelTeam(1, dtype, 16), fake_quant.product(x, weight.codes, weight.scales, None)
    assert expected.abs().min() == 4096 * 127
    for amx in {0, int(cpu_tiles.supported(cpu_tiles.INT8))}:
        made = PanelInt8(weight, None, None, team, Scratch())
        made._amx = amx
        assert torch.equal(made(x), expected.to(dtype))
    assert torch.equal(TorchInt8(weight, None, None)(x), expected.to(dtype))


@needs_kernels
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
    monkeypatch.setattr(cpu_int8, "_ROWS_BYTES", 0)
    monkeypatch.setattr(cpu_int8, "_TILED_ROWS_BYTES", 0)
    amx = int(form == "tiles")
    if amx and not cpu_tiles.supported(cpu_tiles.INT8):
        pytest.skip("this CPU has no AMX")
    assert cpu_int8.blocks(150, cpu_int8.padded(inputs), amx) == (5 if amx else 13)
    for threads in (1, 2):
        made = PanelInt8(weight, None, None, KernelTeam(threads, dtype, 16), Scratch())
        made._amx = amx
        for rows in (13, 32, 40, 150):
            assert torch.equal(made(x[:rows]), expected[:rows])


# --- whole models ------------------------------------------------------------------------------------


@functools.cache
def reference(path: Path, head: bool) -> Any:
    return fake_quant.fake_quantized(path, head=head)


@torch.inference_mode()
def assert_reference(model: Path, prompt: list[int], tokens: list[int], *, head: bool = True) -> None:
    """Each token is the reference's best after those before it, or nearly so."""
    logits = reference(model, head)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    behind = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert behind.max() < NEAR_TIE, f"token {int(behind.argmax())} is {behind.max()} behind the best one"
    assert (behind == 0).sum() >= len(tokens) - MOST_TIES, f"too many near-ties: {behind.tolist()}"


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

    def largest(self, x: Tensor) -> Tensor:
        return x * 1.7


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
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


@needs_kernels
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


@needs_kernels
def test_a_model_without_norms_before_its_parts_has_no_list(checkpoint) -> None:
    assert runner_of(checkpoint("olmo2"), 1)._decode_jobs is None


@needs_kernels
def test_the_job_before_an_int8_product_prefetches_its_weights() -> None:
    quantize = (cpu_jobs.QUANTIZE, 1, (1, 64, 2, 64, 3, 0, 0))
    product = (cpu_jobs.MULTIPLY_INT8, 2, (2, 1, 64, 1 << 20, 9, 3, 9, 64, 2, 0, 1))
    listed = KernelTeam(1, torch.bfloat16, 8).compile([quantize, product, quantize])
    assert listed[:, cpu_jobs.AHEAD - cpu_jobs.KERNEL].tolist() == [1 << 20, 0, 0]


@needs_kernels
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


# --- stored checkpoints ------------------------------------------------------------------------------

GOLDEN = Path(__file__).with_name("golden") / "int8"


def stored(path: Path, **changes: object) -> Path:
    """A copy of the checkpoint that compressed-tensors wrote, with its quantization_config changed."""
    shutil.copytree(GOLDEN, path, dirs_exist_ok=True)
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_weights_are_read_as_their_writer_reads_them() -> None:
    read_back = load_file(GOLDEN / "read_back.st")
    assert len(read_back) == 14
    checkpoint = Checkpoint(GOLDEN, torch.bfloat16, torch.device("cpu"), quantization=StoredFormat(INT8))
    for name, expected in read_back.items():
        found = checkpoint.matrix(name, *expected.shape)
        assert isinstance(found, Int8Weight)
        assert torch.equal((found.codes * found.scales[:, None]).to(expected.dtype), expected)
        half = slice(expected.shape[1] // 2, None)
        columns = checkpoint.matrix(name, *expected.shape, columns=half)
        rows = checkpoint.matrix(name, *expected.shape, rows=slice(3, 9))
        assert isinstance(columns, Int8Weight) and isinstance(rows, Int8Weight)
        assert torch.equal(columns.codes, found.codes[:, half]) and torch.equal(columns.scales, found.scales)
        for one in (rows.codes, rows.scales):
            assert one.untyped_storage().nbytes() == one.numel() * one.itemsize, "it keeps the mapping"
        assert torch.equal(rows.codes, found.codes[3:9]) and torch.equal(rows.scales, found.scales[3:9])
    assert isinstance(checkpoint.matrix("lm_head.weight", 64, 32), Tensor)  # it is ignored


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("ranks_", [1, 2])
def test_stored_models_are_those_of_the_reference(quantization, ranks_) -> None:
    prompt = [5 + 3 * i % 50 for i in range(40)]
    with runners(GOLDEN, ranks_, quantization=quantization) as ranks:
        outputs = run(engine_of(ranks[0]), EngineRequest("r", prompt, GREEDY))
    assert_reference(GOLDEN, prompt, outputs.tokens["r", 0], head=quantization == "int8")


@pytest.mark.long
@pytest.mark.parametrize("variant", ["phi4", "glm4"])
@pytest.mark.parametrize("ranks_", [1, 2])
def test_fused_matrices_are_cut_and_reordered_with_their_scales(
    variant, ranks_, checkpoint, tmp_path
) -> None:
    """Queries, keys and values in one tensor, of which a part of each head is rotated; neighbours that are rotated."""
    model = quantised(checkpoint(variant), tmp_path)
    prompt = prompt_ids(40)
    with runners(model, ranks_) as ranks:
        assert ranks[0].model_config.quantization and ranks[0].model_config.dim_order()
        outputs = run(engine_of(ranks[0]), EngineRequest("r", prompt, GREEDY))
    assert_reference(model, prompt, outputs.tokens["r", 0], head=False)


def quantised(model: Path, path: Path) -> Path:
    """The checkpoint with its matrices stored as compressed-tensors stores them."""
    shutil.copytree(model, path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        codes, scales = fake_quant.quantize(tensors[name])
        tensors |= {name: codes.to(torch.int8), f"{name}_scale": scales}
    save_file(tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = json.loads((GOLDEN / "config.json").read_text())["quantization_config"]
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_a_stored_model_takes_what_its_codes_take() -> None:
    model = ModelConfig.read(GOLDEN)
    config = EngineConfig(model=GOLDEN, dtype="bfloat16")
    tensors = load_file(GOLDEN / "model.safetensors")
    found = sum(one.numel() * one.itemsize for name, one in tensors.items() if not name.endswith("_scale"))
    outputs = sum(len(one) for name, one in tensors.items() if name.endswith("_scale"))
    assert build.weight_bytes(model, config) == found + 12 * outputs - 2 * 32  # the last norm


GROUP = json.loads((GOLDEN / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]


def group(part: str, **changes: object) -> dict[str, object]:
    return {"config_groups": {"group_0": GROUP | {part: GROUP[part] | changes}}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "fbgemm_fp8"}, r"FP8 \(FBGEMM\) is not supported"),
        ({"quant_method": "new"}, "quant_method 'new' is not supported"),
        ({"format": "nvfp4-pack-quantized"}, "NVFP4, compressed-tensors' format 'nvfp4-pack-quantized'"),
        ({"format": "mixed-precision"}, "format 'mixed-precision'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"config_groups": {}}, "without config_groups"),
        ({"config_groups": {"group_0": 3}}, "config_groups"),
        (group("weights", strategy="group"), r"group_0.weights.strategy = 'group'"),
        (group("weights", symmetric=False), r"group_0.weights.symmetric = False"),
        (group("weights", num_bits=4), r"group_0.weights.num_bits = 4"),
        (group("input_activations", dynamic=False), r"group_0.input_activations.dynamic = False"),
        (group("input_activations", strategy="tensor"), r"group_0.input_activations.strategy = 'tensor'"),
        (
            {"config_groups": {"g": GROUP | {"input_activations": None}}},
            "g.input_activations.num_bits = None",
        ),
    ],
)
def test_other_formats_are_refused_by_name(changes, says, tmp_path) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        ModelConfig.read(stored(tmp_path, **changes))
    assert caught.value.field == "quantization_config"
    assert "supported: compressed-tensors: int8" in caught.value.message


def rewritten(path: Path, name: str, tensor: Tensor | None) -> Path:
    stored(path)
    tensors = load_file(path / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("q_proj.weight_scale", None, "stored as torch.int8, expected floating point"),
        ("q_proj.weight", torch.zeros(32, 32), "stored as torch.float32, expected int8"),
        ("q_proj.weight_scale", torch.zeros(32), r"shape \(32,\), expected \(32, 1\)"),
        ("q_proj.weight_scale", torch.ones(32, 1).int(), "stored as torch.int32, expected floating point"),
        ("q_proj.weight", torch.zeros(32, 8, dtype=torch.int8), r"shape \(32, 8\)"),
    ],
)
def test_a_stored_matrix_that_does_not_fit_is_named(name, tensor, says, tmp_path) -> None:
    whole = f"model.layers.1.self_attn.{name}"
    model = rewritten(tmp_path, whole, tensor)
    with pytest.raises(ModelError, match=says) as caught:
        load_model(EngineConfig(model=model, dtype="float32", kv_memory_bytes=KV_BYTES))
    assert caught.value.field.startswith("model.layers.1.self_attn.q_proj.weight")


def test_matrices_of_one_product_are_stored_alike(tmp_path) -> None:
    stored(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight_scale"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="some of its matrices are stored as int8 and others are not"):
        load_model(EngineConfig(model=tmp_path, dtype="float32", kv_memory_bytes=KV_BYTES))
