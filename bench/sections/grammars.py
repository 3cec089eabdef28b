"""Structured output: compiling a grammar, the mask of a step's row, and what masks add to steps of 16 requests.

Vocabularies of 4,096 tokens (the demo model's) and of 131,072, whose tokens are learnt from the Python files of this
installation. Masks are those along random answers, one token of those allowed drawn at each position.

Steps are timed in pairs of batches on one engine, one whose 16 requests each follow a schema, one without, both drawn at
temperature 1. Masks are filled on a thread of their own while the step is computed, so that on one thread of the engine
they need a second core.
"""

from __future__ import annotations

import json
import random
import statistics
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.checkpoint import EOS, SHAPE, write_model
from bench.figures import Figure, Section
from bench.pairs.ratios import interval
from bench.sections.engine import load
from cluster.grammar.spec import GrammarSpec

if TYPE_CHECKING:
    from bench.context import Context
    from engine.compiled_grammar import CompiledGrammar
    from engine.engine import Engine

PAIRS = 9
BATCH, PROMPT, STEPS, WARM_STEPS = 16, 16, 48, 4
LARGE = 131_072
TEXT_BYTES = 100 << 20  # of which the large vocabulary is learnt
WALKS, WALK_TOKENS = 10, 80
DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"


def run(context: Context) -> Section:
    figures: list[Figure] = []
    for tokenizer in (DEMO / "tokenizer.json", _large_tokenizer(context.out / "large-vocabulary.json")):
        vocab = len(json.loads(tokenizer.read_text())["model"]["vocab"])
        eos = 2 if tokenizer.parent == DEMO else vocab - 1
        model = _model(context.out / f"vocabulary-{vocab}", tokenizer, vocab, eos)
        figures += _library_figures(model, vocab, eos, context.repeats(WALKS))
        figures.append(_step_figure(load(model, "cpu"), vocab, context.repeats(PAIRS)))
    return Section("grammars", "Structured output", figures)


def _shapes() -> dict[str, GrammarSpec]:
    """Grammars of common forms. The arrays are longer than any answer here."""
    text, whole = {"type": "string"}, {"type": "integer"}
    item = _object(name=text, amount=whole, kind={"enum": ["new", "used", "unknown"]})
    call = _object(
        city=text, unit={"enum": ["celsius", "fahrenheit"]}, days={"anyOf": [whole, {"type": "null"}]}
    )
    schemas: dict[str, Any] = {
        "items": {"type": "array", "items": item, "minItems": 500},
        "nested": _object(person=_object(name=text, addresses={"type": "array", "items": item}), note=text),
        "calls": {"type": "array", "items": _object(name={"const": "weather"}, arguments=call)},
        "any JSON": {"type": "object"},
    }
    found = {name: GrammarSpec("json_schema", json.dumps(schema)) for name, schema in schemas.items()}
    found["regex"] = GrammarSpec("regex", r"([A-Z][a-z]{2,12} ){4}\+[0-9]{1,3} [0-9]{3}-[0-9]{4,9}")
    found["choice"] = GrammarSpec.of_choices(f"choice {number}" for number in range(100))
    return found


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _library_figures(model: Path, vocab: int, eos: int, walks: int) -> Iterator[Figure]:
    from engine.sampling.grammar.registry import backend_for

    backend = backend_for(model, vocab, (eos,))
    began = time.perf_counter()
    backend.compile(GrammarSpec("regex", "a"))
    yield Figure(f"reading the tokenizer, {vocab} tokens", time.perf_counter() - began, "s", "", "once")
    compiled = {name: [_compile(backend, spec) for _ in range(5)] for name, spec in _shapes().items()}
    times = {name: statistics.median(seconds for seconds, _ in some) * 1e3 for name, some in compiled.items()}
    slowest = max(times, key=times.__getitem__)
    note = f"longest of {len(times)}: {slowest}, {times[slowest]:.1f} ms"
    yield Figure(f"compiling, {vocab} tokens", statistics.median(times.values()), "ms", "", note)
    source = random.Random(0)
    masks = [
        seconds
        for some in compiled.values()
        for _ in range(walks)
        for seconds in _walk(some[0][1], vocab, eos, source)
    ]
    p99 = statistics.quantiles(masks, n=100)[98] * 1e6
    note = f"p99 {p99:.0f} µs, longest {max(masks) * 1e6:.0f}; {len(masks)} masks"
    yield Figure(f"mask of a row, {vocab} tokens", statistics.median(masks) * 1e6, "µs", "", note)


def _compile(backend: Any, spec: GrammarSpec) -> tuple[float, CompiledGrammar]:
    began = time.perf_counter()
    compiled = backend.compile(spec)
    return time.perf_counter() - began, compiled


def _walk(grammar: CompiledGrammar, vocab: int, eos: int, source: random.Random) -> Iterator[float]:
    """Seconds of each mask along a random answer."""
    from engine.sampling.grammar.base import word_count

    matcher, words = grammar.matcher(), np.zeros(word_count(vocab), dtype=np.int64)
    for _ in range(WALK_TOKENS):
        began = time.perf_counter()
        matcher.fill(words)
        yield time.perf_counter() - began
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab])
        if (token := int(source.choice(allowed))) == eos:
            return
        matcher.accept([token])


def _step_figure(engine: Engine, vocab: int, pairs: int) -> Figure:
    grammar = _shapes()["items"]
    ratios, seconds = list[float](), list[float]()
    for number in range(pairs + 1):
        order = (grammar, None) if number % 2 else (None, grammar)
        taken = {spec is not None: _seconds(engine, spec, number) for spec in order}
        if number:  # the first is not counted
            ratios.append(taken[True] / taken[False])
            seconds.append(taken[False] / STEPS)
    low, high = interval(ratios)
    plain = statistics.median(seconds) * 1e3
    note = f"{plain:.1f} ms without; {low:.3f} to {high:.3f}, {pairs} pairs"
    name = f"ITL with masks / without, batch {BATCH}, {vocab} tokens"
    return Figure(name, statistics.median(ratios), "×", "≤ 1.05", note)


def _seconds(engine: Engine, grammar: GrammarSpec | None, seed: int) -> float:
    """Seconds of `STEPS` decode steps of 16 requests."""
    from engine.request import EngineRequest, SamplingParams

    source = random.Random(seed)
    for number in range(BATCH):
        sampling = SamplingParams(
            temperature=1.0, seed=seed * BATCH + number, max_tokens=WARM_STEPS + STEPS + 2, ignore_eos=True
        )
        prompt = [source.randrange(300, 4000) for _ in range(PROMPT)]
        engine.add(EngineRequest(f"bench-{number}", prompt, sampling, grammar))
    for _ in range(WARM_STEPS):
        engine.step()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    taken = time.perf_counter() - began
    while engine.has_work:
        engine.step()
    return taken


def _model(directory: Path, tokenizer: Path, vocab: int, eos: int) -> Path:
    """The bench's model with another vocabulary, written once."""
    done = directory / ".complete"
    if not done.exists():
        write_model(directory, replace(SHAPE, vocab=vocab))
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        (directory / "tokenizer.json").write_text(tokenizer.read_text())
        done.touch()
    return directory.absolute()


def _large_tokenizer(file: Path) -> Path:
    """Byte-level BPE of `LARGE` tokens, the last one the end; learnt once, in about a minute."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=LARGE - 1, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator(_texts(), trainer)
        raw = json.loads(made.to_str())
        raw["model"]["vocab"][EOS] = len(raw["model"]["vocab"])
        file.write_text(json.dumps(raw))
    return file


def _texts() -> Iterator[str]:
    size = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = file.read_text(errors="replace")
        yield text
        if (size := size + len(text)) > TEXT_BYTES:
            return
