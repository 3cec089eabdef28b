"""The families' defaults are Hugging Face's, every key of theirs is understood, and docs/models.md says what is tested."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from engine.model import keys, support
from engine.model.families import FAMILIES
from tests.harness.checkpoints import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "Glm4ForCausalLM": "glm4",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
# Read from other places in Hugging Face's classes than a field's default.
ELSEWHERE = {"rope_local_base_freq", "rope_theta", "sliding_window_pattern", "partial_rotary_factor"}


def defaults_of(kind: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    found = CONFIG_MAPPING["gemma3_text" if kind == "gemma3" else kind]
    return {one.name: one.default for one in fields(found) if one.default is not MISSING}


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_and_defaults_are_those_of_the_library(name):
    family, theirs = FAMILIES[name], defaults_of(KINDS[name])
    for key, value in theirs.items():
        if key in family.fixed:
            assert (not value and not family.fixed[key]) or family.fixed[key] == value, key
        elif key not in family.keys and key not in keys.COSMETIC_KEYS:
            assert not value or key == "return_dict", f"{key} = {value!r} is neither read nor refused"
    for key, value in family.defaults.items():
        if key not in ELSEWHERE:
            assert theirs[key] == value, key
    for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias"):
        if key in theirs and key in family.keys:
            assert family.default(key) == theirs[key], key


def test_every_family_has_a_variant_that_is_compared():
    assert {KINDS[name] for name in FAMILIES} == {kind for kind, _ in VARIANTS.values()}


def test_the_page_is_as_the_tables_are():
    assert support.page(support.PAGE.read_text()) == support.PAGE.read_text()


@pytest.mark.parametrize("test", [*support.TESTS.values(), *support.WHOLE.values()])
def test_the_tests_that_the_page_names_take_every_variant(test):
    file, name = test.split("::")
    functions = {
        one.name: one
        for one in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(one, ast.FunctionDef)
    }
    assert any("variants(" in ast.unparse(one) for one in functions[name].decorator_list)


@pytest.mark.parametrize("name", support.REFUSALS)
def test_the_refusals_of_the_page_are_the_errors(name):
    from cluster.errors import ModelError

    with pytest.raises(ModelError) as caught:
        keys.check_quantization({"quantization_config": {"quant_algo": name}})
    assert caught.value.message == support.REFUSALS[name]
