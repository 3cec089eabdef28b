"""A mixture of experts on one thread: decode beside the bandwidth that the weights of a token's experts need."""

from __future__ import annotations

from bench import checkpoint
from bench.checkpoint import ModelShape
from bench.context import Context
from bench.figures import Figure, Section
from bench.sections.engine import BATCH, EngineBench, load

SHAPE = ModelShape(layers=12, intermediate=512, experts=64, experts_per_token=8)  # 2.6 GB


def run(context: Context) -> Section:
    model = checkpoint.write(context.out / "experts", SHAPE).absolute()
    bench = EngineBench(load(model, "cpu"), SHAPE)
    single, batch = (bench.decode(size, context.repeats(5)) for size in (1, BATCH))
    step_bytes = SHAPE.decode_weight_bytes + single.context_tokens * SHAPE.kv_bytes_per_token
    fraction = step_bytes / single.step_seconds / context.limits.read_bytes
    found = [
        Figure("decode_bandwidth_fraction", fraction, "", "≥ 0.7", "batch 1, weights of the chosen experts"),
        Figure("decode step, batch 1", single.step_seconds * 1e3, "ms", "", f"{step_bytes / 1e6:.0f} MB"),
        Figure("decode, batch 16", BATCH / batch.step_seconds, "tok/s", "", "128 tokens of prompt each"),
    ]
    return Section("experts", "A mixture of 64 experts, 8 for each token", found)
