"""Hugging Face's model with fake-quantised layers: the definition of int8 weights and rows, in plain arithmetic.

Integers are computed in float64, where every sum of products is exact, so only norms, attention and rotation round
differently from the engine's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


def quantize(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float64 integers, and float32 scales [rows, 1]."""
    top = (x.abs().amax(-1) if largest is None else largest).float()[:, None]
    inverse = torch.where(top < 1e-30, 0.0, torch.full_like(top, 127.0) / top)
    return (x.double() * inverse.double()).round(), torch.where(top < 1e-30, 0.0, top * (1.0 / 127.0))


def product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, inputs] times codes [outputs, inputs], scaled; float32."""
    rows, of_rows = quantize(x)
    out = (rows @ codes.double().T).float() * of_rows * scales.float()
    return out if bias is None else out + bias.float()


class FakeLinear(nn.Module):
    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None):
        super().__init__()
        self.codes, self.scales, self.bias = codes, scales, bias

    def forward(self, x: Tensor) -> Tensor:
        out = product(x.flatten(0, -2), self.codes, self.scales, self.bias)
        return out.view(*x.shape[:-1], -1).to(x.dtype)


def fake_quantized(path: Path, *, head: bool = True) -> Any:
    """The checkpoint in `path`, every matrix product with int8 weights and rows; `head`: the output head too. Stored
    codes and scales are used as they are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = load_file(path / "model.safetensors")
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float().eval()
    plain = {name: one.float() for name, one in tensors.items() if one.is_floating_point()}
    model.load_state_dict(
        {name: one for name, one in plain.items() if not name.endswith("_scale")}, strict=False
    )
    model.tie_weights()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or (name == "lm_head" and not head):
            continue
        if f"{name}.weight_scale" in tensors:
            codes, scales = tensors[f"{name}.weight"].double(), plain[f"{name}.weight_scale"]
        else:
            codes, scales = quantize(module.weight.detach())
        bias = None if module.bias is None else module.bias.detach()
        model.set_submodule(name, FakeLinear(codes, scales[:, 0], bias))
    return model
