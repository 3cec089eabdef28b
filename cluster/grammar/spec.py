"""The grammar of a request, as routers send it to workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from cluster.errors import InvalidRequestError
from wire import common_pb2

Kind = Literal["json_schema", "regex", "choice", "lark"]
# Of its text, in UTF-8. A grammar is sent with every attempt, and again from the prefill to the decode worker.
MAX_GRAMMAR_BYTES = 128 << 10
# llguidance has an item for each choice and one more; with more than parser_limits allows no answer can begin.
MAX_GRAMMAR_CHOICES = 1999
_CHOICE_BYTES = 3  # of JSON around the text of a choice; the list has one byte more


@dataclass(frozen=True)
class GrammarSpec:
    """`text`: the JSON schema or the list of choices as JSON, the regular expression, or the grammar in Lark's syntax.
    `bare`: it is in Lark's syntax, and known that no match begins with a line end; not sent."""

    kind: Kind
    text: str
    bare: bool = field(default=False, compare=False)

    @classmethod
    def of_choices(cls, texts: Iterable[str]) -> GrammarSpec:
        """A client's texts: after why_choices_too_long."""
        return cls("choice", json.dumps(list(texts), ensure_ascii=False, separators=(",", ":")))

    @cached_property
    def key(self) -> bytes:
        """Equal grammars have the same key."""
        return hashlib.blake2b(f"{self.kind}\0{self.text}".encode(), digest_size=16).digest()

    def to_wire(self) -> common_pb2.Grammar:
        match self.kind:
            case "json_schema":
                return common_pb2.Grammar(json_schema=self.text)
            case "regex":
                return common_pb2.Grammar(regex=self.text)
            case "lark":
                return common_pb2.Grammar(lark=self.text)
            case "choice":
                return common_pb2.Grammar(choice=common_pb2.Choices(texts=json.loads(self.text)))


def grammar_from_wire(grammar: common_pb2.Grammar) -> GrammarSpec:
    """Read a grammar. Raises InvalidRequestError: a rule of a later version is refused, never ignored."""
    match grammar.WhichOneof("rule"):
        case "json_schema":
            spec = GrammarSpec("json_schema", grammar.json_schema)
        case "regex":
            spec = GrammarSpec("regex", grammar.regex)
        case "lark":
            spec = GrammarSpec("lark", grammar.lark)
        case "choice" if grammar.choice.texts:
            if reason := why_too_many_choices(len(grammar.choice.texts)):
                raise _refused(reason, MAX_GRAMMAR_CHOICES)
            if reason := why_choices_too_long(grammar.choice.texts):
                raise _refused(reason, MAX_GRAMMAR_BYTES)
            spec = GrammarSpec.of_choices(grammar.choice.texts)
        case _:
            raise InvalidRequestError(
                "grammar: has none of json_schema, regex, choice and lark, or no choices", field="grammar"
            )
    if reason := why_too_long(spec.text):
        raise _refused(reason, MAX_GRAMMAR_BYTES)
    return spec


def _refused(reason: str, limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"grammar: {reason}", field="grammar", limit=str(limit))


def why_too_long(text: str) -> str:
    """Why a grammar cannot have this text; empty if it can. A text of megabytes is not encoded."""
    if text.isascii() or len(text) > MAX_GRAMMAR_BYTES:
        size, least = len(text), "" if text.isascii() else "more than "
    else:
        size, least = len(text.encode(errors="surrogatepass")), ""
    return f"{least}{size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed" if size > MAX_GRAMMAR_BYTES else ""


def why_choices_too_long(texts: Sequence[str]) -> str:
    """Why a grammar cannot have these choices, before their JSON is made: a request may have megabytes of them. Empty if
    it probably can."""
    count = len(texts)
    size = sum(map(len, texts)) + _CHOICE_BYTES * count
    if size <= MAX_GRAMMAR_BYTES:
        return ""
    return f"{count} choices; at most {MAX_GRAMMAR_BYTES} bytes of JSON are allowed"


def why_too_many_choices(count: int) -> str:
    """Why a grammar cannot have so many choices, however short; empty if it can."""
    return (
        f"{count} choices; at most {MAX_GRAMMAR_CHOICES} are allowed" if count > MAX_GRAMMAR_CHOICES else ""
    )
