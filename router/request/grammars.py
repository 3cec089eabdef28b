"""Checks the grammars of requests before they are sent to workers: each is compiled once, in a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from cluster.errors import InvalidRequestError, ModelError, OverloadedError, UnsupportedFieldError
from cluster.grammar.library import make_tokenizer
from cluster.grammar.spec import GrammarSpec, Kind, why_too_long
from router.request.grammar_trial import RETRY_SECONDS, GrammarTrials
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

    async def check(self, tenant: str, *grammars: AskedGrammar) -> None:
        """Check the grammars of one request, the last of which has the others in it.

        Raises UnsupportedFieldError, or InvalidRequestError that names the place in the grammar; OverloadedError where
        there was no processor, or no turn, in time.
        """
        if not grammars:
            return
        if self.refusal:
            asked = grammars[0]
            raise UnsupportedFieldError(
                f"{asked.field}: this model has no structured output: {self.refusal}", field=asked.field
            )
        new = {one.spec.key: one.spec for one in grammars if one.spec.key not in self._checked}
        self._raise_refused(grammars)
        if new:
            await self._try(list(new.values()), tenant, grammars[-1].field)
            self._raise_refused(grammars)
        while len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)

    def _raise_refused(self, grammars: Sequence[AskedGrammar]) -> None:
        for one in grammars:
            if one.spec.key in self._checked:
                self._checked.move_to_end(one.spec.key)
                if (reason := self._checked[one.spec.key]) is not None:
                    raise type(reason)(f"{one.field}: {reason.message}", field=one.field, limit=reason.limit)

    async def _try(self, specs: list[GrammarSpec], tenant: str, field: str) -> None:
        """Remember what a process finds. Nothing is remembered where it finds nothing in time."""
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                refused = await self._threads.run(tenant, self._trials.refusal, specs)
        except TimeoutError:
            late = f"{field}: grammars wait longer than {CHECK_SECONDS:g} s to be compiled"
            raise OverloadedError(
                late, field=field, limit=f"{CHECK_SECONDS:g} s", retry_after_seconds=RETRY_SECONDS
            ) from None
        for spec in specs if refused is None else specs[: refused[0]]:
            self._checked[spec.key] = None
        if refused is not None:
            self._checked[specs[refused[0]].key] = refused[1]

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
