"""Rules of a grammar in the library's variant of Lark.

`%json` is a JSON schema, `%lark` a grammar of its own inside another, `<[7]>` the token 7; a rule with `[lazy]` ends at
its first match. ANY and everything made of it has no special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from cluster.grammar.annotations import without_annotations
from cluster.grammar.library import JSON_OPTIONS
from cluster.grammar.rewriting import for_library
from cluster.grammar.spec import MAX_GRAMMAR_BYTES, GrammarSpec, why_too_long
from router.text.parsers.base import Reasoning

Marker = Callable[[str], str]
# As json.dumps writes it, or compact.
_SPACED = {**JSON_OPTIONS, "item_separator": ", ?", "key_separator": ": ?"}
_CONTROL = re.compile(r"(<\|[^<>|]*\|>)")


class Rules:
    """Collects rules. `marker`: the form of a marker's text, `<[id]>` where it is one token, else a quoted text."""

    def __init__(self, marker: Marker):
        self._marker = marker
        self._lines = ["ANY: /(?s:.*)/"]
        self._length = 0  # characters of those that were added

    def add(self, name: str, body: str) -> str:
        """Return `name`. Raises ValueError as soon as all rules are too long: the next one takes its time as well."""
        self._lines.append(f"{name}: {body}")
        self._length += len(self._lines[-1])
        if self._length > MAX_GRAMMAR_BYTES:
            _check_length("\n".join(self._lines))
        return name

    def marks(self, text: str) -> str:
        """A text that is a marker, or has several of them."""
        return " ".join(form for _, form in self._forms(text))

    def without(self, name: str, text: str) -> str:
        """Add the terminal of texts that do not contain `text`."""
        return self.add(name, f"ANY & ~(ANY {quoted(text)} ANY)")

    def until(self, name: str, text: str) -> str:
        """Add the rule of a text that ends with its first `text`, a marker."""
        (first, form), *rest = self._forms(text)
        tail = " ".join(form for _, form in rest)
        if form.startswith("<["):
            return self.add(name, f"{self.without(name.upper(), first)} {form} {tail}")
        return self.add(name, f"{self._lazy(name + '_end', f'ANY {form}')} {tail}")

    def at_once(self, name: str, text: str) -> str:
        """Add the rule of a marker that cannot be the beginning of a longer text."""
        forms = self._forms(text)
        if len(forms) > 1 or forms[0][1].startswith("<["):
            return self.add(name, self.marks(text))
        return self._lazy(name, forms[0][1])

    def json_head(self, arguments: str, *, spaced: bool) -> tuple[str, str, str]:
        """The rules of an object's text before its name and between name and arguments, and what is around the name, where
        an answer may be JSON too: cut as the library cuts JSON, since it cannot go back from a text to the beginning of
        another. `spaced`: there are spaces, which compact JSON does not have."""
        colon, comma = ('": "', '", "') if spaced else ("/: ?/", "/, ?/")
        colon, comma = self.add("COLON", colon), self.add("COMMA_SPACE", comma)
        head = self.add("object_begin", f'"{{" "\\"name\\"" {colon}')
        return head, self.add("object_middle", f"{comma} {quoted(quoted(arguments))} {colon}"), '"'

    def start(self, answer: str, reasoning: Reasoning | None, *, behind: str = "", after: str = "") -> None:
        """Add the first rule: `answer`, behind reasoning if there is any. `behind`: in its place there, with what
        separates the two. `after`: the marker's text that follows the reasoning's end."""
        if reasoning is None:
            self.add("start", answer)
            return
        thought = (
            f"{self.until('thought', reasoning.end)} {self.marks(after) if after else ''} {behind or answer}"
        )
        if reasoning.opened:
            self.add("start", thought)
        else:
            self.add("start", f"{self.at_once('think', reasoning.begin)} {thought} | {answer}")

    def spec(self) -> GrammarSpec:
        """Raises ValueError if it is too long."""
        text = "\n".join(self._lines) + "\n"
        _check_length(text)
        return GrammarSpec("lark", text)

    def _lazy(self, name: str, body: str) -> str:
        self._lines.append(f"{name}[lazy]: {body}")
        return name

    def _forms(self, text: str) -> list[tuple[str, str]]:
        whole = self._marker(text)
        if whole.startswith("<[") or _CONTROL.search(text) is None:
            return [(text, whole)]
        return [(part, self._marker(part)) for part in _CONTROL.split(text) if part]


def _check_length(text: str) -> None:
    if reason := why_too_long(text):
        raise ValueError(f"the grammar of the answer has {reason}")


def quoted(text: str) -> str:
    """A text in Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any], *, spaced: bool) -> str:
    """The rule of a JSON schema. `spaced`: a space may follow commas and colons. Raises ValueError."""
    options = _SPACED if spaced else JSON_OPTIONS
    try:
        text = orjson.dumps({**schema, "x-guidance": options}).decode()
    except TypeError:
        raise ValueError("a schema is nested too deeply, or has a value that JSON does not have") from None
    _check_length(text)  # first: dates make it 16 times as long, on the event loop
    text = for_library(without_annotations(text))
    _check_length(text)  # before the next tool's
    return f"%json {text}"
