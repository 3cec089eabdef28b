"""One rank's buffers for adapters: as many slots as adapters may be loaded at a time."""

from __future__ import annotations

import torch

from cluster.config.worker import EngineConfig
from engine.layers.linear import Linear
from engine.lora.adapted_linear import AdaptedLinear
from engine.lora.adapter_files import Adapter
from engine.lora.products import products
from engine.lora.step_rows import StepRows, kernel_bytes
from engine.model.config import ModelConfig
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.parallel.group import TpGroup


class AdapterSlots:
    """Slots are numbered from 1; 0 is the base model."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        group: TpGroup,
        dtype: torch.dtype,
        device: torch.device,
        team: Team | None = None,
    ):
        """`team`: its kernels compute what adapters add in steps of single tokens, if it has any."""
        self.count, self.max_rank = config.adapter_slots, config.max_lora_rank
        self.step = StepRows(device, team, _most_parts(model, group.size) * self.max_rank)
        if isinstance(team, KernelTeam):
            _compile(team)
        self.dtype = dtype
        self._model, self._group, self._device = model, group, device
        self._adapted: list[tuple[int, AdaptedLinear]] = []  # with the layer

    def adapt(self, layer: int, name: str, base: Linear) -> Linear:
        """The product `name` of a layer, with its adapters."""
        product = products(self._model, layer, self._group.rank, self._group.size)[name]
        made = AdaptedLinear(base, product, self.step, self.count, self.max_rank, self.dtype, self._device)
        self._adapted.append((layer, made))
        return made

    def write(self, slot: int, adapter: Adapter) -> None:
        """Between two steps; no sequence may be using the slot."""
        for layer, linear in self._adapted:
            linear.write(slot, layer, adapter.modules)


def _compile(team: KernelTeam) -> None:
    """Compile the kernels or load them: no request is to wait for that."""
    from engine.ops.cpu import jobs

    team.compile([(code, 1, ()) for code in (jobs.ADAPT_DOWN, jobs.ADAPT_UP)])


def _most_parts(model: ModelConfig, size: int) -> int:
    """The largest number of parts of one product, on any rank."""
    return max(len(one) for at in range(model.num_layers) for one in products(model, at, 0, size).values())


def slot_bytes(model: ModelConfig, config: EngineConfig, itemsize: int) -> int:
    """Bytes that all slots take on the rank that has the most; `itemsize`: of a number."""
    numbers = sum(
        sum(part.width + product[0].own_inputs for part in product)
        for layer in range(model.num_layers)
        for product in products(model, layer, 0, config.tensor_parallel).values()
    )
    return config.adapter_slots * config.max_lora_rank * numbers * itemsize


def step_bytes(model: ModelConfig, config: EngineConfig, tokens: int, itemsize: int) -> int:
    """Bytes that adapters take in a step of so many tokens, beside what the largest step was measured to take."""
    if not config.adapter_slots:
        return 0
    inner = model.intermediate_size // config.tensor_parallel
    heads = model.num_heads * model.head_dim // config.tensor_parallel
    widest = max(inner, heads, model.hidden_size)
    kernels = kernel_bytes(_most_parts(model, config.tensor_parallel) * config.max_lora_rank)
    return tokens * (2 * widest + config.max_lora_rank) * itemsize + kernels
