"""Encodes special tokens' texts within messages as plain text, so that a message cannot forge the turns of a conversation.

A tokenizer reads the text of a special token as that token wherever it stands: `<|im_end|>` in a user's message would end
the message and begin another turn. Roles are therefore from a fixed set, and the texts of special tokens within contents
are marked before the template is rendered, and encoded as plain text afterwards:

    content ──mark──► template ──► rendered ──► [special][piece][special][marked piece]…
                                                    as special tokens       as plain text

Nearly all conversations are without such texts: they cost one search, and are encoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tokenizers import Tokenizer

from cluster.errors import InvalidRequestError

AskingRole = Literal["system", "developer", "user"]
ROLES = (*get_args(AskingRole), "assistant")
_MARKS = range(0xF0000, 0xF0100)  # of a private-use plane: no template and hardly any text has them
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Rendered:
    """A conversation as rendered by the template. `mark` is a character that breaks the texts of special tokens within
    contents; empty if there are none."""

    text: str
    mark: str = ""


def role_of(given: str, field: str) -> str:
    """The role for the template: a developer's messages are the system's. Raises InvalidRequestError naming `field`."""
    if given not in ROLES:
        raise InvalidRequestError(
            f"{field}: {given[:32]!r} is not supported; use {', '.join(ROLES)}", field=field
        )
    return "system" if given == "developer" else given


class Contents:
    """One tokenizer's special tokens, as texts that messages may hold."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        special = [one for one in tokenizer.get_added_tokens_decoder().values() if one.special]
        texts = sorted({one.content for one in special if len(one.content) > 1}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._lstrip = {one.content for one in special if one.lstrip}
        self._rstrip = {one.content for one in special if one.rstrip}
        # A mark cannot break a single character, nor a text that only the normalizer turns into a special token's.
        normalizes = tokenizer.normalizer is not None
        self._unmarkable = any(len(one.content) == 1 or (normalizes and one.normalized) for one in special)
        # Made at the start: for a large vocabulary it takes some tenths of a second, under the interpreter lock.
        self._plain, self._inside = _without_special(tokenizer)
        self._ids = frozenset(
            token_id for token_id, one in tokenizer.get_added_tokens_decoder().items() if one.special
        )

    def marked(self, messages: Sequence[Mapping[str, str]]) -> tuple[Sequence[Mapping[str, str]], str]:
        """The messages with a mark within every text of a special token, and the mark.

        Raises InvalidRequestError for contents with special tokens that a mark cannot prevent: those of one character, and
        those that only the tokenizer's normalizer makes.
        """
        if self._unmarkable:
            self._refuse(messages)
        special = self._special
        if special is None or not any(special.search(message["content"]) for message in messages):
            return messages, ""
        mark = next(
            (chr(code) for code in _MARKS if all(chr(code) not in one["content"] for one in messages)), None
        )
        if mark is None:
            raise InvalidRequestError("messages: hold too many private-use characters", field="messages")

        def broken(found: re.Match[str]) -> str:
            return found[0][0] + mark + found[0][1:]

        # Each pass marks what does not overlap; breaking one text may leave another that overlapped it.
        def protect(content: str) -> str:
            while special.search(content):
                content = special.sub(broken, content)
            return content

        return [{**one, "content": protect(one["content"])} for one in messages], mark

    def _refuse(self, messages: Sequence[Mapping[str, str]]) -> None:
        for index, message in enumerate(messages):
            if not self._ids.isdisjoint(
                self._tokenizer.encode(message["content"], add_special_tokens=False).ids
            ):
                field = f"messages[{index}].content"
                raise InvalidRequestError(f"{field}: holds the text of a special token", field=field)

    def encode(self, rendered: Rendered) -> list[int]:
        """Token ids of a rendered conversation that holds marks."""
        ids: list[int] = []
        for piece, tokenizer in self._pieces(rendered):
            ids += tokenizer.encode(piece.replace(rendered.mark, ""), add_special_tokens=False).ids
        return ids

    def _pieces(self, rendered: Rendered) -> Iterator[tuple[str, Tokenizer]]:
        """Split at the template's special tokens, as the tokenizer itself does before anything else, with the white space
        that these take; what has no marks stays together."""
        assert self._special is not None
        text, mark = rendered.text, rendered.mark
        begin = end = 0
        for found in (*self._special.finditer(text), None):
            until = found.start() if found is not None else len(text)
            between = text[end:until]
            if mark in between:
                if found is not None and found[0] in self._lstrip:
                    until = end + len(between.rstrip())
                if end > begin:
                    yield text[begin:end], self._tokenizer
                yield text[end:until], self._inside if end else self._plain
                begin = until
            end = found.end() if found is not None else until
            if found is not None and found[0] in self._rstrip:
                end = next(_SPACE.finditer(text, end)).end()
        if end > begin:
            yield text[begin:end], self._tokenizer


def _without_special(tokenizer: Tokenizer) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer, which reads special tokens' texts as any other: for the beginning of a conversation, and for the
    rest, before which sentencepiece's `first` puts no space."""
    settings = tokenizer.to_str()
    plain = Tokenizer.from_str(settings)
    plain.encode_special_tokens = True
    inner = settings.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
    if inner == settings:
        return plain, plain
    inside = Tokenizer.from_str(inner)
    inside.encode_special_tokens = True
    return plain, inside
