"""Context, vocabulary and end tokens of config.json, in text_config for models of several media."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ModelError
from cluster.protocol.model_limits import context_tokens, end_tokens, json_object, text_part, vocab_size

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


def test_end_tokens_of_the_generation_config_go_before_those_of_the_model_and_its_text_part() -> None:
    """Routers give them to the compiler of grammars, and workers end by them."""
    text = {"architectures": GEMMA, "text_config": {"eos_token_id": 5}}
    assert end_tokens(text, {}, 300) == (5,)
    whole = {**text, "eos_token_id": [1, 106]}
    assert end_tokens(whole, {}, 300) == (1, 106)
    assert end_tokens(whole, {"eos_token_id": 9}, 300) == (9,)
    assert end_tokens(whole, {"eos_token_id": None}, 300) == ()
    assert end_tokens(whole, {}, 106) == (1,)  # an id that no token has is left out
    assert end_tokens({"architectures": GEMMA, "text_config": {}}, {}, 300) == (1,)
    assert end_tokens({"architectures": ["Glm4ForCausalLM"]}, {}, 151_338) == (151_329, 151_336)
    assert end_tokens({}, {}, 300) == ()


@pytest.mark.parametrize("value", ["2", 1.5, True, [2, "3"], {}])
def test_end_tokens_are_numbers(value) -> None:
    for raw, generation in (({"eos_token_id": value}, {}), ({}, {"eos_token_id": value})):
        with pytest.raises(ModelError, match="eos_token_id is not a number or a list of numbers") as caught:
            end_tokens(raw, generation, 300)
        assert caught.value.field == "eos_token_id"


def test_a_file_without_an_object_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert json_object(file) == {}
    for text in ("[]", "{", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ModelError, match=file.name) as caught:
            json_object(file)
        assert caught.value.field == file.name
