"""The engine beside the GPU's limits, in bf16, by the backend that `auto` chooses. It prints figures and has no bounds."""

from __future__ import annotations

import pytest

from bench import limits
from bench.checkpoint import ModelShape, write_model
from bench.figures import Figure
from bench.sections import engine as section

pytestmark = pytest.mark.gpu
# Eight layers of an 8 B Llama: a step reads 4 GB. Of a smaller model the launches would be measured, not the reading.
CARD = ModelShape(layers=8, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=32768)
SMALL = ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=1024)
REPEATS = 7
DECODE_BOUND = "≥ 0.6"


@pytest.fixture(scope="module")
def checkpoint(device, tmp_path_factory):
    """4 GB on a card: written once."""
    shape = CARD if device == "cuda" else SMALL
    return write_model(tmp_path_factory.mktemp("card"), shape), shape


@pytest.mark.parametrize("page", [16, 256])
def test_figures(page, device, checkpoint, show):
    """By both sizes of pages: without vllm's kernel only the larger one has a paged kernel."""
    path, shape = checkpoint
    repeats = REPEATS if device == "cuda" else 1
    read = limits.read_rate(repeats, device)
    gemm = limits.gemm_rate(repeats, device=device, shape=shape)
    loaded = section.load(path, device, page)
    settings = loaded._runner.config
    bench = section.EngineBench(loaded, shape)
    figures = [
        Figure("memory read", read / 1e9, "GB/s", note=f"{limits.READ_BYTES >> 20} MiB"),
        Figure("GEMM", gemm / 1e12, "TFLOP/s", note="bf16, the model's own shapes"),
        *bench.figures(gemm, read, lambda count: min(count, repeats), DECODE_BOUND),
    ]
    weights = (shape.linear_weights + 2 * shape.vocab * shape.hidden) / 1e6
    show(
        f"{settings.attention_backend}, pages of {page}, {weights:.0f} M parameters in bf16",
        figures,
    )
    assert all(figure.value > 0 for figure in figures if not figure.name.startswith("outside"))
