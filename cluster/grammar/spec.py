"""The grammar of a request, as routers send it to workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from cluster.errors import InvalidRequestError
from wire import common_pb2

Kind = Literal["json_schema", "regex", "choice", "lark"]
# Of its text, in UTF-8. A grammar is sent with every attempt, and again from the prefill to the decode worker.
MAX_GRAMMAR_BYTES = 128 << 10


@dataclass(frozen=True)
class GrammarSpec:
    """`text`: the JSON schema or the list of choices as JSON, the regular expression, or the grammar in Lark's syntax.
    `bare`: it is in Lark's syntax, and known that no match begins with a line end; not sent."""

    kind: Kind
    text: str
    bare: bool = field(default=False, compare=False)

    @classmethod
    def of_choices(cls, texts: Iterable[str]) -> GrammarSpec:
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
            spec = GrammarSpec.of_choices(grammar.choice.texts)
        case _:
            raise InvalidRequestError(
                "grammar: has none of json_schema, regex, choice and lark, or no choices", field="grammar"
            )
    if reason := why_too_long(spec.text):
        raise InvalidRequestError(f"grammar: {reason}", field="grammar", limit=str(MAX_GRAMMAR_BYTES))
    return spec


def why_too_long(text: str) -> str:
    """Why a grammar cannot have this text; empty if it can."""
    size = len(text.encode(errors="surrogatepass"))
    return f"{size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed" if size > MAX_GRAMMAR_BYTES else ""
