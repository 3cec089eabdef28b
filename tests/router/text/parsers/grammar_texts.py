"""Matchers of grammars over a small tokenizer, whose markers are tokens or plain text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cluster.grammar.library import make_matcher, make_tokenizer
from cluster.grammar.spec import GrammarSpec
from tests.harness.model_text import VOCAB, write_tokenizer

EOS = 2
_FIRST = 400
MARKERS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
    *("[CALL_ID]", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>"),
)


class Matched:
    """`tokens`: every marker is one token."""

    def __init__(self, folder: Path, *, tokens: bool):
        write_tokenizer(folder)
        raw = json.loads((folder / "tokenizer.json").read_text())
        if tokens:
            _add_markers(raw)
        self.tokenizer_json = json.dumps(raw)
        self._tokenizer = Tokenizer.from_str(self.tokenizer_json)
        self._made: dict[GrammarSpec, Any] = {}
        self._library = make_tokenizer(self.tokenizer_json, VOCAB, (EOS,))

    def marker(self, text: str) -> str:
        token = self._tokenizer.token_to_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def id_of(self, marker: str) -> int | None:
        return self._tokenizer.token_to_id(marker)  # type: ignore[no-any-return]

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def matcher(self, spec: GrammarSpec) -> Any:
        if spec not in self._made:
            self._made[spec] = make_matcher(spec, self._library)
        return self._made[spec].deep_copy()

    def prefix(self, spec: GrammarSpec, text: str) -> int:
        """How many of the text's tokens match."""
        matcher, count = self.matcher(spec), 0
        for token in self.ids(text):
            if not matcher.try_consume_tokens([token]):
                break
            count += 1
        return count

    def accepts(self, spec: GrammarSpec, text: str) -> bool:
        matcher = self.matcher(spec)
        ids = self.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    def walk(self, spec: GrammarSpec, seed: int, most: int = 1500) -> str | None:
        """The text along tokens that the mask allows, drawn at random; None: it does not end within `most`."""
        matcher, draws = self.matcher(spec), random.Random(seed)
        ids: list[int] = []
        for _ in range(most):
            bits = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            allowed = [token for token in range(VOCAB) if bits[token >> 3] >> (token & 7) & 1]
            token = draws.choice(allowed)
            if token == EOS:
                return self.text(ids)
            assert matcher.consume_tokens([token])
            ids.append(token)
            if matcher.is_stopped():
                return self.text(ids)
        return None

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _add_markers(raw: dict[str, Any]) -> None:
    vocab = raw["model"]["vocab"]
    texts = {token: text for text, token in vocab.items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token, text in enumerate(MARKERS, _FIRST):
        del vocab[texts[token]]
        vocab[text] = token
        raw["added_tokens"].append({"id": token, "content": text, "special": True, **plain})
