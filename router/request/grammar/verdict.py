"""Whether one grammar of a client is allowed: it compiles, and its first masks are found in time.

Called within a process that its bounds may end (router/request/grammar/trial.py).
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

from cluster.errors import BatonError
from cluster.grammar.library import make_matcher, reason_of
from cluster.grammar.spec import GrammarSpec
from router.request.grammar import schema_walk

MASK_SECONDS = 0.1  # of CPU time, for one token
WALK_TOKENS = 8
WALK_SECONDS = 0.25
_NO_END = "NoExtensionBias"  # the library's word
# Before a grammar in Lark's syntax: it is to be refused if a match may begin with a line end. No grammar has this
# character.
NO_LINE_END = "\0"


def tried(tokenizer: Any, spec: GrammarSpec) -> tuple[str, str] | None:
    """Why the grammar is refused, and the limit that it exceeds."""
    if spec.kind == "lark" and spec.text.startswith(NO_LINE_END):
        return _line_end(tokenizer, GrammarSpec("lark", spec.text.removeprefix(NO_LINE_END)))

    def compiles(one: GrammarSpec) -> str:
        try:
            make_matcher(one, tokenizer)
        except BatonError as error:
            return error.message.removeprefix("grammar: ")
        return ""

    if spec.kind == "json_schema":
        refused = schema_walk.why_not(json.loads(spec.text), compiles)
        if refused is not None:
            return refused.message, refused.limit
    elif reason := compiles(spec):
        return reason, ""
    try:
        return _walked(make_matcher(spec, tokenizer), spec)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return "the library fails on it", ""


def _line_end(tokenizer: Any, spec: GrammarSpec) -> tuple[str, str] | None:
    """Why a match may begin with a line end, or why that cannot be found; None: it does not. The grammar is tried within
    another one: what it ignores may be there before a match, and not at an answer's begin."""
    within = f'start: "x" answer\nanswer: %lark {{\n{spec.text}\n}}\n'
    try:
        matcher = make_matcher(GrammarSpec("lark", within), tokenizer)
    except BatonError as error:
        return error.message, ""
    if not matcher.consume_tokens(tokenizer.tokenize_str("x")):
        return reason_of(matcher), ""
    line_end = tokenizer.tokenize_str("\n")
    return ("a line end may be its first character", "") if matcher.validate_tokens(line_end) else None


def _walked(matcher: Any, spec: GrammarSpec) -> tuple[str, str] | None:
    """The first masks, along tokens that are drawn at random."""
    draws, began = random.Random(spec.key), time.process_time()
    for _ in range(WALK_TOKENS):
        before = time.process_time()
        bits = matcher.compute_bitmask()
        allowed = [
            8 * place + bit for place, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1
        ]
        if matcher.is_error() or not allowed:
            return f"it allows no token: {_reason(matcher)}", ""
        filled = time.process_time()
        followed = matcher.consume_tokens([draws.choice(allowed)])
        if matcher.is_error():
            return f"a token that it allows cannot be followed: {_reason(matcher)}", ""
        if time.process_time() - before > MASK_SECONDS:
            return "the tokens that it allows take too long to find", f"{MASK_SECONDS:g} s for a token"
        if not followed or matcher.is_stopped() or filled - began > WALK_SECONDS:
            return None
    return None


def _reason(matcher: Any) -> str:
    reason = reason_of(matcher).splitlines()[0][:200]
    return "no answer ever ends that matches it" if reason == _NO_END else reason
