"""Writes `int8/`, a checkpoint that compressed-tensors 0.20.0 made, and the weights that it reads back from it.

Not run by the tests, which have no such package: `python make_int8.py` in an environment with it and transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

SCHEME = {
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "observer": None,
    },
    "targets": ["Linear"],
}  # fmt: skip
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "attention_bias": False,
    "bos_token_id": None, "eos_token_id": 63, "pad_token_id": None,
}  # fmt: skip


def main(target: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).to(torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        parameter.data.uniform_(0.6, 1.4) if "norm" in name else parameter.data.normal_(0.0, 0.3)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": SCHEME}, ignore=["lm_head"])
    )
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            low, high = module.weight.aminmax(dim=1, keepdim=True)
            module.weight_scale.data, _ = calculate_qparams(low, high, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(str(target))
    compressor.decompress_model(model)
    read_back = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items() if "proj.weight" in name
    }
    save_file(
        {name: tensor for name, tensor in read_back.items() if not name.endswith("_scale")},
        target / "read_back.st",
    )


if __name__ == "__main__":
    main(Path(__file__).with_name("int8"))
