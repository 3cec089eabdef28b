"""The engine beside the GPU's limits, in bf16, by the backend that `auto` chooses and a worker's default settings. It
prints figures beside their targets and asserts none.

decode: bytes of weights and KV read per second ÷ the memory's bandwidth; prefill: operations of all products and of causal
attention per second ÷ the rate of the model's own products. Both limits are measured in the same run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from statistics import median

import pytest

from bench import limits
from bench.checkpoint import ModelShape, write_model
from bench.figures import Figure
from bench.sections.engine import DECODE_STEPS, WARM_STEPS, Decode, EngineBench
from tests.gpu.cards import CARDS

pytestmark = pytest.mark.gpu
SMALL = ModelShape(2, 256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=1024)
KV_BYTES = 8 << 30
REPEATS = 5
DECODE_BOUNDS = {1: "≥ 0.8", 64: "≥ 0.7"}  # of the 8 B model
PREFILL_BOUNDS = {8192: "≥ 0.7"}


@pytest.mark.parametrize("name", CARDS)
def test_figures(name, device, tmp_path, show):
    card = device == "cuda"
    shape = CARDS[name] if card else SMALL
    repeats = REPEATS if card else 1
    read = limits.read_rate(repeats, device)
    gemm = max(
        limits.gemm_rate(repeats, tokens, device, shape) for tokens in ((2048, 8192) if card else (256,))
    )
    path = write_model(tmp_path, shape, device=device)
    bench, backend = engine_of(path, shape, device)
    shutil.rmtree(path)  # the 8B model has 16 GB
    figures = [
        Figure("memory read", read / 1e9, "GB/s"),
        Figure("GEMM", gemm / 1e12, "TFLOP/s", note="bf16, the model's own shapes"),
    ]
    bounded = card and name.startswith("8B")
    for batch in (1, 16, 64, 256) if card else (1, 4):
        bound = DECODE_BOUNDS.get(batch, "") if bounded else ""
        figures += decode_figures(batch, bench.decode(batch, min(3, repeats)), shape, read, bound)
    for tokens in (2048, 8192, 32768) if card else (256,):
        seconds = median([bench.prompt_seconds(tokens) for _ in range(repeats + 1)][1:])
        bound = PREFILL_BOUNDS.get(tokens, "") if bounded else ""
        figures.append(prefill_figure(tokens, seconds, shape, gemm, bound))
    if card:
        figures += launches(bench)
    weights = (shape.linear_weights + 2 * shape.vocab * shape.hidden) / 1e6
    show(f"{name}: {backend}, {weights:.0f} M parameters in bf16", figures)
    assert all(figure.value > 0 for figure in figures)


def engine_of(path, shape: ModelShape, device: str) -> tuple[EngineBench, str]:
    from cluster.config.worker import EngineConfig
    from engine.build import load_model
    from engine.engine import Engine
    from engine.runner import ModelRunner

    kv_bytes = KV_BYTES if device == "cuda" else 64 << 20
    config = EngineConfig(model=path, dtype="bfloat16", device=device, kv_memory_bytes=kv_bytes, threads=1)
    runner = ModelRunner(load_model(config))
    runner.warm_up()
    return (
        EngineBench(Engine(runner, runner.config, secret=b"figures"), shape),
        runner.config.attention_backend,
    )


def decode_figures(
    batch: int, decode: Decode, shape: ModelShape, read: float, bound: str
) -> Sequence[Figure]:
    step_bytes = shape.decode_weight_bytes + batch * decode.context_tokens * shape.kv_bytes_per_token
    seconds, launched = decode.step_seconds, decode.forward_seconds * 1e3
    return [
        Figure(
            f"decode_bandwidth_fraction, batch {batch}",
            step_bytes / seconds / read,
            bound=bound,
            note=f"{seconds * 1e3:.3g} ms a step, {batch / seconds:.0f} tok/s; the host launches it in {launched:.2g} ms",
        )
    ]


def prefill_figure(tokens: int, seconds: float, shape: ModelShape, gemm: float, bound: str) -> Figure:
    attention = 2.0 * tokens * tokens * shape.heads * shape.head_dim * shape.layers
    operations = 2.0 * tokens * shape.linear_weights + attention
    return Figure(
        f"prefill_gemm_fraction, {tokens} tokens",
        operations / seconds / gemm,
        bound=bound,
        note=f"{seconds * 1e3:.3g} ms, {tokens / seconds:.0f} tok/s",
    )


def launches(bench: EngineBench) -> Iterator[Figure]:
    """Kernels and copies per decode step. Must come last, because the profiler slows what follows it."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        bench._decode(1)
    count = sum(
        event.count
        for event in seen.key_averages()
        if event.device_type == DeviceType.CUDA and not event.key.startswith("aten::")
    )
    steps = WARM_STEPS + DECODE_STEPS + 4
    yield Figure("launches of a decode step", count / steps, note="kernels and copies")
