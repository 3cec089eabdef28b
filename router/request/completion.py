"""A request as both frontends pass it on, and the results of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from cluster.security.keys import NO_LIMITS, RateLimits
from router.link.token import Token
from router.request.answer_parts import AnswerParser, Part
from router.text.stop import StopStrings
from wire import common_pb2, inference_pb2

FinishReason = Literal["stop", "length", "tool_calls"]


class ParserSource(Protocol):
    """How the answers of a request are parsed: router/text/parsers has the formats."""

    @property
    def name(self) -> str:
        """The name of the way of parsing: routers that parse with the same one show a resumed answer's rest in the same
        parts."""
        ...

    @property
    def marker_texts(self) -> Mapping[int, str]:
        """Special tokens, which have no text in answers, that the parser reads beside the text: their own texts by id."""
        ...

    def parser(self) -> AnswerParser:
        """A new parser, for one choice."""
        ...


@dataclass(frozen=True)
class Completion:
    """A validated request: workers accept every value in it."""

    request_id: str
    model: str
    prompt_tokens: list[int]
    sampling: common_pb2.SamplingParams
    grammar: common_pb2.Grammar | None = None
    adapter: str = ""  # digest of the adapter that `model` names; "": the base model
    served_model: str = (
        ""  # whose workers answer it: `model`, or the base of the adapter; "": the router's first
    )
    n: int = 1
    # No token is generated for the client: workers draw one, which ends the attempt at the prompt's worker
    prompt_only: bool = False
    embedding_dimensions: int = 0  # of the vector that workers make, where `sampling.pooling` asks for one
    stop: tuple[str, ...] = ()
    include_stop_text: bool = False
    priority: int = 0
    resume_tokens: list[int] = field(default_factory=list)
    resume_ticket: bytes = b""  # proves that a router admitted it before (router/request/resume_tickets.py)
    reconnects: int = 0  # routers that failed with it before
    explain: bool = False
    deadline_seconds: float = 600.0
    tenant: str = ""  # the owner of its API key
    weight: float = 1.0  # of the tenant, beside other tenants'
    rate_limits: RateLimits = NO_LIMITS
    model_rate_limits: RateLimits = NO_LIMITS  # of the tenant on this model, beside those
    # From the client: within its tenant, only requests with the same salt share prefixes
    cache_salt: str = ""
    prefix_scope: str = ""  # requests with the same scope share prefixes
    answer_format: ParserSource | None = None  # None: answers are not parsed

    @cached_property
    def stop_strings(self) -> StopStrings:
        return StopStrings(self.stop)


class Delta(NamedTuple):
    """Tokens and text of one choice that arrived together. A tuple: one is made for every token."""

    choice: int
    text: str
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    parts: tuple[Part, ...] | None = None  # of the same text, where the answer is parsed
    stop_string: str | None = None  # that ended the choice
    # Tokens of the prompt with their log probabilities, but for the one at position 0; or its embedding
    prompt: tuple[Token, ...] = ()
    echo: bytes = (
        b""  # JSON of the prompt's text without quotation marks, shown before `text`; shared by its choices
    )
    stop_token: int | None = None  # of the request's stop_token_ids, that ended the choice

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the choice, as in vLLM. None: the model's own end, or a limit."""
        return self.stop_token if self.stop_string is None else self.stop_string


def text_delta(choice: int, text: str, token: Token) -> Delta:
    """A token and its text. `Delta`'s own constructor, which looks for defaults, takes half as long again."""
    return tuple.__new__(Delta, (choice, text, (token,), None, None, None, (), b"", None))


@dataclass(frozen=True)
class Outcome:
    """Usage and timings of a finished request."""

    usage: inference_pb2.Usage
    timings: inference_pb2.Timings
    explanation: str = ""


def prefix_scope(tenant: str, cache_salt: str) -> str:
    """The scope within which requests share cached prefixes, part of the salt of every block hash: the tenant's requests
    with the same `cache_salt`, or those without one."""
    if not cache_salt:
        return tenant
    owner = tenant.encode()
    digest = hashlib.blake2b(len(owner).to_bytes(4, "little") + owner + cache_salt.encode(), digest_size=16)
    return f"cache_salt:{digest.hexdigest()}"
