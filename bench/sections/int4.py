"""4-bit weights (W4A16, groups of 64) beside bf16 on one thread, as bench/sections/int8 does it."""

from __future__ import annotations

from bench import quantized_checkpoints
from bench.checkpoint import SHAPE
from bench.context import Context
from bench.figures import Section
from bench.sections.engine import EngineBench, load
from bench.sections.int8 import PAIRS, figures

BOUNDS = ("≥ 2.2", "", "")


def run(context: Context) -> Section:
    (form,) = (one for one in quantized_checkpoints.FORMATS.values() if one.weights["num_bits"] == 4)
    stored = quantized_checkpoints.write(context.model, context.out / "int4", form)
    plain, packed = (EngineBench(load(model, "cpu"), SHAPE) for model in (context.model, stored))
    found = figures(plain, packed, context.repeats(PAIRS), "4 bits", BOUNDS)
    return Section("int4", "4-bit weights beside bf16", found)
