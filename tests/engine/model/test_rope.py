"""Frequencies and scalings are those of Hugging Face's own functions, and old spellings of config.json mean the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from engine.model import rope, rotary
from engine.model.config import ModelConfig

DIM = 32
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * at for at in range(DIM // 2)],
    "long_factor": [2.0 + 0.3 * at for at in range(DIM // 2)],
}
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    YARN,
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    {**YARN, "factor": 0.5},
    LONG,
    {**LONG, "attention_factor": 1.2},
    {**LONG, "factor": 3.0},
    {**LONG, "factor": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("length", [100, 1024])
@pytest.mark.parametrize("given", KINDS)
def test_frequencies_are_the_librarys(given, length, part):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotated = int(DIM * part)
    own: dict[str, Any] = {
        key: value[: rotated // 2] if isinstance(value, list) else value for key, value in given.items()
    }
    own["partial_rotary_factor"] = part
    config = LlamaConfig(
        hidden_size=2 * DIM, num_attention_heads=2, head_dim=DIM, max_position_embeddings=1024, rope_parameters=own
    )  # fmt: skip
    expected, scaling = ROPE_INIT_FUNCTIONS[own["rope_type"]](config, torch.device("cpu"), seq_len=length)
    found = rope.read({"rope_parameters": own}, 1e4, 1.0, 1024)
    rope.check(found, DIM)
    frequencies, scale = rotary.frequencies(found, rotated, length)
    torch.testing.assert_close(frequencies, expected, atol=0, rtol=1e-6)
    assert scale == pytest.approx(scaling)


def read(path, kind: str, **given: Any) -> ModelConfig:
    shape = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6}
    raw = {"num_key_value_heads": 2, "num_hidden_layers": 13, **shape, **given, "architectures": [kind]}
    (path / "config.json").write_text(json.dumps(raw))
    return ModelConfig.read(path)


def test_gemmas_old_spelling_is_the_new_one(tmp_path):
    """As published: `rope_scaling` is of full layers only, and window layers have a base of their own."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(
        tmp_path, "Gemma3ForCausalLM", rope_theta=2e6, rope_local_base_freq=2e4, rope_scaling=scaling, head_dim=16
    )  # fmt: skip
    nested = {
        "full_attention": {**scaling, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    new = read(tmp_path, "Gemma3ForCausalLM", rope_parameters=nested, head_dim=16)
    plain = read(tmp_path, "Gemma3ForCausalLM", head_dim=16)
    for one, thetas, factor in ((old, (2e6, 2e4), 8.0), (new, (2e6, 2e4), 8.0), (plain, (1e6, 1e4), None)):
        assert one.local_rope is not None
        assert (one.rope["rope_theta"], one.local_rope["rope_theta"]) == thetas
        assert one.rope.get("factor") == factor and "factor" not in one.local_rope
        assert one.table_of_layer == tuple(int(window > 0) for window in one.windows)
    assert torch.equal(rotary.rotary_tables(old, 50)[0], rotary.rotary_tables(new, 50)[0])
    assert len(rotary.rotary_tables(old, 50)[0]) == 2


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phis_old_names_of_longrope(kind, tmp_path):
    """Hugging Face reads them so, `yarn` too, and takes the factor from both lengths."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = read(
        tmp_path, "Phi3ForCausalLM", rope_scaling={"type": kind, **factors}, max_position_embeddings=1024,
        original_max_position_embeddings=256,
    )  # fmt: skip
    assert rope.kind_of(model.rope) == "longrope" and model.rope["factor"] == 4.0
    assert [model.factor_set(length) for length in (0, 256, 257)] == ["long", "short", "long"]
    frequencies = [rotary.frequencies(model.rope, 16, length)[0] for length in (256, 257)]
    torch.testing.assert_close(frequencies[0], 2 * frequencies[1])


@pytest.mark.parametrize(
    ("architecture", "kind", "more"),
    [
        ("Gemma2ForCausalLM", "gemma2", {}),
        ("Gemma3ForCausalLM", "gemma3_text", {}),
        ("Gemma3ForCausalLM", "gemma3_text", {"sliding_window_pattern": 3}),
        ("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": True, "max_window_layers": 5}),
        ("Qwen3ForCausalLM", "qwen3", {"use_sliding_window": True, "max_window_layers": 5}),
        ("Qwen3ForCausalLM", "qwen3", {"max_window_layers": 5}),
    ],
)
def test_windows_without_layer_types_are_the_librarys(architecture, kind, more, tmp_path):
    """Published checkpoints of Gemma name no types."""
    from transformers import AutoConfig

    given = {"sliding_window": 48, "num_hidden_layers": 13, **more}
    types = AutoConfig.for_model(kind, **given).layer_types
    found = read(tmp_path, architecture, **given)
    assert found.windows == tuple(48 if one == "sliding_attention" else 0 for one in types)
    assert len(set(found.windows)) == (1 if more == {"max_window_layers": 5} else 2)
