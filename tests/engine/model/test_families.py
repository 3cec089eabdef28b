"""The families' defaults are Hugging Face's, every key of theirs is understood, and docs/models.md says what is tested."""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.errors import ModelError
from cluster.protocol import model_limits
from engine.layers.linear import TorchLinear
from engine.model import keys, support
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, embedding_scale
from engine.model.families import FAMILIES
from engine.model.weights import Checkpoint
from engine.parallel.group import NullGroup
from router.text.tokenizer import ModelText
from tests.harness.checkpoints import VARIANTS
from tests.harness.model_text import write_tokenizer

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
    "GptOssForCausalLM": "gpt_oss",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
# Read from other places in Hugging Face's classes than a field's default.
ELSEWHERE = {
    "rope_local_base_freq",
    "rope_theta",
    "rope_parameters",
    "sliding_window_pattern",
    "partial_rotary_factor",
    "eos_token_id",
}


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
    for key in ("rms_norm_eps", "tie_word_embeddings", "attention_bias"):
        if key in theirs and key in family.keys:
            assert family.default(key) == theirs[key], key
    empty = {"architectures": [name], "text_config": {}}
    assert model_limits.context_tokens(empty) == theirs["max_position_embeddings"]
    assert model_limits.vocab_size(empty) in (None, theirs["vocab_size"])


@pytest.mark.parametrize("name", FAMILIES)
def test_end_tokens_are_the_librarys_where_no_file_names_them(name, tmp_path):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(
        "gemma3_text" if name in model_limits.WRAPPERS else KINDS[name]
    ).eos_token_id
    text = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 64, "vocab_size": 200_000,
    }  # fmt: skip
    for given, expected in (({}, theirs), ({"eos_token_id": None}, None), ({"eos_token_id": 7}, 7)):
        own = {**text, **given}
        whole = {"text_config": own} if name in model_limits.WRAPPERS else own
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **whole}))
        found = ModelConfig.read(tmp_path).eos_token_ids
        assert found == (
            () if expected is None else (expected,) if isinstance(expected, int) else tuple(expected)
        )


def test_layers_are_counted_before_anything_is_listed_for_each(tmp_path):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "num_attention_heads": 4,
        "hidden_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1 << 60}))
    with pytest.raises(ModelError, match="num_hidden_layers is 1152921504606846976, not a number from 1 to"):
        ModelConfig.read(tmp_path)


def test_every_family_has_a_variant_that_is_compared():
    assert {KINDS[name] for name in FAMILIES} == {kind for kind, _ in VARIANTS.values()}


def test_the_page_is_as_the_tables_are():
    assert support.page(support.PAGE.read_text()) == support.PAGE.read_text()


@pytest.mark.parametrize("column", support.COLUMNS.values(), ids=support.COLUMNS)
def test_the_tests_that_the_page_names_take_the_families_that_it_marks(column):
    path, name = column.test.split("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    given = [
        mark.args[1]
        for mark in getattr(module, name).pytestmark
        if mark.name == "parametrize" and mark.args[0] == "variant"
    ]
    taken = {one if isinstance(one, str) else one.values[0] for one in given[0]}
    # Llama's hand-over between processes has a test of its own: it takes the cluster that others take
    taken |= (
        {"llama"} if hasattr(module, "test_llamas_tokens_equal_the_reference_after_a_handover") else set()
    )
    kinds = {VARIANTS[one][0] for one in taken}
    assert {KINDS[one] for one in column.families} <= kinds


@pytest.mark.parametrize("name", FAMILIES)
def test_routers_and_workers_read_the_same_limits(name, tmp_path):
    """Of wrappers they are in text_config."""
    own = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 64,
    }  # fmt: skip
    stated = {"max_position_embeddings": 777, "vocab_size": 300}
    write_tokenizer(tmp_path)
    for limits in (stated, {"vocab_size": 300}):
        text = {**own, **limits}
        whole = {"text_config": text} if name in model_limits.WRAPPERS else text
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **whole}))
        model, router = ModelConfig.read(tmp_path), ModelText(tmp_path)
        router.close()
        assert model.max_model_len == router.max_position_embeddings
        assert model.vocab_size == router.vocab_size == 300
        assert (model.max_model_len == 777) == (limits is stated)


@pytest.mark.parametrize(
    ("outer", "inner", "ties"), [({}, {}, True), ({}, {"tie_word_embeddings": False}, True),
    ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False)],
)  # fmt: skip
def test_a_wrapper_ties_by_its_own_key(outer, inner, ties, tmp_path):
    text = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64, **inner}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, **outer}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.read(tmp_path).tie_embeddings is ties


@pytest.mark.parametrize("hidden", [64, 3584])
def test_gemmas_embeddings_are_scaled_in_the_dtype_of_the_weights(hidden, tmp_path):
    """As in Hugging Face's buffer of it: in bf16 the root of 3,584 is 59.75 or 60, not 59.87."""
    raw = {"architectures": ["Gemma2ForCausalLM"], "hidden_size": hidden}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.read(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert embedding_scale(config, dtype) == float(torch.tensor(hidden**0.5).to(dtype))


@pytest.mark.parametrize(("variant", "dtype"), [("gemma3", torch.float32), ("llama", torch.bfloat16)])
def test_gemmas_norms_are_not_rounded_to_bf16(variant, dtype, checkpoint):
    """1 + w in fp32, as in Hugging Face's code; others' weights stay as they are stored."""
    config = ModelConfig.read(checkpoint(variant))
    with Checkpoint(checkpoint(variant), torch.bfloat16, torch.device("cpu")) as weights:
        decoder = Decoder(config, weights, NullGroup(), lambda weight, bias, **kind: TorchLinear(weight))
        stored = weights.get("model.norm.weight", config.hidden_size)
    assert torch.equal(decoder.final_norm, stored if variant == "llama" else 1.0 + stored.float())
    layer = decoder.layers[0]
    norms = (decoder.final_norm, layer.attention_in, layer.mlp_in, layer.q_norm, layer.k_norm)
    assert {one.dtype for one in norms if one is not None} == {dtype}


def _half(x: Tensor) -> Tensor:
    return x.chunk(2, -1)[0]


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_a_wrappers_tensors_are_found_under_each_of_their_names(prefix, checkpoint, tmp_path):
    """As Gemma 3 was published, as Hugging Face writes it now, and without the other parts."""
    source = checkpoint("gemma3-multimodal")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    (now,) = {name.split("embed_tokens")[0] for name in tensors if "embed_tokens" in name}
    renamed = {name.replace(now, prefix): one for name, one in tensors.items() if name.startswith(now)}
    assert len(renamed) > 20
    save_file(renamed, tmp_path / "model.safetensors")
    config = ModelConfig.read(tmp_path)

    def plain(weight, bias, **kind):
        return TorchLinear(weight, bias)

    found, expected = (
        Decoder(config, Checkpoint(one, torch.float32, torch.device("cpu")), NullGroup(), plain)
        for one in (tmp_path, source)
    )
    assert torch.equal(found.embedding, expected.embedding) and torch.equal(
        found.final_norm, expected.final_norm
    )
    x = torch.randn(3, config.hidden_size)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(one.qkv(x), other.qkv(x))
        assert torch.equal(one.mlp(x, _half), other.mlp(x, _half))
