"""Where a text may be cut: the tokens of the pieces, joined, are those of the whole, whatever stands around the cut.

A tokenizer takes a text apart at added tokens, then each part by patterns, and merges within what is left. So there are
two kinds of cuts, and a tokenizer has those that its settings prove:

    …<|im_end|>│…    behind a special token whose text no other added token's text can overlap
    …word│ word…     before a space behind another character, where no pattern takes both into one match and no added token
                     has both in its text; without patterns, where no entry of the vocabulary has a space behind another
                     character, so that no merge joins them; with patterns also between a letter and a line's end or
                     Chinese punctuation

A tokenizer that puts a space before every text is given the piece without its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from router.text.contents import SEARCHED_CHARACTERS, prefix_tree
from router.text.longest_token import steps_of

MIN_PIECE_CHARACTERS = 256  # at least, but for the last one
# None of these is white space, combines with a character beside it, or is what sentencepiece writes for a space.
_LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0400-\u0481\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_MARKS = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
_VISIBLE = f"!-~{_LETTERS}{_MARKS}"
_BEFORE_SPACE = f"(?<=[{_VISIBLE}]) "
_BEHIND_SPACE = f"(?<=[{_VISIBLE}]) (?=[A-Za-z0-9])"
_BEHIND_LETTER = f"(?<=[{_LETTERS}])[\\n{_MARKS}]"
_CUT_WITHIN = re.compile(f"[^\\s\u2581][\\s\u2581{_MARKS}]")  # what may be cut, were it not an added token's
# Alternatives of published patterns. None matches white space behind another character, or a letter and what is neither
# letter, mark nor apostrophe behind it; none looks behind its beginning.
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_KNOWN = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _ENDINGS, "'(?:[sdmt]|ll|ve|re)", "'(?i:[sdmt]|ll|ve|re)"),
    *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+", r" ?\p{L}+", r" ?[^\s\p{L}\p{N}]+"),
    *(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"),
    *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}" for end in ("", f"{_ENDINGS}?")),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}" for end in ("", f"{_ENDINGS}?")),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
}
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPM_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_SPM_BEGIN = {"type": "Prepend", "prepend": "\u2581"}
_NO_SPACES = {"type": "Split", "pattern": {"String": " "}}


@dataclass(frozen=True)
class Cuts:
    pattern: re.Pattern[str]  # a cut is behind its group, or before a match without one
    left_out: int = 0  # characters behind a cut without group

    def split(self, text: str) -> list[str]:
        """The pieces. Texts that begin alike have the same first ones; a text without cuts is one."""
        pieces = []
        begin, at, length = 0, MIN_PIECE_CHARACTERS, len(text)
        while at < length:
            found = self.pattern.search(text, at, at + SEARCHED_CHARACTERS)
            if found is None:
                at += SEARCHED_CHARACTERS
                continue
            if found.lastindex:
                end = next_begin = found.end()
            else:
                end = found.start()
                next_begin = end + self.left_out
            pieces.append(text[begin:end])
            begin, at = next_begin, next_begin + MIN_PIECE_CHARACTERS
        if begin < length or not pieces:
            pieces.append(text[begin:])
        return pieces


def find_cuts(tokenizer: Tokenizer) -> Cuts | None:
    """None for a tokenizer whose settings prove no cut."""
    added = tokenizer.get_added_tokens_decoder().values()
    model = tokenizer.model
    if tokenizer.truncation is not None or tokenizer.padding is not None or not isinstance(model, models.BPE):
        return None
    if model.dropout or any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None  # random merges; tokens that depend on what is beside them
    patterns = []
    special = _special_texts(tokenizer, added)
    if special:
        patterns.append(f"({prefix_tree(special)})")
    plain, left_out = _plain_cuts(tokenizer), 0
    if plain == _BEHIND_SPACE:
        # Behind an added token the tokenizer puts one more space; before one it puts none.
        left_out, ends = 1, "".join(token.content[-1:] for token in added)
        plain = f"(?<![{re.escape(ends)}]){plain}" if ends else plain
        if any(re.match(r"[\s\u2581A-Za-z0-9]", token.content) for token in added):
            plain = ""
    if plain and not any(_CUT_WITHIN.search(token.content) for token in added):
        patterns.append(plain)
    return Cuts(re.compile("|".join(patterns)), left_out) if patterns else None


def _special_texts(tokenizer: Tokenizer, added: Collection[AddedToken]) -> set[str]:
    """Texts that are their token wherever they stand, and behind which a text goes on as it would begin."""
    steps = list(steps_of(tokenizer.pre_tokenizer, "pretokenizers"))
    if any(
        step["type"] not in {"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"} for step in steps
    ):
        return set()
    if any(step.get("prepend_scheme") == "first" for step in steps):
        return set()
    texts = {token.content for token in added}
    begins = {text[:end] for text in texts for end in range(1, len(text))}
    ends = {text[begin:] for text in texts for begin in range(1, len(text))}
    joined = "\0".join(texts)

    def overlaps(text: str) -> bool:
        return (
            joined.count(text) > 1
            or any(text[begin:] in begins for begin in range(len(text)))
            or any(text[:end] in ends for end in range(1, len(text) + 1))
        )

    normalizes = tokenizer.normalizer is not None
    return {
        token.content
        for token in added
        if token.special and not (normalizes and token.normalized) and not overlaps(token.content)
    }


def _plain_cuts(tokenizer: Tokenizer) -> str:
    """The pattern of cuts in ordinary text; empty if there are none."""
    normal = list(steps_of(tokenizer.normalizer, "normalizers"))
    steps = list(steps_of(tokenizer.pre_tokenizer, "pretokenizers"))
    types = {step["type"] for step in steps}
    if all(step["type"] == "NFC" for step in normal) and "ByteLevel" in types:
        return _byte_level_cuts(tokenizer, steps)
    if normal in ([_SPM_SPACE], [_SPM_BEGIN, _SPM_SPACE]):
        # A space is written as ▁ by now, so this finds none.
        whole = all({**step, **_NO_SPACES} == step for step in steps)
        found = _BEHIND_SPACE if _SPM_BEGIN in normal else _BEFORE_SPACE
    else:
        whole = (
            not normal and types == {"Metaspace"} and len(steps) == 1 and steps[0]["replacement"] == "\u2581"
        )
        found = _BEFORE_SPACE
    return found if whole and _merges_words_alone(tokenizer, "\u2581") else ""


def _byte_level_cuts(tokenizer: Tokenizer, steps: list[dict[str, Any]]) -> str:
    *before, last = steps
    if last["type"] != "ByteLevel":
        return ""
    patterns = [_GPT2] if last["use_regex"] else []
    for step in before:
        if step["type"] == "Digits":
            continue
        if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
            return ""
        patterns.append(step["pattern"].get("Regex", ""))
    alternatives = [one for pattern in patterns for one in alternatives_of(pattern)]
    if not _KNOWN.issuperset(alternatives):
        return ""
    if r"\s+" not in alternatives:
        return _BEFORE_SPACE if not patterns and _merges_words_alone(tokenizer, "\u0120") else ""
    return _BEFORE_SPACE if last["add_prefix_space"] else f"{_BEFORE_SPACE}|{_BEHIND_LETTER}"


def _merges_words_alone(tokenizer: Tokenizer, space: str) -> bool:
    """Whether no merge joins a space with another character before it."""
    model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    joined = re.compile(f"[^{space}]{space}")
    return space in vocabulary and not any(joined.search(entry) for entry in vocabulary)


def alternatives_of(pattern: str) -> list[str]:
    """The parts of a regular expression between its outermost `|`."""
    parts, depth, begin = [], 0, 0
    for token in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", pattern):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token[0] == "|" and not depth:
            parts.append(pattern[begin : token.start()])
            begin = token.end()
    return [*parts, pattern[begin:]]
