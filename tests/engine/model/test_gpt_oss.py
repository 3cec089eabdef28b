"""What gpt-oss alone has: sinks change tokens, its published configuration is read, and its experts in MXFP4 equal those
of transformers' code. Tests of all families are in test_parity.py and others."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ModelError
from engine import build
from engine.layers.linear import TorchLinear
from engine.model.config import ModelConfig
from engine.model.expert_weights import ExpertWeights
from engine.model.layer_weights import LayerWeights
from engine.model.make_moe import make_moe
from engine.model.weights import Checkpoint
from engine.ops.base import OpsShape
from engine.ops.torch_ops import TorchOps
from engine.quant import formats
from engine.quant.formats import FORMATS, MXFP4_EXPERTS
from engine.request import EngineRequest, SamplingParams
from tests.engine.ranks import engine_of, run, runners
from tests.gpu.models import write
from tests.harness import mxfp4
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import assert_greedy
from tests.harness.live_bytes import taken

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
# As openai/gpt-oss-20b has it, with one layer of each kind
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gpt-oss"), "gpt-oss")


def described(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**PUBLISHED, **changes}))
    return path


def test_the_published_configuration_is_read(tmp_path) -> None:
    model, resolved = build.check(EngineConfig(model=described(tmp_path), tensor_parallel=2))
    assert (model.swiglu_alpha, model.swiglu_limit) == (1.702, 7.0)
    assert model.windows == (128, 0)
    assert model.rope["truncate"] is False and model.rope["factor"] == 32.0
    assert model.attention_bias and model.output_bias and model.experts is not None
    assert (model.experts.count, model.experts.per_token, model.experts.width) == (32, 4, 2880)
    assert model.quantization is not None and model.quantization.name == MXFP4_EXPERTS
    assert resolved.dtype == "bfloat16", "no key names it"
    assert formats.computed(model.quantization, "auto", formats.CUDA) == formats.DTYPE
    attention = 2880 * 64 * (64 + 8 + 8 + 64) + 2 * 2880
    experts = 32 * (3 * 2880 * 2880 + 2880)
    assert build.weight_bytes(model, EngineConfig(model=tmp_path, dtype="bfloat16")) == 2 * (
        2 * (attention + experts) + 2 * 201088 * 2880
    )


def test_its_layers_alternate_and_its_rope_is_yarn_by_default(tmp_path) -> None:
    raw = {key: value for key, value in PUBLISHED.items() if key not in ("layer_types", "rope_scaling")}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 5}))
    model = ModelConfig.read(tmp_path)
    assert model.windows == (128, 0, 128, 0, 128)
    assert model.rope == {**PUBLISHED["rope_scaling"], "rope_theta": 150000, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"swiglu_alpha": None}, "swiglu_alpha"),
        ({"architectures": ["MixtralForCausalLM"], "head_dim": 90}, "quantization_config"),
        ({"architectures": ["LlamaForCausalLM"]}, "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantization_config"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(changes, field, tmp_path) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.read(described(tmp_path, **changes))
    assert caught.value.field == field


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_sinks_that_are_no_numbers_are_refused(number, model, tmp_path) -> None:
    name = "model.layers.1.self_attn.sinks"
    copied = Path(shutil.copytree(model, tmp_path / "model"))
    tensors = load_file(copied / "model.safetensors")
    tensors[name][1] = number
    save_file(tensors, copied / "model.safetensors")
    config = ModelConfig.read(copied)
    with Checkpoint(copied, torch.float32, torch.device("cpu")) as checkpoint:
        weights = LayerWeights(config, checkpoint, 0, 1)
        weights.sinks("layers.0.")
        with pytest.raises(ModelError, match=f"tensor {name} has sinks that are NaN or infinite"):
            weights.sinks("layers.1.")


def answer(model: Path, ranks: int = 1, **settings: Any) -> list[int]:
    with runners(model, ranks, **settings) as made:
        found: list[int] = run(engine_of(made[0]), EngineRequest("r", prompt_ids(70), GREEDY)).tokens["r", 0]
    return found


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_sinks_decide_tokens(backend, model, tmp_path) -> None:
    """With sinks of -inf, which have no weight, most tokens differ. test_parity.py compares those with sinks."""

    def remove(tensors: dict[str, Tensor]) -> None:
        sinks = [name for name in tensors if name.endswith("self_attn.sinks")]
        assert len(sinks) == 3
        for name in sinks:
            tensors[name].fill_(-math.inf)

    given = answer(model, attention_backend=backend)
    without = answer(mxfp4.rewritten(model, tmp_path / "without", remove), attention_backend=backend)
    assert sum(one != other for one, other in zip(without, given, strict=True)) > GREEDY.max_tokens // 2


def linear(weight: Any, bias: Tensor | None, **kind: bool) -> TorchLinear:
    return TorchLinear(weight, bias)


@pytest.mark.parametrize("whole", [False, True])
@torch.inference_mode()
def test_ranks_add_up_to_one(whole, model) -> None:
    """The bias of an expert's second product counts once, on the rank that has the expert, or on the first of all."""
    config = ModelConfig.read(model)
    assert config.experts is not None
    shape = OpsShape(4, 2, 16, 1e-5, config.activation, (), config.swiglu_alpha, config.swiglu_limit)
    ops = TorchOps(shape, torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(1, 1, 2, 2, 16, 16))
    y, found = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)), []
    with Checkpoint(model, torch.float32, torch.device("cpu")) as tensors:
        for size in (1, 2):
            layer = torch.zeros(20, 64)
            for rank in range(size):
                weights = LayerWeights(config, tensors, rank, size)
                own = ExpertWeights(weights, config.experts, 64, "layers.1.", rank, size, whole=whole)
                layer += make_moe(config.experts, own, linear)(y, ops.gate)
            found.append(layer)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


# --- experts in MXFP4 --------------------------------------------------------------------------------


def expanded(tensors: dict[str, Tensor]) -> None:
    """By transformers' code."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name in [one.removesuffix("_blocks") for one in tensors if one.endswith("_blocks")]:
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


@pytest.fixture
def packed(model, tmp_path) -> Path:
    return mxfp4.packed(model, tmp_path / "packed")


def test_experts_in_mxfp4_are_those_of_transformers(packed, tmp_path) -> None:
    """To the last bit, in fp32 and bf16, cut in the middle of groups too: both ranks have 16 of 32 inner values."""
    plain = mxfp4.rewritten(packed, tmp_path / "plain", expanded, quantization_config=None)
    for dtype in (torch.float32, torch.bfloat16):
        for rank, size in ((0, 1), (0, 2), (1, 2)):
            found = []
            for path in (packed, plain):
                config = ModelConfig.read(path)
                assert config.experts is not None
                weights = Checkpoint(path, dtype, torch.device("cpu"), quantization=config.quantization)
                layer = LayerWeights(config, weights, rank, size)
                own = ExpertWeights(layer, config.experts, 64, "layers.2.", rank, size, whole=False)
                found.append([make(one) for make in (own.gate_up, own.down) for one in range(6)])
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
            assert found[0][0].shape == (64 // size, 64) and found[0][0].dtype is dtype


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_in_mxfp4_is_served(ranks, packed, tmp_path) -> None:
    plain = mxfp4.rewritten(packed, tmp_path / "plain", expanded, quantization_config=None)
    found = answer(packed, ranks)
    assert_greedy("MXFP4", plain, prompt_ids(70), found)
    assert FORMATS[MXFP4_EXPERTS].writer


def test_an_expert_goes_to_the_device(packed) -> None:
    quantization = ModelConfig.read(packed).quantization
    with Checkpoint(packed, torch.bfloat16, torch.device("meta"), quantization=quantization) as tensors:
        found = tensors.expert("model.layers.0.mlp.experts.down_proj", 6, 64, 32, item=5)
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.bfloat16, (64, 32))


def test_an_expert_is_expanded_alone(tmp_path) -> None:
    """Beside the file's mapping no more is in memory than one of 64 experts, and what unpacks a part of it."""
    blocks, scales = mxfp4.blocks_of(64, 512, 256, seed=1)
    save_file({"m_blocks": blocks, "m_scales": scales}, tmp_path / "model.safetensors")
    quantization = ModelConfig.read(described(tmp_path)).quantization
    with Checkpoint(tmp_path, torch.bfloat16, torch.device("cpu"), quantization=quantization) as tensors:
        live = taken(lambda: tensors.expert("m", 64, 512, 256, item=63))
    assert 2 * 512 * 256 < live - blocks.nbytes - scales.nbytes < 5 * 512 * 256


@pytest.mark.parametrize(
    ("tensor", "value", "says"),
    [
        ("gate_up_proj_scales", torch.zeros(6, 64, 1, dtype=torch.uint8), r"\(6, 64, 1\), expected \(6, 64, 2\)"),
        ("gate_up_proj_scales", torch.zeros(6, 64, 2), "stored as torch.float32, expected uint8"),
        ("gate_up_proj_scales", None, "gate_up_proj_scales is missing"),
        ("gate_up_proj_blocks", None, "gate_up_proj is missing"),
        ("down_proj_blocks", torch.zeros(6, 64, 2, 16, dtype=torch.uint8), r"expected \(6, 64, 1, 16\) for 6 experts"),
        ("down_proj_bias", torch.zeros(6, 63), r"\(6, 63\), expected \(6, 64\)"),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_named(tensor, value, says, packed, tmp_path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[f"model.layers.0.mlp.experts.{tensor}"]
        if value is not None:
            tensors[f"model.layers.0.mlp.experts.{tensor}"] = value

    damaged = mxfp4.rewritten(packed, tmp_path / "damaged", damage)
    with pytest.raises(ModelError, match=says):
        build.load_model(EngineConfig(model=damaged, kv_memory_bytes=4 << 20))
