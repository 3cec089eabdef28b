"""Which linear layers a model is made of, by format, device and what the processor can do."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.layers.linear import (
    CodedLinear,
    CudaLinear,
    Linear,
    MakeLinear,
    NibbleLinear,
    PanelLinear,
    RowLinear,
    TorchLinear,
    Weight,
)
from engine.model.config import ModelConfig
from engine.ops.codes import CodedWeight
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.parallel.group import TpGroup
from engine.quant import formats, int8


def maker_of(config: EngineConfig, model: ModelConfig, team: Team, group: TpGroup) -> MakeLinear:
    """Return what makes each of the model's linear layers; `config` has no "auto" left."""
    quantized, stored = config.quantization == "int8", formats.is_int8(model.quantization, "")
    if (quantized or _team_of_panels(config, team)) and (int8.has_kernels(team) or not (quantized or stored)):
        torch.set_num_threads(1)  # all products are our own: torch's operations need no second thread
    triton = config.attention_backend == "triton"
    if quantized:
        return int8.maker(team, group, triton=triton)
    plain = _plain_linear(config, team)
    return int8.maker(team, group, plain, triton=triton) if stored else plain


def _team_of_panels(config: EngineConfig, team: Team) -> KernelTeam | None:
    """The team, if it multiplies plain weights by our own product on a CPU."""
    return team if config.attention_backend == "cpu" and isinstance(team, KernelTeam) else None


def _plain_linear(config: EngineConfig, team: Team) -> MakeLinear:
    """The kind of linear layer for plain weights, and for codes that are kept: our own product on a CPU; on CUDA our own
    for single rows if Triton works, which attention by `triton` shows."""
    if config.dtype == "bfloat16" and config.attention_backend == "triton":
        return _cuda_linear
    panels = _team_of_panels(config, team)
    if panels is None:
        return _torch_linear
    from engine.ops.cpu.products import bf16, in_rows

    area = bf16.Area()

    def make(
        weight: Weight, bias: Tensor | None, *, split_inputs: bool = False, shared: bool = False
    ) -> Linear:
        if isinstance(weight, CodedWeight):
            return NibbleLinear(weight, bias, panels)
        assert isinstance(weight, Tensor), "int8 layers are made by engine/quant/int8.py"
        wide = panels.dtype is torch.float32
        if wide and shared and in_rows.takes(weight.shape[1]):
            return RowLinear(weight, bias, panels)
        fits = weight.shape[1] % 2 == 0 or wide
        return PanelLinear(weight, bias, panels, area) if fits else TorchLinear(weight, bias)

    return make


def _cuda_linear(
    weight: Weight, bias: Tensor | None, *, split_inputs: bool = False, shared: bool = False
) -> Linear:
    if isinstance(weight, CodedWeight):
        return CodedLinear(weight, bias)
    assert isinstance(weight, Tensor), "int8 layers are made by engine/quant/int8.py"
    return CudaLinear(weight, bias)


def _torch_linear(
    weight: Weight, bias: Tensor | None, *, split_inputs: bool = False, shared: bool = False
) -> Linear:
    assert isinstance(weight, Tensor), "only plain weights come here"
    return TorchLinear(weight, bias)
