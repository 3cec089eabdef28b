"""Which tokens would complete one of a request's bad words."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class WordEndings:
    """The last tokens of some words, each a sequence of token ids, by the end of the output before them.

    They are a function of the output's tokens alone, which each attempt has: so they are the same at a prefill and at a
    decode worker, for a resumed stream, after a preemption and for each draft.
    """

    def __init__(self, words: Iterable[Sequence[int]]):
        packed = {word: memoryview(word).cast("I") for word in map(_packed, words)}
        self.largest_id = max(map(max, packed.values()))
        self._always = tuple(ids[0] for ids in packed.values() if len(ids) == 1)
        # Of longer words, by the last token before their end: the tokens before it, packed, and the end. As bytes they are
        # compared at once: a client's words of many tokens, all of which the output has begun, delay no other's step.
        self._after: dict[int, list[tuple[bytes, int]]] = {}
        self._longest = 0  # tokens before an end
        for word, ids in packed.items():
            if len(ids) > 1:
                self._after.setdefault(ids[-2], []).append((word[: -ids.itemsize], ids[-1]))
                self._longest = max(self._longest, len(ids) - 1)

    @property
    def depend_on_output(self) -> bool:
        return bool(self._after)

    def at(self, tokens: list[int], num_prompt: int) -> tuple[int, ...]:
        """The ids that may not follow `tokens`: prompt and output, which `num_prompt` splits."""
        begun = self._after.get(tokens[-1]) if self._after else None
        if begun is None:
            return self._always
        output = _packed(tokens[max(num_prompt, len(tokens) - self._longest) :])
        ends = {end for beginning, end in begun if output.endswith(beginning)}
        return (*self._always, *ends)


def _packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()
