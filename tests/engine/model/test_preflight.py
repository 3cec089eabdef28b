"""Errors in config.json and the settings are raised before any weight is read or any rank is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.errors import ConfigError, ModelError
from engine import build
from tests.worker.fake_rank import Reports
from worker.ranks import local, ranks

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SLIDING = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 64}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
MIXTRAL_BYTES = 93_405_585_408  # of the published checkpoint, from its index
GLM_MOE = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8}


@pytest.fixture
def describe(tmp_path):
    """A model directory with a config.json and no weights: reading weights would fail."""

    def write(**changes: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return tmp_path

    return write


def settings(model: Path, **more: Any) -> EngineConfig:
    return EngineConfig(model=model, device="cpu", kv_memory_bytes=64 << 20, **more)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"unsloth_version": "7", "use_mrope": False, "of_next_year": None},
        {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
        {"hidden_act": None},
        {"layer_types": ["full_attention"] * 2},
        {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_a_valid_config_passes(describe, changes):
    model, resolved = build.check(settings(describe(**changes)))
    assert model.num_layers == 2 and resolved.device == "cpu" and resolved.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "LlamaForCausalLM"),
        ({"architectures": ["FalconMambaForCausalLM"]}, "architectures", "recurrent state"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "architectures", "recurrent state"),
        ({"mamba_d_state": 16}, "mamba_d_state", "recurrent state"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config", "HQQ is not supported"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            "quantization_config",
            "NVFP4",
        ),
        (
            {"quantization_config": {"config_groups": {}, "format": "mxfp8-quantized"}},
            "quantization_config",
            "MXFP8",
        ),
        ({"of_next_year": {"attends": "backwards"}}, "of_next_year", "unknown for Llama"),
        ({"clip_qkv": 8.0}, "clip_qkv", "unknown for Llama"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias", "unknown"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True, "hidden_act": None},
            "use_bidirectional_attention",
            "None only",
        ),
        ({"architectures": ["Phi3ForCausalLM"], "full_attn_mod": 2}, "full_attn_mod", "1 only"),
        (
            {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0},
            "residual_multiplier",
            "positive",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config", "no text_config"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}},
            "vocab_size",
            "unknown for Gemma 3",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 2},
            "layer_types",
            "alike",
        ),
        ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts", "from 1 on"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok", "has 8 experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 3}, "mlp_only_layers", "list"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, "decoder_sparse_step", "from"),
        ({**GLM_MOE, "n_group": 3}, "n_group", "3 groups"),
        ({**GLM_MOE, "n_group": 4, "topk_group": 2}, "topk_group", "fewer than 8"),
        ({**GLM_MOE, "routed_scaling_factor": -1}, "routed_scaling_factor", "positive"),
        ({**GLM_MOE, "n_shared_experts": 0}, "n_shared_experts", "from 1 on"),
        *(
            ({key: {"type": kind, "factor": 4.0}}, "rope_parameters.rope_type", "original length")
            for key in ("rope_scaling", "rope_parameters")
            for kind in ("su", "dynamic", "mrope", 7)
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_parameters.short_factor", "48? numbers"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": -1}}, "rope_parameters.beta_fast", "positive"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "finetuned": True}},
            "rope_parameters.finetuned",
            "unknown",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters.factor", "positive"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor", "positive"),
        ({"rope_theta": -1.0}, "rope_parameters.rope_theta", "positive"),
        *(
            ({"rope_scaling": {**LLAMA3, key: None}}, f"rope_parameters.{key}", "positive")
            for key in LLAMA3
            if key != "rope_type"
        ),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_parameters.high_freq_factor", "above"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters",
            "one setting for all layers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "whole heads"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
            "whole",
        ),
        ({"hidden_act": "gelu"}, "hidden_act", "silu"),
        ({"head_dim": 7}, "head_dim", "even"),
        *(
            ({"rms_norm_eps": eps}, "rms_norm_eps", "small")
            for eps in (None, "1e-5", -1.0, 0, True, float("nan"), float("inf"))
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -5}, "sliding_window", "negative"),
        ({**SLIDING, "layer_types": ["sliding_attention"]}, "layer_types", "1 layer_types for 2 layers"),
        ({**SLIDING, "layer_types": ["sliding_attention"] * 3}, "layer_types", "3 layer_types for 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types", "linear_attention"),
        ({**SLIDING, "layer_types": ["chunked_attention"] * 2}, "layer_types", "full_attention"),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_its_key(describe, changes, field, says):
    with pytest.raises(ModelError, match=says) as caught:
        build.check(settings(describe(**changes)))
    assert caught.value.field == field


def test_end_tokens_that_no_vocabulary_has_ban_nothing(describe):
    """Where min_tokens is not reached they are forbidden: -1 would be the last token, 5000 none, and the request fails."""
    model, _ = build.check(settings(describe(eos_token_id=[-1, 2, 95, 96, 5000])))
    assert model.eos_token_ids == (2, 95)


@pytest.mark.parametrize(
    ("size", "changes", "says"),
    [
        (5, {}, "num_attention_heads = 12.* 1, 2, 3?.*"),
        (
            8,
            {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 100},
            "intermediate_size",
        ),
        (4, {"vocab_size": 98}, "vocab_size = 98"),
        (3, {"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        (6, {"num_key_value_heads": 4}, "num_key_value_heads = 4"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused(describe, size, changes, says):
    with pytest.raises(ConfigError, match=says) as caught:
        build.check(settings(describe(**changes), tensor_parallel=size))
    assert caught.value.field == "tensor_parallel"


def test_ranks_share_experts_by_rows_or_whole(describe):
    uneven = describe(**{**MIXTRAL, "intermediate_size": 14_337})
    with pytest.raises(ConfigError, match=r"14337.*with expert_parallel this one too"):
        build.check(settings(uneven, tensor_parallel=2))
    whole = settings(uneven, tensor_parallel=2, expert_parallel=True)
    build.check(whole.model_copy(update={"kv_memory_bytes": 1 << 40}))


def test_whole_experts_are_refused_where_there_are_none_or_too_few(describe):
    with pytest.raises(ConfigError, match="Llama has no experts") as caught:
        build.check(settings(describe(), expert_parallel=True))
    assert caught.value.field == "expert_parallel"
    few = settings(describe(**MIXTRAL, num_local_experts=2), tensor_parallel=4, expert_parallel=True)
    with pytest.raises(ConfigError, match="number of experts = 2"):
        build.check(few)


def test_experts_are_not_quantised(describe):
    with pytest.raises(ConfigError, match="experts are not supported in int8") as caught:
        build.check(settings(describe(**MIXTRAL), quantization="int8"))
    assert caught.value.field == "quantization"
    for form, title in (("int8", "compressed-tensors: int8 weights"), ("formats/awq", "AWQ, 4 bits")):
        stored = json.loads((Path(__file__).parents[1] / "golden" / form / "config.json").read_text())
        with pytest.raises(ModelError, match=rf"quantised experts \({title}") as refused:
            build.check(settings(describe(**MIXTRAL, quantization_config=stored["quantization_config"])))
        assert refused.value.field == "quantization_config"


@pytest.mark.parametrize(("ranks", "whole"), [(1, False), (2, False), (2, True), (8, True)])
def test_a_rank_has_its_share_of_the_experts_bytes(describe, ranks, whole):
    large = settings(describe(**MIXTRAL), tensor_parallel=ranks, expert_parallel=whole)
    model, resolved = build.check(large.model_copy(update={"kv_memory_bytes": 1 << 40}))
    expected = pytest.approx(MIXTRAL_BYTES / ranks, rel=1e-3)  # norms and routers are whole on every rank
    assert build.weight_bytes(model, resolved) == expected


@pytest.mark.parametrize("size", [1, 2, 4, 12])
def test_ranks_that_can_share_it_pass(describe, size):
    """Where there are more ranks than KV heads, heads are replicated."""
    build.check(settings(describe(), tensor_parallel=size))


def test_the_sizes_that_fit_are_named(describe):
    with pytest.raises(ConfigError, match=r"sizes that fit: 1, 2, 4, 12\b"):
        build.check(settings(describe(), tensor_parallel=5))


def test_a_pool_that_cannot_hold_a_context_is_refused(describe):
    with pytest.raises(ConfigError, match="more") as caught:
        build.check(settings(describe()).model_copy(update={"kv_memory_bytes": 1 << 16}))
    assert caught.value.field == "kv_memory"


@pytest.mark.parametrize(
    ("more", "changes"),
    [
        ({"tensor_parallel": 5}, {}),
        ({}, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
        ({"max_model_len": 9999}, {}),
    ],
)
def test_a_worker_starts_no_rank_for_an_invalid_config(describe, monkeypatch, more, changes):
    def too_late(*arguments: object) -> None:
        raise AssertionError("a rank was started, or weights were read")

    monkeypatch.setattr(ranks, "spawn_rank", too_late)
    monkeypatch.setattr(local, "load", too_late)
    engine = settings(describe(**changes), **{"tensor_parallel": 2, **more})
    with pytest.raises((ConfigError, ModelError)) as caught:
        ranks.open_ranks(WorkerConfig(role="prefill", engine=engine), epoch=1, reports=Reports())
    assert caught.value.field


@pytest.mark.parametrize(
    ("role", "size", "refused"), [("decode", 1, True), ("decode", 2, False), ("prefill", 1, False)]
)
def test_a_slot_that_holds_no_part_is_refused_before_weights_are_read(describe, role, size, refused):
    """One layer of one block has 8 KiB, shared by the ranks."""
    engine = settings(describe(head_dim=16), tensor_parallel=size, dtype="float32")
    config = WorkerConfig(role=role, engine=engine, transfer=TransferConfig(slot_bytes=4096))
    if not refused:
        local.check(config)
        return
    with pytest.raises(ConfigError, match="8192 bytes") as caught:
        local.check(config)
    assert caught.value.field == "transfer.slot_bytes"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_roles_refuse_a_kv_format_that_the_other_one_cannot_hold(describe, role):
    engine = settings(describe(head_dim=16), dtype="bfloat16", kv_dtype="bf16>int8", page_size=12)
    with pytest.raises(
        ConfigError, match="kv_dtype int8: needs a page_size that 8 divides, not 12"
    ) as caught:
        local.check(WorkerConfig(role=role, engine=engine))
    assert caught.value.field == "kv_dtype"


# --- which card ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:-1", "cuda:1,2", "cpu:0", "CUDA", "mps", "", " cuda"]
)
def test_an_invalid_device_is_refused(device):
    with pytest.raises(ValidationError, match="device"):
        EngineConfig(model=Path("/m"), device=device)


def test_one_card_is_one_rank():
    with pytest.raises(ValidationError, match=r"CUDA_VISIBLE_DEVICES"):
        EngineConfig(model=Path("/m"), device="cuda:1", tensor_parallel=2)
    assert EngineConfig(model=Path("/m"), device="cuda", tensor_parallel=2).device == "cuda"


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("cuda:1", 0, "cuda:1"),
        ("cuda:0", 0, "cuda:0"),
        ("cuda", 0, "cuda:0"),
        ("cuda", 3, "cuda:3"),
        ("cuda", 5, "cuda:1"),
        ("auto", 2, "cuda:2"),
    ],
)
def test_the_card_that_is_named_is_taken(monkeypatch, name, rank, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert build.rank_device(name, rank) == torch.device(expected)


def test_the_processor_is_the_same_for_every_rank():
    assert build.rank_device("cpu", 3) == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "count", "says"),
    [("cuda:4", 4, "cuda:0 to cuda:3"), ("cuda:0", 0, "no CUDA device"), ("cuda", 0, "no CUDA device")],
)
def test_a_card_that_is_not_there_is_refused(describe, monkeypatch, device, count, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=says) as caught:
        build.check(settings(describe()).model_copy(update={"device": device}))
    assert caught.value.field == "device"


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_ranks_of_several_nodes_need_an_address_of_this_machine(checkpoint, address):
    """192.0.2.0/24 is for documentation: no machine has an address in it."""
    engine = EngineConfig(model=checkpoint("llama"), tensor_parallel=2, nodes=2)
    with pytest.raises(ConfigError, match=f"advertise_host.*{address}.*cannot listen") as caught:
        ranks.open_ranks(WorkerConfig(role="prefill", engine=engine, advertise_host=address), 1, Reports())
    assert caught.value.field == "advertise_host"
