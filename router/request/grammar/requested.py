"""Checks the grammars of requests before they are sent to workers: each is compiled once for a tenant, in a process of its
own."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from cluster.errors import InvalidRequestError, ModelError, OverloadedError, UnsupportedFieldError
from cluster.fair_threads import FairThreads, call_on
from cluster.grammar.annotations import without_annotations
from cluster.grammar.library import make_tokenizer
from cluster.grammar.spec import GrammarSpec, Kind, why_choices_too_long, why_too_long, why_too_many_choices
from cluster.tenant_cache import TenantCache
from router.request.grammar.trial import RETRY_SECONDS, GrammarTrials
from router.request.grammar.verdict import NO_LINE_END
from router.text import written_numbers

Verdicts = Mapping[bytes, InvalidRequestError | None]  # by grammar; None: it is allowed
ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')
MAX_CHECKED = 1024  # grammars whose check is remembered, of all tenants
CHECK_SECONDS = 10.0
_BY_NUMBER = re.compile(r"\\u([0-9a-fA-F]{4})")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_NOT_FINITE = "has a number that is too large for a float, or none"


@dataclass(frozen=True)
class RequestedGrammar:
    """A grammar, and the name of the request's field that contains it."""

    field: str
    spec: GrammarSpec


@dataclass
class _Trial:
    """Grammars that wait for their turn, or are tried.

    `waiters`: requests of one tenant that wait for it; without any it is cancelled, if it has not begun.
    """

    keys: list[bytes]
    task: asyncio.Task[Verdicts]
    waiters: int = 0


class GrammarChecks:
    """Checks grammars for one model. `refusal`: why its requests cannot have a grammar; empty if they can."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos: tuple[int, ...]):
        self.refusal = ""
        self._checked = TenantCache[InvalidRequestError | None]()
        # By tenant and grammar: one that waits for the turns of another tenant could be delayed by it.
        self._trying: dict[tuple[str, bytes], _Trial] = {}
        # Grammars that take long have a queue and a process of their own: the others of all tenants wait for short trials.
        self._threads, self._long_threads = FairThreads(1, "grammars"), FairThreads(1, "long-grammars")
        self._trials = GrammarTrials(tokenizer_json, vocab_size, eos, short=True)
        self._long_trials = GrammarTrials(tokenizer_json, vocab_size, eos)
        try:
            make_tokenizer(tokenizer_json, vocab_size, eos)
        except ModelError as error:
            self.refusal = error.message

    async def check(self, tenant: str, *grammars: RequestedGrammar) -> None:
        """Check the grammars of one request, the last of which has the others in it.

        Raises UnsupportedFieldError, or InvalidRequestError that names the place in the grammar; OverloadedError where
        there was no processor, or no turn, in time; DrainingError once these checks are closed.
        """
        if not grammars:
            return
        if self.refusal:
            asked = grammars[0]
            raise UnsupportedFieldError(
                f"{asked.field}: this model has no structured output: {self.refusal}", field=asked.field
            )
        self._raise_refused(grammars, self._known(grammars, tenant))
        if all((tenant, one.spec.key) in self._checked for one in grammars):
            return
        field = grammars[-1].field
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await self._try(grammars, tenant)
        except OverloadedError as error:  # of all requests that wait for the same
            wait = error.retry_after_seconds
            raise OverloadedError(
                f"{field}: {error.message}", field=field, retry_after_seconds=wait
            ) from None
        except TimeoutError:
            limit = f"{CHECK_SECONDS:g} s"
            raise OverloadedError(
                f"{field}: grammars wait longer than {limit} to be compiled",
                field=field,
                limit=limit,
                retry_after_seconds=RETRY_SECONDS,
            ) from None

    async def with_known_begin(self, tenant: str, asked: RequestedGrammar) -> RequestedGrammar:
        """The grammar, marked if it is in Lark's syntax and no match of it begins with a line end. Raises OverloadedError,
        DrainingError as `check` does."""
        if asked.spec.kind != "lark" or self.refusal:
            return asked
        question = GrammarSpec("lark", NO_LINE_END + asked.spec.text)
        try:
            await self.check(tenant, replace(asked, spec=question))
        except InvalidRequestError:  # it may, or is refused by itself, which its own check will say
            return asked
        return replace(asked, spec=replace(asked.spec, bare=True))

    def _known(self, grammars: Sequence[RequestedGrammar], tenant: str) -> Verdicts:
        keys = [one.spec.key for one in grammars]
        return {key: self._checked[tenant, key] for key in keys if (tenant, key) in self._checked}

    @staticmethod
    def _raise_refused(grammars: Sequence[RequestedGrammar], found: Verdicts) -> None:
        for one in grammars:
            if (reason := found.get(one.spec.key)) is not None:
                raise type(reason)(f"{one.field}: {reason.message}", field=one.field, limit=reason.limit)

    async def _try(self, grammars: Sequence[RequestedGrammar], tenant: str) -> None:
        """Try what is not known yet, together with the tenant's requests that ask for the same."""
        known = dict(self._known(grammars, tenant))  # a request may have more than stay remembered
        while new := {one.spec.key: one.spec for one in grammars if one.spec.key not in known}:
            if mine := [spec for key, spec in new.items() if (tenant, key) not in self._trying]:
                self._begin(mine, tenant)
            trials = {id(trial): trial for key in new for trial in [self._trying[tenant, key]]}.values()
            for trial in trials:
                trial.waiters += 1
            try:
                await asyncio.wait([trial.task for trial in trials])
            finally:
                for trial in trials:
                    self._leave(trial, tenant)
            for trial in trials:  # a refusal that is not remembered is the answer of all that waited for it
                known |= trial.task.result()
            self._raise_refused(grammars, known)
            known |= self._known(grammars, tenant)

    def _begin(self, specs: list[GrammarSpec], tenant: str) -> None:
        task = asyncio.create_task(self._tried(specs, tenant))
        trial = _Trial([spec.key for spec in specs], task)
        self._trying |= dict.fromkeys(((tenant, key) for key in trial.keys), trial)
        task.add_done_callback(lambda _: self._forget(trial, tenant))

    async def _tried(self, specs: list[GrammarSpec], tenant: str) -> Verdicts:
        loop = asyncio.get_running_loop()
        found = await self._threads.run(tenant, self._find, self._trials, specs, tenant, loop)
        if found is None:
            found = await self._long_threads.run(tenant, self._find, self._long_trials, specs, tenant, loop)
        return found or {}

    def _leave(self, trial: _Trial, tenant: str) -> None:
        trial.waiters -= 1
        if not trial.waiters and not trial.task.done():
            trial.task.cancel()
            self._forget(trial, tenant)  # before another request joins it

    def _forget(self, trial: _Trial, tenant: str) -> None:
        for key in trial.keys:
            if self._trying.get((tenant, key)) is trial:
                del self._trying[tenant, key]
        if trial.task.done() and not trial.task.cancelled():
            trial.task.exception()  # without a caller that takes it, asyncio would log it as lost

    def _find(
        self, trials: GrammarTrials, specs: list[GrammarSpec], tenant: str, loop: asyncio.AbstractEventLoop
    ) -> Verdicts | None:
        """Try grammars, in a thread. None: the trial was too short. What is found is remembered even if no request
        waits for it any more."""
        left = [spec for spec in specs if (tenant, spec.key) not in self._checked]
        if not left:  # a trial that the tenant's requests had left ended meanwhile
            return {}
        found = trials.find(left)
        passed: Verdicts = {spec.key: None for spec in left[: found.passed]}
        verdicts = dict(passed)
        if found.refused is not None:
            verdicts[left[found.refused].key] = InvalidRequestError(found.reason, limit=found.limit)
        call_on(loop, lambda: self._remember(tenant, verdicts if found.lasting else passed))
        return None if found.unfinished else verdicts

    def _remember(self, tenant: str, verdicts: Verdicts) -> None:
        for key, verdict in verdicts.items():
            self._checked[tenant, key] = verdict
            if len(self._checked) > MAX_CHECKED:
                self._checked.drop_oldest_of_largest(len)

    def close(self) -> None:
        for threads in (self._threads, self._long_threads):
            threads.close()
        for trials in (self._trials, self._long_trials):
            trials.close()


def spec_of(kind: Kind, text: str) -> GrammarSpec:
    """Return the grammar of a text. Raises ValueError if it is too long."""
    if reason := why_too_long(text):
        raise ValueError(reason)
    return GrammarSpec(kind, text)


def json_spec(schema: object) -> GrammarSpec:
    """Return the grammar of a JSON schema, or of its text, which has no more bytes than a grammar, without annotations
    that the library refuses. Raises ValueError."""
    if isinstance(schema, str):
        # The scan of a body counts a text as one element, whatever JSON is in it.
        if reason := why_too_long(schema):
            raise ValueError(reason)
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            if written_numbers.is_too_large(error):
                raise ValueError(_NOT_FINITE) from None
            raise ValueError(f"must be a JSON schema, or its text: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError("must be a JSON schema: an object, true or false")
    try:
        text = orjson.dumps(schema).decode()
    except TypeError:
        raise ValueError("is nested too deeply, or has a value that JSON does not have") from None
    if reason := why_too_long(text):  # before it is walked: a body has room for a million numbers
        raise ValueError(reason)
    if "null" in text and _has_infinite(schema):  # which became null
        raise ValueError(_NOT_FINITE)
    return GrammarSpec("json_schema", without_annotations(text))


def _has_infinite(schema: object) -> bool:
    """Whether a number in it is infinite or none."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float):
            if not math.isfinite(one):
                return True
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
    return False


def choice_spec(texts: object) -> GrammarSpec:
    """Raises ValueError."""
    wrong = ValueError("must be a non-empty list of texts")
    if not isinstance(texts, list) or not texts:
        raise wrong
    if reason := why_too_many_choices(len(texts)):  # counted before they are looked at
        raise ValueError(reason)
    if not set(map(type, texts)) <= {str}:
        raise wrong
    if reason := why_choices_too_long(texts):
        raise ValueError(reason)
    return spec_of("choice", GrammarSpec.of_choices(texts).text)


def text_spec(kind: Kind, value: Any) -> GrammarSpec:
    """Raises ValueError."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    return spec_of(kind, value)


def lark_spec(value: Any) -> GrammarSpec:
    """Return the grammar of a text in Lark's syntax. Raises ValueError."""
    spec = text_spec("lark", value)
    if spec.text.lstrip().startswith("{"):  # which the library takes for a grammar in its own form
        raise ValueError("must be in Lark's syntax, not JSON")
    if _GBNF_RULE.search(spec.text):  # vLLM takes both
        raise ValueError(
            "must be in Lark's syntax, with rules `name: …` and one of them `start`; not in GBNF's, `name ::= …`"
        )
    if spec.text.startswith(NO_LINE_END):  # which would ask something else about it
        raise ValueError("must be in Lark's syntax, which has no U+0000")
    if "%json" in spec.text and "x-guidance" in _BY_NUMBER.sub(_character, spec.text):
        raise ValueError("has x-guidance, which is not supported")
    return spec


def _character(found: re.Match[str]) -> str:
    return chr(int(found[1], 16))
