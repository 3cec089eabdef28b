"""Checks the grammars of requests before they are sent to workers: each is compiled once, in a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from cluster.errors import DeadlineError, InvalidRequestError, ModelError, UnsupportedFieldError
from cluster.grammar.library import make_tokenizer
from cluster.grammar.spec import GrammarSpec, Kind, why_too_long
from router.request.grammar_trial import GrammarTrials
from router.text.fair_threads import FairThreads

ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')
MAX_CHECKED = 1024  # grammars whose check is remembered
CHECK_SECONDS = 10.0


@dataclass(frozen=True)
class AskedGrammar:
    """A grammar, and the name of the request's field that contains it."""

    field: str
    spec: GrammarSpec


class GrammarChecks:
    """Checks grammars for one model. `refusal`: why its requests cannot have a grammar; empty if they can."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos: tuple[int, ...]):
        self.refusal = ""
        self._checked = OrderedDict[bytes, InvalidRequestError | None]()
        self._threads = FairThreads(1, "grammars")
        self._trials = GrammarTrials(tokenizer_json, vocab_size, eos)
        try:
            make_tokenizer(tokenizer_json, vocab_size, eos)
        except ModelError as error:
            self.refusal = error.message

    async def check(self, asked: AskedGrammar, tenant: str) -> None:
        """Raises UnsupportedFieldError, or InvalidRequestError that names the place in the grammar; DeadlineError."""
        if self.refusal:
            raise UnsupportedFieldError(
                f"{asked.field}: this model has no structured output: {self.refusal}", field=asked.field
            )
        key = asked.spec.key
        if key not in self._checked:
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    self._checked[key] = await self._threads.run(tenant, self._trials.reason, asked.spec)
            except TimeoutError:
                late = f"{asked.field}: it was not compiled within {CHECK_SECONDS:g} s"
                raise DeadlineError(late, field=asked.field, limit=f"{CHECK_SECONDS:g} s") from None
            while len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        else:
            self._checked.move_to_end(key)
        if (reason := self._checked[key]) is not None:
            raise type(reason)(f"{asked.field}: {reason.message}", field=asked.field, limit=reason.limit)

    def close(self) -> None:
        self._threads.close()
        self._trials.close()


def spec_of(kind: Kind, text: str) -> GrammarSpec:
    """Return the grammar of a text. Raises ValueError if it is too long."""
    if reason := why_too_long(text):
        raise ValueError(reason)
    return GrammarSpec(kind, text)


def json_spec(schema: object) -> GrammarSpec:
    """Return the grammar of a JSON schema, or of its text. Raises ValueError."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON schema") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError("must be a JSON schema: an object, true or false")
    try:
        return spec_of("json_schema", orjson.dumps(schema).decode())
    except TypeError:
        raise ValueError("is nested too deeply, or has a value that JSON does not have") from None


def choice_spec(texts: object) -> GrammarSpec:
    """Raises ValueError."""
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise ValueError("must be a non-empty list of texts")
    return spec_of("choice", GrammarSpec.of_choices(texts).text)


def text_spec(kind: Kind, value: Any) -> GrammarSpec:
    """Raises ValueError."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    return spec_of(kind, value)
