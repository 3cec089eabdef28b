"""A grammar is allowed if the masks of the first tokens of its answers are found in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.grammar.library import make_tokenizer
from cluster.grammar.spec import GrammarSpec
from router.request.grammar import verdict
from tests.harness.model_text import VOCAB, make_model_text

LETTERS = GrammarSpec("regex", "[a-z]+")


def test_a_mask_that_takes_long_is_a_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer((make_model_text(tmp_path) / "tokenizer.json").read_text(), VOCAB, (2,))
    assert verdict.tried(tokenizer, LETTERS) is None
    monkeypatch.setattr(verdict, "MASK_SECONDS", 0.0)
    reason = "the tokens that it allows take too long to find"
    assert verdict.tried(tokenizer, LETTERS) == (reason, "0 s for a token")


class Ends:
    """A matcher that allows token 1 three times, and then nothing."""

    def __init__(self) -> None:
        self._left = 3

    def compute_bitmask(self) -> bytes:
        self._left -= 1
        return bytes([2 if self._left >= 0 else 0])

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def consume_tokens(self, tokens: list[int]) -> bool:
        return tokens == [1]

    def get_error(self) -> str:
        return ""

    def stop_reason(self) -> str:
        return "NoExtensionBias"


def test_what_is_found_only_behind_the_first_token_is_a_reason_too() -> None:
    assert verdict._walked(Ends(), LETTERS) == (
        "it allows no token: no answer ever ends that matches it",
        "",
    )
