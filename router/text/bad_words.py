"""The token ids of words that answers may not have, as vLLM finds them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from cluster.errors import InvalidRequestError

_MAX_SHOWN = 80  # characters of a word in an error


def word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The token ids of each word as it begins a text, and as it follows a space where that gives as many tokens and
    another first one. White space before a word does not count. Raises InvalidRequestError for a word without tokens."""
    bare = [word.lstrip() for word in words]
    texts = [*bare, *(f" {word}" for word in bare)]
    tokens = [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    found = dict[tuple[int, ...], None]()
    for word, alone, spaced in zip(words, tokens[: len(words)], tokens[len(words) :], strict=True):
        if not alone:
            raise InvalidRequestError(
                f"bad_words: the model's tokenizer has no token for {word[:_MAX_SHOWN]!r}", field="bad_words"
            )
        found[tuple(alone)] = None
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            found[tuple(spaced)] = None
    return list(map(list, found))
