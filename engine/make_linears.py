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
    PanelLinear,
    TorchLinear,
    Weight,
)
from engine.model.config import ModelConfig
from engine.ops.codes import CodedWeight
from engine.ops.team import KernelTeam, Team
from engine.parallel.group import TpGroup
from engine.quant import formats, int8


def maker_of(config: EngineConfig, model: ModelConfig, team: Team, group: TpGroup) -> MakeLinear:
    """Return what makes each of the model's linear layers; `config` has no "auto" left."""
    if config.quantization == "int8":
        if int8.has_kernels(team):
            torch.set_num_threads(1)  # torch's operations need no second thread
        return int8.maker(team, group, triton=config.attention_backend == "triton")
    plain = _plain_linear(config, team)
    if not formats.is_int8(model.quantization, ""):
        return plain
    if not int8.has_kernels(team):
        torch.set_num_threads(config.threads)  # its products are torch's
    return int8.maker(team, group, plain, triton=config.attention_backend == "triton")


def _plain_linear(config: EngineConfig, team: Team) -> MakeLinear:
    """The kind of linear layer for plain weights: our own product on a CPU in bf16, and then torch's operations need no
    second thread; on CUDA our own for single rows if Triton works, which attention by `triton` shows."""
    if config.dtype != "bfloat16":
        return _torch_linear
    if config.attention_backend == "triton":
        return _cuda_linear
    if not isinstance(team, KernelTeam):
        return _torch_linear
    from engine.ops import cpu_products

    torch.set_num_threads(1)
    area = cpu_products.Area()

    def make(weight: Weight, bias: Tensor | None, *, split_inputs: bool = False) -> Linear:
        assert isinstance(weight, Tensor), "only plain weights come here"
        fits = weight.shape[1] % 2 == 0
        return PanelLinear(weight, bias, team, area) if fits else TorchLinear(weight, bias)

    return make


def _cuda_linear(weight: Weight, bias: Tensor | None, *, split_inputs: bool = False) -> Linear:
    if isinstance(weight, CodedWeight):
        return CodedLinear(weight, bias)
    assert isinstance(weight, Tensor), "int8 layers are made by engine/quant/int8.py"
    return CudaLinear(weight, bias)


def _torch_linear(weight: Weight, bias: Tensor | None, *, split_inputs: bool = False) -> Linear:
    assert isinstance(weight, Tensor), "only plain weights come here"
    return TorchLinear(weight, bias)
