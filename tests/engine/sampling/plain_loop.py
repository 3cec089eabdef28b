"""The answer to a request, one token at a time: the model's logits, the operations of tests/harness/sampling_oracle.py,
the grammar's mask bit by bit. No code of the engine is used but the grammar library."""

from __future__ import annotations

import numpy as np

from engine.compiled_grammar import CompiledGrammar, Words
from engine.request import EngineRequest
from engine.sampling.grammar.base import word_count
from tests.engine.sampling.grammar.grammars import EOS, RandomRunner
from tests.harness import sampling_oracle as oracle
from tests.harness.model_text import VOCAB


def answer_of(
    request: EngineRequest, compiled: CompiledGrammar | None, choice: int = 0
) -> tuple[list[int], bool]:
    """The tokens of one choice behind the output that the request has, and whether none was left to end it with."""
    params = request.sampling
    prompt, output = list(request.prompt_tokens), list(request.output_tokens)
    given, ids = len(output), set(range(VOCAB))
    matcher = None if compiled is None else compiled.matcher()
    if matcher is not None:
        matcher.accept(output)
    while len(output) < params.max_tokens:
        tokens = prompt + output
        raw = RandomRunner.row(None, tokens).double().numpy()  # type: ignore[arg-type]
        masked: set[int] = set()
        if matcher is not None:
            words: Words = np.zeros(word_count(VOCAB), dtype=np.int64)
            matcher.fill(words)
            masked = {token for token in ids if not int(words[token // 64]) >> token % 64 & 1}
        ends = {EOS} if matcher is not None or not params.ignore_eos else set()
        early = len(output) + 1 < params.min_tokens
        banned = ends if early else set()
        free = oracle.adjusted(raw, params, tokens, len(prompt), sorted(masked))
        if matcher is not None and set(np.flatnonzero(free > -np.inf)) == {EOS}:
            banned = set()  # the grammar's end goes before min_tokens
        row = oracle.adjusted(raw, params, tokens, len(prompt), sorted(masked | banned))
        if row.max() == -np.inf:
            return output[given:], True
        token = oracle.next_token(row, params, request.first_choice + choice, len(tokens))
        output.append(token)
        if token in ends:
            break
        if matcher is not None:
            matcher.accept([token])
    return output[given:], False
