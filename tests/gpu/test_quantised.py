"""Quantised checkpoints on the GPU: logits are the CPU's in every format that other projects' packers wrote, products are
those of plain arithmetic, and the card holds a matrix once. Figures are printed, and none is asserted."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bench import limits
from bench.checkpoint import ModelShape, _config
from bench.figures import Figure
from bench.quantized_checkpoints import FORMATS, write
from bench.sections.engine import EngineBench
from cluster.config.worker import EngineConfig
from engine import build
from engine.engine import Engine
from engine.layers.linear import CodedLinear, CudaLinear, Int8Weight
from engine.ops.codes import BYTES, FP8, FP8_SCALED, NIBBLES, CodedWeight
from engine.plan import PlanItem, StepPlan
from engine.quant.int8 import CudaInt8, TorchInt8
from engine.runner import ModelRunner
from tests.gpu.answers import generate, runner_of

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parents[1] / "engine/golden"
NAMES = sorted(path.name for path in (GOLDEN / "formats").iterdir())
EXPANDED = {"gptq-act-order", "w4a16-act-order", "mxfp4"}
IDS = [5 + 3 * i % 50 for i in range(90)]
STEPS = [(0, 50), (50, 88), (88, 89), (89, 90)]
# In fp32, of logits of magnitude 10. A number between two int8 codes may be rounded to either, which moves some logits.
CLOSE, OF_MOST, NEAR_TIE = 1e-3, 2e-3, 0.5
SHAPES = [(6144, 4096), (4096, 14336), (28672, 4096)]  # outputs, inputs of the 8B shape
ROWS = (1, 2, 16, 17, 64, 100, 128, 129, 600)


def needs_triton(device: str) -> None:
    if device != "cuda":
        pytest.skip("kernels for CUDA")
    pytest.importorskip("triton")


# --- models ------------------------------------------------------------------------------------------


def logits(path: Path, device: str, **settings: object) -> Tensor:
    """[8, vocab] of two sequences: chunks, and a token of each."""
    ways = {"device": device, "dtype": "float32", "attention_backend": "sdpa", **settings}
    runner = runner_of(path, **ways)
    found = []
    for begin, end in STEPS:
        count = -(-end // runner.page_size)
        items = [
            PlanItem("one", IDS[begin:end], begin, list(range(10, 10 + count)), 0, 1),
            PlanItem("other", IDS[::-1][begin:end], begin, list(range(30, 30 + count)), 1, 1),
        ]
        found.append(runner.execute(StepPlan(items, [])).float().cpu())
    return torch.cat(found)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_expanded_weights_are_the_cpus(name, device):
    path = GOLDEN / "formats" / name
    difference = (logits(path, device) - logits(path, "cpu")).abs()
    assert float(difference.max()) <= CLOSE


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("name", ["int8", "formats/awq", "formats/fp8-channel"])
def test_logits_in_int8_are_the_cpus(name, backend, device):
    """By torch's integer product, and by our kernels."""
    if backend == "triton":
        needs_triton(device)
    path, how = GOLDEN / name, {"quantization": "int8"}
    difference = (logits(path, device, attention_backend=backend, **how) - logits(path, "cpu", **how)).abs()
    assert float(difference.median()) <= OF_MOST and float(difference.max()) <= NEAR_TIE


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_codes_in_bf16_are_as_near_to_fp32_as_those_of_expanded_weights(name, device):
    needs_triton(device)
    path = GOLDEN / "formats" / name
    loaded = build.load_model(
        EngineConfig(model=path, device=device, dtype="bfloat16", kv_memory_bytes=64 << 20)
    )
    kind = CudaLinear if name in EXPANDED else CodedLinear
    assert all(isinstance(layer.qkv, kind) for layer in loaded.decoder.layers)
    del loaded
    exact = logits(path, "cpu")
    plain = (logits(path, device, dtype="bfloat16") - exact).abs().mean()
    got = (logits(path, device, dtype="bfloat16", attention_backend="triton") - exact).abs().mean()
    assert float(got) <= 1.5 * float(plain)


@pytest.mark.parametrize("variant", ["qwen3", "glm4", "gemma2", "phi3-window"])
def test_other_families(variant, device, model, tmp_path):
    """Heads in another order, fused matrices, more norms: in fp32 expanded, in bf16 in their codes."""
    fp8 = next(form for title, form in FORMATS.items() if title.startswith("FP8"))
    path = write(model(variant), tmp_path / "fp8", fp8)
    exact = logits(path, "cpu")
    assert float((logits(path, device) - exact).abs().max()) <= CLOSE
    if device == "cuda":
        plain = (logits(path, device, dtype="bfloat16") - exact).abs().mean()
        got = (logits(path, device, dtype="bfloat16", attention_backend="triton") - exact).abs().mean()
        assert float(got) <= 1.5 * float(plain)


@pytest.mark.parametrize("name", ["int8", "formats/fp8-block", "formats/awq", "formats/gptq-8"])
def test_recorded_decode_steps_say_the_same(name, device):
    prompts = [IDS[:70], IDS[20:53]]
    ways = {"device": device, "dtype": "bfloat16"}
    recorded = generate(GOLDEN / name, prompts, cuda_graphs=True, **ways)
    assert generate(GOLDEN / name, prompts, cuda_graphs=False, **ways) == recorded
    assert len({token for answer in recorded for token in answer}) > 4


# --- products ----------------------------------------------------------------------------------------


def int8_weight(outputs: int, inputs: int, device: str) -> Int8Weight:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
    return Int8Weight(codes, torch.rand(outputs, device=device) * 1e-3)


def coded_weight(kind: str, group: int, outputs: int, inputs: int, device: str) -> CodedWeight:
    """Numbers of about 1, or of about 1 / 16 of the smallest integers."""
    size = inputs // 2 if kind == NIBBLES else inputs
    codes = torch.randint(0, 256, (outputs, size), dtype=torch.uint8, device=device)
    groups = inputs // group if group else 1
    scales = torch.rand(outputs, groups, device=device) * {FP8: 1e-2, BYTES: 1e-2, NIBBLES: 1e-1}[kind]
    if kind == FP8:
        codes = torch.where(codes & 0x7F == 0x7F, 1, codes)
        return CodedWeight(kind, codes, scales * FP8_SCALED, None, group)
    zeros = torch.full_like(scales, 8 if kind == NIBBLES else 128, dtype=torch.uint8)
    return CodedWeight(kind, codes, scales, zeros, group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (1000, 2056), (33, 100)])
def test_int8_products_are_the_cpus_to_the_last_bit(outputs, inputs, dtype, device):
    """torch's integer product on the card with its rounding of rows, and on the CPU for a few outputs."""
    needs_triton(device)
    torch.manual_seed(0)
    weight = int8_weight(outputs, inputs, device)
    bias = torch.randn(outputs, device=device).to(dtype)
    own, plain = CudaInt8(weight, bias, None), TorchInt8(weight, bias, None)
    few = Int8Weight(weight.codes[:32].cpu(), weight.scales[:32].cpu())
    on_cpu = TorchInt8(few, bias[:32].cpu(), None)
    for rows in ROWS:
        x = torch.randn(rows, inputs, device=device).to(dtype)
        got = own(x)
        assert torch.equal(got, plain(x)), rows
        assert torch.equal(got[:, :32].cpu(), on_cpu(x.cpu())), rows


@pytest.mark.parametrize("kind", [FP8, BYTES, NIBBLES])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 2080), (33, 96)])
def test_products_with_codes_are_those_of_expanded_weights(outputs, inputs, group, kind, device):
    needs_triton(device)
    if group and inputs % group:
        pytest.skip("no such groups")
    torch.manual_seed(0)
    weight = coded_weight(kind, group, outputs, inputs, device)
    matrix, bias = weight.expanded(torch.bfloat16), torch.randn(outputs, device=device).bfloat16()
    from engine.ops.cuda import coded_products

    assert torch.equal(coded_products.expand(weight, 0, outputs, torch.bfloat16), matrix)
    layer, exact = CodedLinear(weight, bias), weight.expanded(torch.float32).double()
    for rows in ROWS:
        x = torch.randn(rows, inputs, device=device).bfloat16()
        expected = F.linear(x.double(), exact, bias.double())
        error = (layer(x).double() - expected).abs().max() / expected.abs().max()
        assert float(error) < 1e-2, rows


# --- memory and figures ------------------------------------------------------------------------------

LLAMA_8B = ModelShape(32, 4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
SMALL = ModelShape(2, 256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=1024)
_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
_INT4 = _WEIGHTS | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
STORED: dict[str, tuple[str, dict[str, Any]]] = {  # kind → compressed-tensors' format and its weights
    FP8: ("float-quantized", _WEIGHTS),
    NIBBLES: ("pack-quantized", _INT4),
}


class Drawn:
    """A checkpoint whose tensors are drawn on the device: an 8B model would take minutes to write."""

    form = ""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, **more: object):
        self._device = device

    def __enter__(self) -> Drawn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def has(self, name: str) -> bool:
        return name in ("model.embed_tokens.weight", "lm_head.weight")

    def get(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None, **more: object
    ):
        size = [
            len(range(*(part or slice(None)).indices(n)))
            for n, part in zip(shape, (rows, columns), strict=False)
        ]
        if "norm" in name:
            return torch.ones(size, dtype=torch.bfloat16, device=self._device)
        return torch.empty(size, dtype=torch.bfloat16, device=self._device).normal_(0.0, 0.02)

    def head(self, name: str, *shape: int, rows: slice):
        return self.get(name, *shape, rows=rows)

    def matrix(self, name: str, *shape: int, **part: Any):
        form = self.form
        if form not in STORED:
            return self.get(name, *shape, **part)
        outputs, inputs = shape
        found = coded_weight(form, 0 if form == FP8 else 128, outputs, inputs, str(self._device))
        found.scales.mul_(1e-2)
        return found


@pytest.fixture
def drawn(tmp_path, monkeypatch) -> Callable[[str, ModelShape], Path]:
    """Writes config.json of a form; loading then draws."""

    def prepare(form: str, shape: ModelShape) -> Path:
        raw = _config(shape)
        if form in STORED:
            layout, weights = STORED[form]
            group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
            raw["quantization_config"] = {
                "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
                "config_groups": {"group_0": group},
            }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(raw))
        monkeypatch.setattr(Drawn, "form", form)
        monkeypatch.setattr(build, "Checkpoint", Drawn)
        return tmp_path

    return prepare


@pytest.mark.parametrize("form", [FP8, NIBBLES, "int8"])
def test_the_card_holds_a_matrix_once(form, device, tmp_path, model):
    """From files: what is held after loading is what the memory rule was told, and the most while loading is a joined
    matrix more."""
    needs_triton(device)
    from bench.checkpoint import write_model

    shape = ModelShape(4, 2048, heads=16, kv_heads=8, head_dim=128, intermediate=8192, vocab=4096)
    path = write_model(tmp_path / "plain", shape, device=device)
    if form != "int8":
        number = 0 if form == FP8 else 1
        path = write(path, tmp_path / "stored", list(FORMATS.values())[number])
    quantization = "int8" if form == "int8" else "auto"
    ways: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization, "kv_memory_bytes": 8 << 20}
    config = EngineConfig(model=path, device=device, max_model_len=256, **ways)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = build.load_model(config)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    said = build.weight_bytes(loaded.model_config, loaded.config)
    largest = 2 * shape.intermediate * shape.hidden * 2  # gate and up, in bf16
    print(f"{form}: said {said >> 20} MiB, held {held >> 20} MiB, at most {peak >> 20} MiB")
    assert 0.97 * said <= held <= 1.03 * said + (16 << 20)
    assert peak <= held + 2 * largest + (16 << 20)


def engine_figures(form: str, path: Path, shape: ModelShape, device: str, read: float) -> Iterator[Figure]:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    pool = (4 << 30) if device == "cuda" else 64 << 20
    batches = (1, 16, 64) if device == "cuda" else (1, 4)
    config = EngineConfig(
        model=path, dtype="bfloat16", device=device, kv_memory_bytes=pool, threads=1, max_batch_tokens=2048,
        max_batch_requests=64, quantization="int8" if form == "int8" else "auto",
    )  # fmt: skip
    loaded = build.load_model(config)
    if device == "cuda":
        held = (torch.cuda.memory_allocated() - before - pool) / 1e9
        yield Figure(f"{form}: memory of weights", held, "GB")
    runner = ModelRunner(loaded)
    runner.warm_up()
    bench = EngineBench(Engine(runner, runner.config, secret=b"figures"), shape)
    weights = build.weight_bytes(loaded.model_config, loaded.config) - 2 * shape.vocab * shape.hidden
    for batch in batches:
        found = bench.decode(batch, 2)
        size = weights + batch * found.context_tokens * shape.kv_bytes_per_token
        seconds = found.step_seconds
        note = f"{batch / seconds:.0f} tok/s; {size / seconds / read:.2f} of the memory's bandwidth"
        yield Figure(f"{form}: decode step, batch {batch}", seconds * 1e3, "ms", "", note)
    tokens = 2048 if device == "cuda" else 256
    seconds = sorted(bench.prompt_seconds(tokens) for _ in range(4))[1]
    yield Figure(f"{form}: prefill of {tokens}", seconds * 1e3, "ms", "", f"{tokens / seconds:.0f} tok/s")


def test_figures_of_quantised_models(device, drawn, show):
    """Of all forms at the 8B shape; weights are drawn, and none is read from a file."""
    shape, forms = (LLAMA_8B, ("bf16", "int8", FP8, NIBBLES)) if device == "cuda" else (SMALL, ("bf16",))
    read, figures = limits.read_rate(3, device), list[Figure]()
    for form in forms:
        figures += engine_figures(form, drawn(form, shape), shape, device, read)
    show("quantised weights beside bf16, 8B", figures)
    assert all(figure.value > 0 for figure in figures)


def test_figures_of_products(device, show):
    needs_triton(device)
    from triton.testing import do_bench

    read, figures = limits.read_rate(3, device), list[Figure]()
    for outputs, inputs in SHAPES:
        plain = torch.randn(outputs, inputs, device=device).bfloat16()
        eight = int8_weight(outputs, inputs, device)
        layers: dict[str, tuple[Any, float]] = {
            "bf16": (CudaLinear(plain), 2.0),
            "int8": (CudaInt8(eight, None, None), 1.0),
            "int8, torch": (TorchInt8(eight, None, None), 1.0),
            "fp8": (CodedLinear(coded_weight(FP8, 0, outputs, inputs, device)), 1.0),
            "fp8, groups of 128": (CodedLinear(coded_weight(FP8, 128, outputs, inputs, device)), 1.03),
            "4 bits, groups of 128": (
                CodedLinear(coded_weight(NIBBLES, 128, outputs, inputs, device)),
                0.54,
            ),
        }
        for rows in (1, 16, 64, 128, 2048):
            x = torch.randn(rows, inputs, device=device).bfloat16()
            for name, (layer, width) in layers.items():
                micro = float(do_bench(lambda: layer(x), warmup=5, rep=20)) * 1e3  # noqa: B023
                share = outputs * inputs * width / (micro * 1e-6) / read
                rate = 2e-6 * rows * outputs * inputs / micro
                note = f"{share:.2f} of the memory's bandwidth" if rows <= 64 else f"{rate:.0f} TFLOP/s"
                figures.append(Figure(f"{outputs} × {inputs}, {rows} rows, {name}", micro, "µs", "", note))
    show("products with quantised weights", figures)
