"""Writes `formats/NAME/`: small checkpoints in the forms of other projects' writers, and a digest of each matrix as its
writer reads it back, in float32.

Not run by the tests, which have no such packages: `python make_formats.py [PACKAGES]` in an environment with torch,
transformers and compressed-tensors. PACKAGES holds `ct-0.9.4/`, `autoawq-0.2.9/` and `auto_gptq-0.7.1/`, unpacked; of
these only the modules that pack are imported, without their packages' own imports.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HIDDEN, INNER, GROUP = 64, 96, 32
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": 63, "torch_dtype": "bfloat16",
}  # fmt: skip
MATRICES = {
    "self_attn.q_proj": (64, HIDDEN), "self_attn.k_proj": (32, HIDDEN), "self_attn.v_proj": (32, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 64), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
Tensors = dict[str, Tensor]
# weight → tensors as stored, named as beside the product; and the matrix that they stand for
Write = Callable[[Tensor], tuple[Tensors, Tensor]]


def digest(matrix: Tensor) -> str:
    """Of the numbers: −0 is 0."""
    return hashlib.blake2b((matrix.float().contiguous() + 0.0).numpy().tobytes(), digest_size=16).hexdigest()


def make(target: Path, quantization: dict[str, Any], write: Write) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).bfloat16()

    tensors = {"model.embed_tokens.weight": random(64, HIDDEN), "lm_head.weight": random(64, HIDDEN)}
    for norm in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        tensors[f"model.{norm}.weight"] = 1 + random(HIDDEN)
    digests = {}
    for name, shape in MATRICES.items():
        at = f"model.layers.0.{name}"
        stored, matrix = write(random(*shape))
        tensors |= {f"{at}.{key}": value.contiguous() for key, value in stored.items()}
        digests[f"{at}.weight"] = digest(matrix)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors")
    config = {**SHAPE, "quantization_config": quantization}
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (target / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


# --- compressed-tensors ------------------------------------------------------------------------------


def weights_of(**changes: Any) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor",
    } | changes


def ranges(weight: Tensor, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest weight that each scale is for, in the shape of the scales."""
    if args["strategy"] == "tensor":
        low, high = weight.aminmax()
        return low[None], high[None]
    if args["strategy"] == "channel":
        return tuple(weight.aminmax(dim=1, keepdim=True))  # type: ignore[return-value]
    tall, wide = args.get("block_structure") or (1, args["group_size"])
    blocks = weight.view(len(weight) // tall, tall, -1, wide)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def compressed_tensors(
    layout: str, weights: dict[str, Any], rows: Any = None
) -> tuple[dict[str, Any], Write]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    group = {"weights": weights, "input_activations": rows, "targets": ["Linear"]}
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        scale, zero = calculate_qparams(*ranges(weight, weights), scheme.weights)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
        if zero is not None:
            state["weight_zero_point"] = zero
        stored = compressor.compress(state, scheme)
        exact = {
            key: value.float() if value.dtype is torch.bfloat16 else value for key, value in stored.items()
        }
        return stored, compressor.decompress(exact, scheme)["weight"]

    config = {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }  # fmt: skip
    return config, write


def packed_by_act_order() -> tuple[dict[str, Any], Write]:
    """By compressed-tensors 0.9.4, the last that wrote g_idx."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = weights_of(num_bits=4, type="int", strategy="group", group_size=GROUP, actorder="group")
    args = QuantizationArgs.model_validate(weights)

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(weight)))
        g_idx = (order.argsort() // GROUP).int()
        scale, zero = calculate_qparams(*ranges(weight[:, order], weights), args)
        compressor = PackedQuantizationCompressor()
        stored = compressor.compress_weight(weight, scale, args, zero, g_idx)
        stored |= {"weight_scale": scale.to(weight.dtype), "weight_g_idx": g_idx}
        codes = quantize(weight, scale, zero, args, dtype=torch.int8, g_idx=g_idx)
        return stored, dequantize(codes, stored["weight_scale"].float(), None, args, g_idx=g_idx)

    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    return config, write


# --- transformers, AutoAWQ, AutoGPTQ -----------------------------------------------------------------


def fine_grained_fp8(scale_fmt: str = "float") -> tuple[dict[str, Any], Write]:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = FineGrainedFP8Config(
        weight_block_size=(GROUP, GROUP), modules_to_not_convert=["lm_head"], scale_fmt=scale_fmt
    )
    quantizer = types.SimpleNamespace(quantization_config=config)
    writer: Any = Fp8Quantize(quantizer)  # its annotations are wrong

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        stored = writer.convert({"weight": weight})
        return stored, Fp8Dequantize(quantizer)._dequantize_one(
            stored["weight"], stored["weight_scale_inv"], torch.float32
        )

    return config.to_dict() | {"fmt": "e4m3"}, write


def without_package(root: Path, *packages: str) -> None:
    """Modules below these packages are imported without the packages' own __init__."""
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package


def asymmetric(weight: Tensor, group: int, most: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points [outputs, groups]."""
    blocks = weight.float().view(len(weight), -1, group)
    low, high = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
    scales = ((high - low) / most).half().float()
    return scales, (-low / scales).round().clamp(1, most)


def awq(root: Path) -> tuple[dict[str, Any], Write]:
    without_package(root, "awq", "awq.modules", "awq.modules.linear", "awq.utils")
    sys.modules["accelerate"] = types.ModuleType("accelerate")  # packing needs nothing of it
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight.shape
        linear = nn.Linear(inputs, outputs, bias=False)
        scales, zeros = asymmetric(weight, GROUP, 15)
        linear.weight.data = bounded(weight, scales, zeros, torch.arange(inputs) // GROUP, 15)
        made = gemm.WQLinear_GEMM.from_linear(
            linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        stored = dict(made.state_dict())
        matrix = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP)
        return stored, matrix.t()

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return config | {"modules_to_not_convert": None}, write


def bounded(weight: Tensor, scales: Tensor, zeros: Tensor, g_idx: Tensor, most: int) -> Tensor:
    """Weights that fit: the packers do not clamp."""
    s, z = scales[:, g_idx], zeros[:, g_idx]
    return weight.float().maximum(-z * s).minimum((most - z) * s)


def gptq(root: Path, bits: int, act_order: bool) -> tuple[dict[str, Any], Write]:
    without_package(root, "auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    qlinear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    most = (1 << bits) - 1

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight.shape
        order = torch.arange(inputs)
        if act_order:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(outputs))
        g_idx = (order.argsort() // GROUP).int()
        scales, zeros = asymmetric(weight[:, order], GROUP, most)
        linear = nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = bounded(weight, scales, zeros, g_idx, most)
        made = qlinear.QuantLinear(bits, GROUP, inputs, outputs, bias=False)
        made.pack(linear, scales, zeros, g_idx)
        stored = dict(made.state_dict()) | {"scales": made.scales.half()}
        made.scales = made.scales.float()
        return stored, made(torch.eye(inputs)).t()

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": False}
    return config | {"checkpoint_format": "gptq"}, write


def main(target: Path, packages: Path) -> None:
    if "act-order" in sys.argv[2:]:
        make(target / "w4a16-act-order", *packed_by_act_order())
        return
    rows = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    block = weights_of(strategy="block", block_structure=[GROUP, GROUP])
    block_rows = rows | {"strategy": "group", "group_size": GROUP}
    mx = weights_of(
        num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"
    )
    ct = compressed_tensors
    make(target / "fp8-tensor", *ct("float-quantized", weights_of(), rows | {"strategy": "tensor"}))
    make(target / "fp8-channel", *ct("float-quantized", weights_of(strategy="channel"), rows))
    make(target / "fp8-block", *ct("float-quantized", block, block_rows))
    make(target / "w4a16", *ct("pack-quantized", weights_of(**four)))
    make(target / "w4a16-asymmetric", *ct("pack-quantized", weights_of(**four, symmetric=False)))
    make(target / "w8a16-channel", *ct("pack-quantized", weights_of(type="int", strategy="channel")))
    make(target / "mxfp4", *ct("mxfp4-pack-quantized", mx))
    make(target / "fp8-deepseek", *fine_grained_fp8())
    make(target / "awq", *awq(packages / "autoawq-0.2.9"))
    make(target / "gptq-act-order", *gptq(packages / "auto_gptq-0.7.1", 4, True))
    make(target / "gptq-8", *gptq(packages / "auto_gptq-0.7.1", 8, False))
    old = {"PYTHONPATH": str(packages / "ct-0.9.4")}
    subprocess.run([sys.executable, __file__, str(packages), "act-order"], env=old, check=True)


if __name__ == "__main__":
    main(Path(__file__).with_name("formats"), Path(sys.argv[1]))
