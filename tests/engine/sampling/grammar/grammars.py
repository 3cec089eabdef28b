"""Engines with a random model that follow grammars, and checks of what they answer."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.grammar.spec import GrammarSpec
from engine.engine import Engine
from engine.request import EngineRequest, FinishReason, RequestDone, SamplingParams, TokenOutput
from engine.sampling.device_sampler import DeviceSampler
from tests.engine.fake_model import FakeRunner
from tests.harness.model_text import VOCAB, make_model_text
from tests.harness.schemas import Schema, validate

GRAMMAR_CONTEXT = 640
EOS = 2

TABLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 150}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


class RandomRunner(FakeRunner):
    """Its logits are random numbers of the whole sequence."""

    def row(self, tokens: list[int]) -> Tensor:
        digest = hashlib.blake2b(struct.pack(f"<{len(tokens)}I", *tokens), digest_size=7).digest()
        draws = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(VOCAB, generator=draws) * 3


def grammar_engine(model: Path, *, device: bool = False, blocks: int = 4000, **settings: Any) -> Engine:
    """`model`: a directory with a tokenizer (make_model_text)."""
    if not (model / "tokenizer.json").exists():
        make_model_text(model)
    runner = RandomRunner(blocks, model=model, context=GRAMMAR_CONTEXT, vocab=VOCAB, **settings)
    engine = Engine(runner, runner.config, secret=b"g")
    engine._drafter.gate = None
    if device:
        engine._outputs._sampler = DeviceSampler(torch.device("cpu"))
    return engine


def json_schema(schema: Schema) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def grammar_request(name: str, grammar: GrammarSpec | None, **more: Any) -> EngineRequest:
    fields = {field: more.pop(field) for field in ("n", "output_tokens", "prefill_only") if field in more}
    params = SamplingParams(**{"max_tokens": 300, "seed": len(name), **more})
    return EngineRequest(name, [3, 4, 5, len(name)], params, grammar, **fields)


class Answers:
    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[TokenOutput]] = {}
        self.done: dict[str, RequestDone] = {}

    def ids(self, name: str, choice: int = 0) -> list[int]:
        return [token.token_id for token in self.tokens[name, choice]]

    def error(self, name: str) -> Exception | None:
        return self.done[name].error

    def text(self, name: str, choice: int = 0) -> str:
        """Without the end-of-sequence token."""
        ids = self.ids(name, choice)
        return text_of(ids[:-1] if ids[-1] == EOS else ids)

    def finish(self, name: str, choice: int = 0) -> FinishReason | None:
        return self.tokens[name, choice][-1].finish


def serve(engine: Engine, *requests: EngineRequest, answers: Answers | None = None) -> Answers:
    answers = answers or Answers()
    for request in requests:
        engine.add(request)
    for _ in range(10_000):
        if not engine.has_work:
            engine.check_integrity()
            return answers
        output = engine.step()
        for token in output.tokens:
            answers.tokens.setdefault((token.request_id, token.choice), []).append(token)
        answers.done |= {done.request_id: done for done in output.done}
    raise AssertionError("the engine does not end")


def hand_over(prefill: Engine, decode: Engine, request: EngineRequest) -> list[int]:
    """What follows the output that `request` has: its first token drawn by one engine, the others by the other."""
    prefill.add(replace(request, prefill_only=True))
    while not (first := prefill.step().tokens):
        pass
    prefill.abort(request.request_id)
    reserved = decode.reserve(request, [], 64)
    decode._runner.store(reserved.block_ids, 0, request.prompt_tokens + request.output_tokens)  # type: ignore[attr-defined]
    decode.commit(request.request_id, first)
    return [token.token_id for token in first] + serve(decode).ids(request.request_id)


def text_of(ids: list[int]) -> str:
    """Of the byte-level tokenizer of tests/harness/model_text.py: its other tokens are their own text."""
    return b"".join(_piece(token) for token in ids).decode()


def _pieces() -> list[bytes]:
    shown = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # GPT-2's bytes that are their own characters
    rest = [byte for byte in range(256) if byte not in shown]
    return [b"<pad>", b"<s>", b"</s>", *(bytes([byte]) for byte in shown + rest)]


_PIECES = _pieces()


def _piece(token: int) -> bytes:
    return _PIECES[token] if token < len(_PIECES) else f"<{token}>".encode()


def tokens_of(text: str) -> list[int]:
    return [_PIECES.index(bytes([byte])) for byte in text.encode()]


def check_json(answers: Answers, name: str, schema: Schema, choice: int = 0) -> None:
    """An answer that has ended by itself is valid."""
    assert answers.error(name) is None, answers.error(name)
    assert answers.finish(name, choice) is FinishReason.STOP, answers.text(name, choice)
    validate(answers.text(name, choice), schema)


def bitmap(ids: list[int]) -> bytes:
    """`allowed_tokens` of these ids."""
    found = 0
    for token in ids:
        found |= 1 << token
    return found.to_bytes(max(ids) // 8 + 1, "little")


# No answer needs them: after a comma or a bracket of `ages` other digits are left
UNUSED, BAD_WORDS = tokens_of("56789xyz"), [",1", "[1", "ab", "cde", "w"]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": -2.0},
    "min_tokens": {"min_tokens": 250},
    "ignore_eos": {"ignore_eos": True},
    "logit_bias": {"logit_bias": {EOS: 100.0, 3: -100.0, 200: 100.0}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop_token_ids": {"stop_token_ids": (191, 192), "min_tokens": 3},  # bytes that JSON has only escaped
    "seed": {"seed": 2**63 + 5},
    "allowed_tokens": {"allowed_tokens": bitmap([token for token in range(300) if token not in UNUSED])},
    "bad_words": {"bad_words": tuple(tuple(tokens_of(word)) for word in BAD_WORDS)},
}
