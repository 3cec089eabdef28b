"""Quality of weight formats: perplexity and most likely next tokens on held-out text, beside the same model in bf16.

The model is the one in out/bench-model (`python -m demo.train --size bench --out out/bench-model`), else the demo model.
No text was seen in training: first the files held out of the corpus, then some of the standard library's own tests,
which the corpus leaves out. Every format computes the same windows, so losses are compared window by window; an interval
is a bootstrap over windows.
"""

from __future__ import annotations

import ast
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bench import quantized_checkpoints
from bench.context import Context
from bench.figures import Figure, Section
from bench.sections.engine import load

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from engine.engine import Engine

TRAINED = Path("out/bench-model")
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "model"
WINDOW = 512
WINDOWS = 240  # 122,640 predicted tokens
RESAMPLES, LEVEL, SEED = 2_000, 0.95, 1
WITHIN = {8: "≤ 1", 4: "≤ 5"}  # bits → per cent of perplexity


class Form(NamedTuple):
    name: str
    bits: int
    model: Path
    settings: dict[str, Any]


class Measured(NamedTuple):
    """losses [windows]: cross-entropy in nats, summed over a window; best: the most likely next token at each position."""

    losses: NDArray[np.float64]
    best: Tensor
    weight_bytes: int


def run(context: Context) -> Section:
    model = TRAINED if TRAINED.exists() else SHIPPED
    windows = list(_windows(model, context.repeats(WINDOWS)))
    forms = [
        Form("int8 (W8A8)", 8, model, {"quantization": "int8"}),
        Form("FP8, groups of 128, rounded while loading", 8, model, {"quantization": "fp8"}),
        Form("4 bits, groups of 128, rounded while loading", 4, model, {"quantization": "int4"}),
    ]
    for name, form in quantized_checkpoints.FORMATS.items():
        target = context.out / "quality" / form.layout
        forms.append(
            Form(name, form.weights["num_bits"], quantized_checkpoints.write(model, target, form), {})
        )
    context.say(f"{model}: {len(windows):,} windows of {WINDOW} tokens")
    plain = measure(load(model, "cpu"), windows)
    figures = [Figure("perplexity, bf16", _perplexity(plain), "", "", f"{model.parent.name}/{model.name}")]
    for one in forms:
        context.say(one.name)
        figures += _figures(one, plain, measure(load(one.model, "cpu", **one.settings), windows))
    return Section("quality", "What weight formats cost", figures)


def measure(engine: Engine, windows: list[list[int]]) -> Measured:
    """Compute each window by itself, from an empty context."""
    from engine.build import weight_bytes
    from engine.plan import PlanItem, StepPlan

    runner = engine._runner
    losses, best = [], []
    for tokens in windows:
        blocks = list(range(-(-len(tokens) // runner.config.page_size)))
        item = PlanItem("w", tokens, 0, blocks, 0, len(tokens))
        logits = runner.execute(StepPlan([item], [])).float()[:-1]
        targets = torch.tensor(tokens[1:])
        losses.append(float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum")))
        best.append(logits.argmax(1))
    return Measured(np.array(losses), torch.cat(best), weight_bytes(runner.model_config, runner.config))


def _figures(form: Form, plain: Measured, found: Measured) -> list[Figure]:
    low, high = _interval(found.losses - plain.losses)
    loss = 100 * (_perplexity(found) / _perplexity(plain) - 1)
    agree = 100 * float((found.best == plain.best).float().mean())
    note = f"{low:.2f} to {high:.2f}; perplexity {_perplexity(found):.3f}"
    stored = (form.model / "model.safetensors").stat().st_size
    size = f"bf16 {plain.weight_bytes / 1e6:.1f} MB; the file {stored / 1e6:.1f} MB"
    return [
        Figure(f"perplexity lost, {form.name}", loss, "%", WITHIN[form.bits], note),
        Figure(f"same next token, {form.name}", agree, "%", "", f"of {len(plain.best):,}"),
        Figure(f"weights in memory, {form.name}", found.weight_bytes / 1e6, "MB", "", size),
    ]


def _perplexity(found: Measured) -> float:
    return math.exp(found.losses.mean() / (WINDOW - 1))


def _interval(more: NDArray[np.float64]) -> tuple[float, float]:
    """The bootstrap interval of the perplexity lost, in per cent; `more` [windows]: nats beyond bf16's."""
    source = np.random.default_rng(SEED)
    drawn = more[source.integers(0, len(more), (RESAMPLES, len(more)))].mean(1) / (WINDOW - 1)
    low, high = np.quantile(100 * np.expm1(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _windows(model: Path, count: int) -> Iterator[list[int]]:
    from tokenizers import Tokenizer

    from demo import corpus
    from demo.train import BOS, encode

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = encode(tokenizer, [*corpus.held_out(), *_library_tests()])
    each = WINDOW - 1  # beside <|bos|>
    for begin in range(0, min(len(tokens), count * each) - each + 1, each):
        yield [BOS, *(int(token) for token in tokens[begin : begin + each])]


def _library_tests() -> Iterator[str]:
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / "test").glob("test_*.py"))[::8]:
        try:
            text = path.read_text()
            ast.parse(text)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        yield text
