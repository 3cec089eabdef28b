"""Context and vocabulary of config.json, in text_config for models of several media."""

from __future__ import annotations

import pytest

from cluster.errors import ModelError
from cluster.protocol.model_limits import context_tokens, text_part, vocab_size

GEMMA = ["Gemma3ForConditionalGeneration"]


def test_the_text_part_of_a_wrapper_is_read() -> None:
    raw = {
        "architectures": GEMMA,
        "max_position_embeddings": 9,
        "text_config": {"max_position_embeddings": 4096, "vocab_size": 300},
    }
    assert context_tokens(raw) == 4096 and vocab_size(raw) == 300
    assert text_part(raw) is raw["text_config"]


def test_a_key_that_is_not_there_has_the_familys_default() -> None:
    published = {"architectures": GEMMA, "text_config": {"hidden_size": 2560}}
    assert context_tokens(published) == 131_072 and vocab_size(published) == 262_208
    assert context_tokens({"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": None}) == 4096
    others: list[dict[str, object]] = [
        {},
        {"architectures": 5},
        {"architectures": []},
        {"architectures": [None]},
    ]
    for other in others:
        assert context_tokens(other) == 2048 and vocab_size(other) is None


def test_other_models_are_not_read_from_a_text_config() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "text_config": {"max_position_embeddings": 9}}
    assert context_tokens(raw) == 2048 and text_part(raw) is raw


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, "512", True, [512]])
def test_what_is_no_size_is_refused_by_its_key(value) -> None:
    for key, read in (("max_position_embeddings", context_tokens), ("vocab_size", vocab_size)):
        for raw in ({key: value}, {"architectures": GEMMA, "text_config": {key: value}}):
            with pytest.raises(ModelError, match="not a positive number") as caught:
                read(raw)
            assert caught.value.field == key


@pytest.mark.parametrize("text", [None, 5, []])
def test_a_wrapper_without_a_text_part_is_refused(text) -> None:
    with pytest.raises(ModelError, match="no text_config") as caught:
        context_tokens({"architectures": GEMMA, "text_config": text})
    assert caught.value.field == "text_config"
