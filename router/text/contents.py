"""Encodes special tokens' texts within a conversation as plain text, so that no client's text can forge its turns.

A tokenizer reads the text of a special token as that token wherever it stands: `<|im_end|>` in a user's message would end
the message and begin another turn. Roles are therefore from a fixed set, and the texts of special tokens within all other
texts of the client (contents, arguments and results of tools, their descriptions and schemas, keys included) are marked
before the template is rendered, and encoded as plain text afterwards:

    content ──mark──► template ──► rendered ──► [special][piece][special][marked piece]…
                                                    as special tokens       as plain text

A template may join two values to such a text (`<|im_` and `end|>`), or what it writes itself and a value (`<` and
`|im_end|>`). So the end of a text is marked too where it begins a special token's text, and its beginning where it would
complete what the template has begun.

Nearly all conversations are without such texts: they cost one search, and are encoded as a whole.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from tokenizers import AddedToken, Tokenizer

from cluster.errors import InvalidRequestError
from router.text.templates import searched_texts, written_texts

AskingRole = Literal["system", "developer", "user"]
ROLES = (*get_args(AskingRole), "assistant", "tool")
T = TypeVar("T")
_MARKS = range(0xF0000, 0xF0100)  # of a private-use plane: no template and hardly any text has them
_MARK = re.compile(f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]")
_SPACE = re.compile(r"\s*")
_CUT = chr(0x10FFFF)  # in texts for a pattern: here a value ends, whatever white space the template removes
PIECE_CHARACTERS = 1 << 16  # searched at once, under the interpreter lock


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

    def __init__(self, tokenizer: Tokenizer, turns: Collection[str] = (), sources: Collection[str] = ()):
        """`turns`: texts of tokens that the tokenizer does not call special, but that begin or end a template's turns.
        `sources`: of the templates."""
        self._tokenizer = tokenizer
        found = {
            token_id: one
            for token_id, one in tokenizer.get_added_tokens_decoder().items()
            if one.special or one.content in turns
        }
        special = found.values()
        texts = {one.content for one in special if len(one.content) > 1}
        self._special = re.compile(prefix_tree(texts)) if texts else None
        self._searched = set[str]().union(*map(searched_texts, sources))
        begun = {text[:end] for text in texts for end in range(1, len(text))}
        self._breaking = _pattern("", texts, begun, self._searched) if texts else None
        own = set[str]().union(*map(written_texts, sources))
        open_ends = {part for part in begun if any(one.endswith(part) for one in own)}
        rests = {text[len(part) :] for part in open_ends for text in texts if text[:-1].startswith(part)}
        parts = {rest[:end] for rest in rests for end in range(1, len(rest))}
        self._completing = _pattern(r"\A\s*", rests, parts, self._searched) if rests else None
        self._longest = max(map(len, texts), default=0)
        self._lstrip = {one.content for one in special if one.lstrip}
        self._rstrip = {one.content for one in special if one.rstrip}
        # A mark cannot break a single character, nor a text that only the normalizer turns into a special token's.
        normalizes = tokenizer.normalizer is not None
        self._unmarkable = any(len(one.content) == 1 or (normalizes and one.normalized) for one in special)
        # Made at the start: for a large vocabulary it takes some tenths of a second, under the interpreter lock.
        self._plain, self._inside = _without_special(tokenizer, [one for one in special if not one.special])
        self._ids = frozenset(found)

    def marked(self, values: T) -> tuple[T, str]:
        """The values, nested lists and objects, with a mark within every text of a special token, and every part of one
        that a template may complete; and the mark.

        Raises InvalidRequestError for texts with special tokens that a mark cannot prevent: those of one character, and
        those that only the tokenizer's normalizer makes.
        """
        if self._unmarkable:
            self._refuse(values)
        if self._breaking is None or not any(map(self._must_break, texts(values))):
            return values, ""
        used = {one for text in texts(values) for piece in _in_pieces(text) for one in _MARK.findall(piece)}
        mark = next((one for one in map(chr, _MARKS) if one not in used), None)
        if mark is None:
            raise InvalidRequestError("messages: hold too many private-use characters", field="messages")

        # Each pass marks what does not overlap; breaking one text may leave another that overlapped it.
        def protect(value: Any) -> Any:
            if isinstance(value, str):
                while self._must_break(value):
                    value = self._broken(value, mark)
                return value
            if isinstance(value, Mapping):
                return {protect(key): protect(one) for key, one in value.items()}
            return [protect(one) for one in value] if isinstance(value, list | tuple) else value

        return cast(T, protect(values)), mark

    def _must_break(self, text: str) -> bool:
        return self._completes(text) is not None or next(self._found(text, self._breaking), None) is not None

    def _completes(self, text: str) -> re.Match[str] | None:
        """What completes the template's own text; not if it is a word of the template's, such as a role."""
        if self._completing is None or text in ROLES or text in self._searched:
            return None
        return self._completing.match(text)

    def _found(self, text: str, pattern: re.Pattern[str] | None) -> Iterator[re.Match[str]]:
        """As `finditer`, in pieces, between which other threads run: two megabytes take 40 ms."""
        more = self._longest - 1
        assert pattern is not None
        at = 0
        while at < len(text):
            end = at + PIECE_CHARACTERS
            found = pattern.search(text, at, end + more)
            if found is None or found.start() >= end:  # there it may be cut short
                at = end
            else:
                yield found
                at = found.end()

    def _broken(self, text: str, mark: str) -> str:
        """The text with the mark before what completes the template's own text, and behind the first character of each
        special token's text, or part of one."""
        pieces: list[str] = []
        end = 0
        if (begin := self._completes(text)) is not None:
            end = begin.start(1)
            pieces += text[:end], mark
        for found in self._found(text, self._breaking):
            if found.start() >= end:
                pieces += text[end : found.start() + 1], mark
                end = found.start() + 1
        return "".join((*pieces, text[end:]))

    def _refuse(self, values: Any) -> None:
        for field, text in _named_texts(values):
            if not self._ids.isdisjoint(_encoded(self._tokenizer, text)):
                raise InvalidRequestError(f"{field}: holds the text of a special token", field=field)

    def encode(self, rendered: Rendered) -> list[int]:
        """Token ids of a rendered conversation that holds marks."""
        ids: list[int] = []
        for piece, tokenizer in self._pieces(rendered):
            ids += _encoded(tokenizer, piece.replace(rendered.mark, ""))
        return ids

    def _pieces(self, rendered: Rendered) -> Iterator[tuple[str, Tokenizer]]:
        """Split at the template's special tokens, as the tokenizer itself does before anything else, with the white space
        that these take; what has no marks stays together."""
        text, mark = rendered.text, rendered.mark
        begin = end = 0
        for found in (*self._found(text, self._special), None):
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


def texts(values: Any) -> Iterator[str]:
    """Every text in nested lists and objects, keys included."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from value
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


def _in_pieces(text: str) -> Iterator[str]:
    """Between which other threads run."""
    return (text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS))


def _named_texts(values: Any) -> Iterator[tuple[str, str]]:
    """Every text, with the name of the field that contains it."""
    waiting = [("", values)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((name, key) for key in value)
            waiting += [(f"{name}.{key}" if name else key, one) for key, one in reversed([*value.items()])]
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}[{index}]", one) for index, one in reversed([*enumerate(value)])]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, by the batch function: only those release the interpreter lock."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def prefix_tree(texts: Collection[str]) -> str:
    """A pattern of these texts, the longest first. Texts with the same beginning share it: `re` holds the interpreter
    lock, and an alternation of hundreds of texts would try each at every place."""
    branches = []
    for _, group in itertools.groupby(sorted(filter(None, texts)), key=lambda text: text[0]):
        same = list(group)
        begin = os.path.commonprefix(same)  # noqa: RUF071 (texts, not paths)
        branches.append(re.escape(begin) + prefix_tree([text[len(begin) :] for text in same]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


def _pattern(before: str, whole: Iterable[str], parts: Iterable[str], cuts: Iterable[str]) -> re.Pattern[str]:
    """Finds whole texts, and parts of texts where a value ends, or the template may cut it: at the `cuts`. Both are its
    group 1."""
    ends = "|".join([*map(re.escape, filter(None, cuts)), r"\Z"])
    at_an_end = rf"(?=\s*(?:{ends}))"
    tree = prefix_tree({*whole, *(part + _CUT for part in parts)})
    return re.compile(f"{before}({tree.replace(_CUT, at_an_end)})")


def _without_special(tokenizer: Tokenizer, more: Collection[AddedToken]) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer, which reads special tokens' texts as any other, those of `more` too: for the beginning of a
    conversation, and for the rest, before which sentencepiece's `first` puts no space."""
    settings = tokenizer.to_str()
    plain = _plain(settings, more)
    inner = settings.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
    return plain, plain if inner == settings else _plain(inner, more)


def _plain(settings: str, more: Collection[AddedToken]) -> Tokenizer:
    made = Tokenizer.from_str(settings)
    made.add_special_tokens([AddedToken(**{**one.__getstate__(), "special": True}) for one in more])
    made.encode_special_tokens = True
    return made
