"""Compiles grammars by llguidance, with bounds of its work. llguidance is imported when it is first needed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.errors import InvalidRequestError, ModelError
from cluster.grammar.rewriting import ESCAPES_NOTHING, escapes_nothing, for_library
from cluster.grammar.spec import MAX_GRAMMAR_CHOICES, GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Compact JSON; no keyword is ignored, and oneOf is not weakened to anyOf. No \u: the library takes a name that is written
# with it for another one, so `{"a":1,"\u0061":2}` would match a schema for `a` that it does not validate against. These
# options override those that a schema may set itself.
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "whitespace_pattern": "",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
}

MAX_LEXER_STATES = 50_000
STEP_LEXER_FUEL = 200_000  # of the lexer, with a mask and the tokens that follow it
ITEMS_AROUND = 32  # of the rules around a list of choices, for reasoning and calls: about ten
_NO_TOKEN = 2**32 - 1
_COST = re.compile(r'"(\w+)": (\d+)')
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def parser_limits(*, measurable: bool = False) -> LLParserLimits:
    """Return the bounds of compiling and of each step, in the library's units: at most about 0.1 s and 10 ms, and 20 MB of
    states, which hold an answer with 45,000 characters in strings of a greatest length. `measurable`: errors tell what
    `costs_of` reads."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=MAX_GRAMMAR_CHOICES + 1 + ITEMS_AROUND,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=50_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=100_000,
        verbose_errors=measurable,
    )


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos: tuple[int, ...]) -> LLTokenizer:
    """Make the library's tokenizer. Raises ModelError with the reason if the library cannot use this one."""
    from llguidance import LLTokenizer

    if not eos:
        raise ModelError("the model names no end-of-sequence token", field="eos_token_id")
    try:
        marked = _with_special(tokenizer_json, eos)
        return LLTokenizer(marked, n_vocab=vocab_size, eos_token=sorted(set(eos)))
    except Exception as error:  # the library raises plain ones
        raise ModelError(f"tokenizer.json: {_first_line(error)}", field="tokenizer.json") from error


def _with_special(tokenizer_json: str, eos: tuple[int, ...]) -> str:
    """Return tokenizer.json with the end-of-sequence tokens marked as special: plain ones are allowed wherever their text
    is."""
    raw = json.loads(tokenizer_json)
    added = raw.setdefault("added_tokens", [])
    known = {one["id"]: one for one in added}
    texts = {token: text for text, token in raw["model"]["vocab"].items()} if set(eos) - set(known) else {}
    for token in eos:
        if token in known:
            known[token]["special"] = True
        elif token in texts:
            added.append({"id": token, "content": texts[token], "special": True, **_PLAIN})
    added.sort(key=lambda one: one["id"])
    return json.dumps(raw)


def make_matcher(spec: GrammarSpec, tokenizer: LLTokenizer, *, measurable: bool = False) -> LLMatcher:
    """Make a matcher at the beginning of an answer; `costs_of` takes `measurable` ones. Raises InvalidRequestError with
    the library's reason."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(
            tokenizer, library_text(spec), log_level=0, limits=parser_limits(measurable=measurable)
        )
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # no Exception, and would end the thread
            raise
        raise _refused("the library fails on it") from error
    if matcher.is_error():
        raise _refused(matcher.get_error())
    return matcher


def library_text(spec: GrammarSpec) -> str:
    """Return the grammar in the library's own form. Raises InvalidRequestError."""
    from llguidance import LLMatcher

    try:
        match spec.kind:
            case "json_schema":
                schema = for_library(_object_schema(spec.text))
                return LLMatcher.grammar_from_json_schema(schema, overrides=_overrides())
            case "regex":
                if escapes_nothing(spec.text):
                    raise ValueError(ESCAPES_NOTHING)
                return LLMatcher.grammar_from_regex(spec.text)
            case "choice":
                texts = json.loads(spec.text)
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))
            case "lark":
                return LLMatcher.grammar_from_lark(spec.text)
    except (TypeError, ValueError) as error:
        raise _refused(str(error)) from error


def reason_of(matcher: LLMatcher) -> str:
    """Return why a matcher has failed or ended, in the library's words."""
    reason, _, _ = str(matcher.get_error() or matcher.stop_reason()).partition("\n<")  # the matcher's state
    return reason


def lexer_failure(matcher: LLMatcher, token: int) -> str:
    """Why the lexer has failed that the copies of a matcher share; empty if it has not. Once it has, each of them fails:
    some say that the grammar does not allow a token which it allows. `token`: any but an end-of-sequence token."""
    copy = matcher.deep_copy()
    copy.consume_tokens([token])
    reason = reason_of(copy)
    return reason if reason.startswith(("lexer error", "panic")) else ""


def is_full(reason: str) -> bool:
    """Whether a lexer has failed because it has as many states as it may have."""
    return "too many states" in reason


def is_mismatch(matcher: LLMatcher) -> bool:
    """Whether a matcher has failed because its grammar does not allow a token; else it has met a limit of the library."""
    reason = reason_of(matcher)
    return "doesn't satisfy the grammar" in reason or "parser stopped" in reason


class Costs(NamedTuple):
    """Resources that a matcher has used until its last mask, in the library's units."""

    lexer_cost: int  # of the states of the lexer, which copies of one matcher share, and add to
    all_items: int  # of the parser for this answer
    rows: int  # in which they are, about one for each byte


def costs_of(matcher: LLMatcher) -> Costs:
    """The costs of a `measurable` matcher. The library tells them in errors alone, so a copy is brought to fail."""
    failing = matcher.deep_copy()
    failing.consume_tokens([_NO_TOKEN])
    found = dict(_COST.findall(str(failing.get_error())))
    return Costs(*(int(found.get(name, 0)) for name in Costs._fields))


def _overrides() -> Any:  # Any: mypy may run where the library is not installed
    return JSON_OPTIONS


def _object_schema(text: str) -> str:
    """Wrap true and false: the library accepts options only with a schema that is an object."""
    return '{"allOf":[' + text + "]}" if text.strip() in ("true", "false") else text


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"grammar: {_first_line(reason)}", field="grammar")


def _first_line(reason: object) -> str:
    lines = str(reason).strip().splitlines()
    return " ".join(line.strip() for line in lines)[:300] if lines else "it cannot be used"
