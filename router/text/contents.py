"""Encodes special tokens' texts within a conversation as plain text, so that no client's text can forge its turns.

A tokenizer reads the text of a special token as that token wherever it stands: `<|im_end|>` in a user's message would end
the message and begin another turn. A template may also join it from two values (`<|im_` and `end|>`), or from its own
text and a value (`<` and `|im_end|>`), and may cut, trim and replace before. So roles are from a fixed set, and in all
other texts of the client (contents, arguments and results of tools, their descriptions and schemas, keys included) a mark,
a character that no text of the request has, stands behind every character that begins a special token's text and before
every one that ends one:

    content ──mark──► template ──► rendered ──► [special][piece][special][marked piece]…
                                                    as special tokens       as plain text

Whatever the template does with the characters, the text of a special token without a mark is the template's own. Where
all are without, as in nearly all conversations, the rendered text is encoded as a whole, without the marks.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, Literal, TypeVar, cast, get_args

from tokenizers import AddedToken, Tokenizer

from cluster.errors import InvalidRequestError
from router.text.longest_token import steps_of
from router.text.templates import TemplateTexts

AskingRole = Literal["system", "developer", "user"]
ROLES = (*get_args(AskingRole), "assistant", "tool")
T = TypeVar("T")
# Signs of which hardly any text has all: without case, not white space, and printable, so that Python's `repr`, with which
# templates write lists and objects, leaves them. With the first, of Latin-1, a text takes no more memory.
_MARKS = [*"\u00a4\u00a6\u00ac\u00f7\u00b1\u00b6\u00b7\u00d7", *map(chr, range(0x2E0E, 0x2E16))]
_SPACE = re.compile(r"\s*")
SEARCHED_CHARACTERS = 1 << 16  # searched at once, under the interpreter lock


@dataclass(frozen=True)
class Rendered:
    """A conversation as rendered by the template. `mark` is a character that breaks the texts of special tokens that are
    not the template's; empty if there are none."""

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

    def __init__(
        self, tokenizer: Tokenizer, turns: Collection[str] = (), template: TemplateTexts | None = None
    ):
        """`turns`: texts of tokens that the tokenizer does not call special, but that begin or end a template's turns."""
        template = template or TemplateTexts()
        self._tokenizer = tokenizer
        found = {
            token_id: one
            for token_id, one in tokenizer.get_added_tokens_decoder().items()
            if one.special or one.content in turns
        }
        special = found.values()
        texts = {one.content for one in special}
        self._special = re.compile(prefix_tree(texts) or "(?!)")
        self._longest = max(map(len, texts), default=0)
        self._characters = {text for text in texts if len(text) == 1}
        # Marks stand within the white space around a text, which templates trim.
        cores = {text.strip() or text for text in texts - self._characters}
        self._first = {one for text in cores for one in (text[0].lower(), text[0].upper())}
        self._last = {one for text in cores for one in (text[-1].lower(), text[-1].upper())}
        self._edges = tuple(self._first | self._last)
        own = (*texts, *template.written, *template.sources)
        self._marks = [one for one in _MARKS if not any(one in text for text in own)]
        self._searched = template.searched | template.filtered
        self._keys = set(filter(self._is_word, self._searched | template.keys))
        cuts = "|".join(map(re.escape, sorted(filter(None, self._searched), key=len, reverse=True)))
        self._cuts = re.compile(cuts or "(?!)")
        self._longest_cut = max(map(len, self._searched), default=0)
        self._kept = sorted((one for one in self._searched if self._keeps(one, cores)), key=len, reverse=True)
        # What may stand between the template's own beginning of a special token and its own end.
        begun = {text[:end] for text in cores for end in range(1, len(text))}
        opened = tuple(part for part in begun if any(one.endswith(part) for one in template.written))
        self._inner = "\n".join(text[1:-1].lower() for text in sorted(cores) if text.startswith(opened))
        self._lstrip = {one.content for one in special if one.lstrip}
        self._rstrip = {one.content for one in special if one.rstrip}
        # A mark cannot break a single character, nor a text that only the normalizer turns into a special token's.
        normalizes = any(steps_of(tokenizer.normalizer, "normalizers"))
        self._unmarkable = bool(self._characters) or any(normalizes and one.normalized for one in special)
        # Made at the start: for a large vocabulary it takes some tenths of a second, under the interpreter lock.
        self._plain, self._inside = _without_special(tokenizer, [one for one in special if not one.special])
        self._ids = frozenset(found)

    def _keeps(self, searched: str, cores: Collection[str]) -> bool:
        """Whether a text that the template searches for gets no marks: no special token's can begin or end within it."""
        begins = (searched[at:] for at, one in enumerate(searched) if one in self._first)
        ends = (searched[: at + 1] for at, one in enumerate(searched) if one in self._last)
        return (
            any(one in searched for one in self._edges)
            and not any(one.startswith(core) or core.startswith(one) for one in begins for core in cores)
            and not any(one.endswith(core) or core.endswith(one) for one in ends for core in cores)
        )

    def _is_word(self, key: str) -> bool:
        """Whether a key that the template names may stay as it is."""
        if self._special.search(key) is not None:
            return False
        return key.isidentifier() or not any(one in key for one in self._edges)

    def marked(self, values: T, fields: Sequence[str] = ()) -> tuple[T, str]:
        """The values, nested lists and objects, with marks in every text of which a special token's may be made; and the
        mark, empty if there are no such texts. `fields`: names of a list's entries, for errors.

        Raises InvalidRequestError for texts with special tokens that a mark cannot prevent: those of one character, and
        those that only the tokenizer's normalizer makes; and where every mark is in some text.
        """
        if self._unmarkable:
            self._refuse(zip(fields, cast(Sequence[Any], values), strict=True) if fields else [("", values)])
        if not any(map(self._needs_marks, texts(values, self._keys, ROLES))):
            return values, ""
        mark = next((one for one in self._marks if not any(map(_holds(one), texts(values)))), None)
        if mark is None:
            raise InvalidRequestError(
                f"messages: hold all of {''.join(self._marks)}; leave one of these signs out",
                field="messages",
            )

        def protect(value: Any, key: str = "") -> Any:
            if isinstance(value, str):
                return value if key == "role" and value in ROLES else self._broken(value, mark)
            if isinstance(value, Mapping):
                return {
                    name if name in self._keys else self._broken(name, mark): protect(one, name)
                    for name, one in value.items()
                }
            return [protect(one) for one in value] if isinstance(value, list | tuple) else value

        return cast(T, protect(values)), mark

    def _needs_marks(self, text: str) -> bool:
        return any(one in text for one in self._edges) or any(map(self._is_inner, self._parts(text)))

    def _parts(self, text: str) -> Iterator[str]:
        """Between the texts that the template searches for and may cut at, which are parts, too; none if no part can be
        within a special token's text."""
        if not self._inner or text in self._searched:
            return
        end = 0
        for found in _found(self._cuts, self._longest_cut, text):
            yield text[end : found.start()]
            yield found[0]
            end = found.end()
        yield text[end:]

    def _is_inner(self, part: str) -> bool:
        """Whether all but this of a special token's text may be the template's own, whichever case it writes."""
        core = part.strip().lower()
        return core != "" and core in self._inner

    def _apart(self, part: str, mark: str) -> str:
        """The part, between marks where it is within a special token's text."""
        core = part.strip()
        return part.replace(core, mark + core + mark, 1) if self._is_inner(part) else part

    def _broken(self, text: str, mark: str, kept: int = 0) -> str:
        """The text with its marks; `_kept` before `kept` are not in it."""
        for place, whole in enumerate(self._kept[kept:], kept + 1):
            if whole in text:
                return whole.join(self._broken(part, mark, place) for part in text.split(whole))
        text = "".join(self._apart(part, mark) for part in self._parts(text)) or text
        for one in self._first:
            text = text.replace(one, one + mark)
        for one in self._last:
            text = text.replace(one, mark + one)
        return text

    def settled(self, text: str, mark: str) -> Rendered:
        """The rendered text of marked values, without the marks if it has the same special tokens without them.

        Raises InvalidRequestError if only the tokenizer's normalizer makes one, of several texts.
        """
        plain = text.replace(mark, "") if mark else text
        if self._unmarkable:
            made = sum(one in self._ids for one in _encoded(self._tokenizer, plain))
            if made > sum(1 for _ in _found(self._special, self._longest, text)):
                raise InvalidRequestError(
                    "messages: together make the text of a special token", field="messages"
                )
        if not mark:
            return Rendered(text)
        begin = marks = 0
        for own, found in itertools.zip_longest(
            _found(self._special, self._longest, text), _found(self._special, self._longest, plain)
        ):
            if own is None or found is None or own[0] != found[0]:
                return Rendered(text, mark)
            marks += text.count(mark, begin, own.start())
            begin = own.start()
            if begin - marks != found.start():
                return Rendered(text, mark)
        return Rendered(plain)

    def _refuse(self, named: Iterable[tuple[str, Any]]) -> None:
        for field, text in _named_texts(named, self._keys):
            # Also within a word, for a `single_word` token: a template may write the character alone.
            if not self._characters.isdisjoint(text) or not self._ids.isdisjoint(
                _encoded(self._tokenizer, text)
            ):
                raise InvalidRequestError(f"{field}: holds the text of a special token", field=field)

    def encode(self, rendered: Rendered) -> list[int]:
        """Token ids of a rendered conversation that holds marks. Raises InvalidRequestError where the tokenizer's
        vocabulary makes a special token of other tokens, so that a text cannot be told from it."""
        ids: list[int] = []
        for piece, tokenizer in self._pieces(rendered):
            made = _encoded(tokenizer, piece.replace(rendered.mark, ""))
            if tokenizer is not self._tokenizer and not self._ids.isdisjoint(made):
                raise InvalidRequestError("messages: hold the text of a special token", field="messages")
            ids += made
        return ids

    def _pieces(self, rendered: Rendered) -> Iterator[tuple[str, Tokenizer]]:
        """Split at the template's special tokens, as the tokenizer itself does before anything else, with the white space
        that these take; what has no marks stays together."""
        text, mark = rendered.text, rendered.mark
        begin = end = 0
        for found in (*_found(self._special, self._longest, text), None):
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


def texts(values: Any, keys: Collection[str] = (), roles: Collection[str] = ()) -> Iterator[str]:
    """Every text in nested lists and objects, keys included; but for these keys, and these texts under the key `role`."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from (key for key in value if key not in keys)
            waiting += (one for key, one in value.items() if key != "role" or one not in roles)
        elif isinstance(value, list | tuple):
            waiting += value


def _found(pattern: re.Pattern[str], longest: int, text: str) -> Iterator[re.Match[str]]:
    """As `finditer`, in pieces, between which other threads run: two megabytes take 40 ms. `longest`: of the matches."""
    at = 0
    while at < len(text):
        end = at + SEARCHED_CHARACTERS
        found = pattern.search(text, at, end + longest - 1)
        if found is None or found.start() >= end:  # there it may be cut short
            at = end
        else:
            yield found
            at = found.end()


def _holds(mark: str) -> Callable[[str], bool]:
    """Whether a text has the mark, or JSON's escape of it, which a template may write for it."""
    escaped = dumps(mark)[1:-1]
    return lambda text: mark in text or escaped in text


def _named_texts(named: Iterable[tuple[str, Any]], keys: Collection[str]) -> Iterator[tuple[str, str]]:
    """Every text but roles and these keys, with the field that contains it. `named`: fields and their values."""
    waiting = list(named)[::-1]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((name, key) for key in value if key not in keys)
            waiting += [
                (f"{name}.{key}" if name else key, one)
                for key, one in reversed([*value.items()])
                if key != "role" or one not in ROLES
            ]
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}[{index}]", one) for index, one in reversed([*enumerate(value)])]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, by the batch function, because only batch functions release the interpreter lock."""
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
