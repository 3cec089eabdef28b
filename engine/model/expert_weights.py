"""One rank's share of the tensors of a layer's experts.

Checkpoints have a tensor for each expert and matrix, or one of three dimensions for all experts: [experts, 2 · inner,
hidden] and [experts, hidden, inner]. gpt-oss has the latter transposed, [experts, hidden, 2 · inner] and [experts,
inner, hidden], or in MXFP4, which is not transposed; in both its outputs of gate and up are interleaved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.experts import ExpertConfig
from engine.model.layer_weights import LayerWeights


class ExpertWeights:
    """Reads the tensors of one layer; each method raises ModelError naming a tensor that is missing or misshapen."""

    def __init__(
        self,
        weights: LayerWeights,
        config: ExpertConfig,
        hidden: int,
        at: str,
        rank: int,
        size: int,
        *,
        whole: bool,
    ):
        """`at`: the layer, "layers.N.". `whole`: a rank holds whole experts."""
        self._weights, self._config, self._hidden = weights, config, hidden
        self._rank, self._size = rank, size
        names = config.flags.names
        router = f"{names.router}.weight"
        block = next((one for one in names.blocks if weights.has(f"{at}{one}.{router}")), names.blocks[0])
        self._at = f"{at}{block}."
        self._fused = weights.has(f"{self._at}experts.gate_up_proj")
        self._adds_down_bias = whole or rank == 0
        self.held = config.held(rank, size, whole)
        self._own = slice(0, config.width) if whole else self._share(config.width)

    def router(self) -> Tensor:
        """[experts, hidden]."""
        name = f"{self._at}{self._config.flags.names.router}.weight"
        weight = self._weights.get(name, self._config.count, self._hidden)
        # The sigmoid form multiplies in fp32, with weights that were rounded to the model's dtype
        return weight.float() if self._config.flags.scores == "sigmoid" else weight

    def router_bias(self) -> Tensor | None:
        """[experts]; None if the family has no biases."""
        flags = self._config.flags
        name = f"{self._at}{flags.names.router}.bias"
        return self._weights.get(name, self._config.count) if flags.biases else None

    def correction(self) -> Tensor | None:
        """float32 [experts], added to scores for the choice only; None where scores are a softmax."""
        if self._config.flags.scores != "sigmoid":
            return None
        name = f"{self._at}gate.e_score_correction_bias"
        return self._weights.get(name, self._config.count, dtype=torch.float32)

    def gate_up(self, expert: int) -> Tensor:
        """[2 · inner, hidden] of this rank."""
        width, own = self._config.width, self._own
        if self._config.flags.interleaved:
            both = slice(2 * own.start, 2 * own.stop)
            return _deinterleaved(self._matrix("gate_up_proj", expert, 2 * width, self._hidden, rows=both))
        gate, up, _ = self._config.flags.names.parts
        if not self._fused:
            parts = [
                self._get(f"experts.{expert}.{one}.weight", width, self._hidden, own) for one in (gate, up)
            ]
            return torch.cat(parts)
        shape = (self._config.count, 2 * width, self._hidden)
        rows = (own, slice(own.start + width, own.stop + width))
        name = f"{self._at}experts.gate_up_proj"
        return torch.cat([self._weights.get(name, *shape, item=expert, rows=one) for one in rows])

    def down(self, expert: int) -> Tensor:
        """[hidden, inner] of this rank."""
        width, own = self._config.width, self._own
        if self._config.flags.interleaved:
            return self._matrix("down_proj", expert, self._hidden, width, columns=own)
        if not self._fused:
            name = f"{self._at}experts.{expert}.{self._config.flags.names.parts[2]}.weight"
            return self._weights.get(name, self._hidden, width, columns=own)
        shape = (self._config.count, self._hidden, width)
        return self._weights.get(f"{self._at}experts.down_proj", *shape, item=expert, columns=own)

    def gate_up_bias(self, expert: int) -> Tensor | None:
        """[2 · inner] of this rank; None if the family has no biases."""
        if not self._config.flags.biases:
            return None
        shape, own = (self._config.count, 2 * self._config.width), self._own
        name, rows = f"{self._at}experts.gate_up_proj_bias", slice(2 * own.start, 2 * own.stop)
        return _deinterleaved(self._weights.get(name, *shape, item=expert, rows=rows))

    def down_bias(self, expert: int) -> Tensor | None:
        """[hidden]; None if the family has no biases. Where ranks share an expert, only the first one has its bias,
        because their results are added."""
        if not self._config.flags.biases or not self._adds_down_bias:
            return None
        name = f"{self._at}experts.down_proj_bias"
        return self._weights.get(name, self._config.count, self._hidden, item=expert)

    def shared_gate_up(self) -> Tensor:
        width, shared = self._config.shared_width, self._config.flags.names.shared
        own = self._share(width)
        names = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
        return torch.cat([self._get(name, width, self._hidden, own) for name in names])

    def shared_down(self) -> Tensor:
        width, shared = self._config.shared_width, self._config.flags.names.shared
        name = f"{self._at}{shared}.down_proj.weight"
        return self._weights.get(name, self._hidden, width, columns=self._share(width))

    def shared_gate(self) -> Tensor:
        return self._weights.get(f"{self._at}{self._config.flags.names.shared}_gate.weight", 1, self._hidden)

    def _matrix(
        self,
        name: str,
        expert: int,
        outputs: int,
        inputs: int,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Tensor:
        """Rows or columns of an expert's matrix [outputs, inputs], from one tensor for all experts."""
        shape = (self._config.count, outputs, inputs)
        return self._weights.expert(
            f"{self._at}experts.{name}", *shape, item=expert, rows=rows, columns=columns
        )

    def _get(self, name: str, rows: int, columns: int, own: slice) -> Tensor:
        return self._weights.get(self._at + name, rows, columns, rows=own)

    def _share(self, width: int) -> slice:
        share = width // self._size
        return slice(self._rank * share, (self._rank + 1) * share)


def _deinterleaved(outputs: Tensor) -> Tensor:
    """[2 · inner, …]: interleaved outputs of gate and up → those of gate, then those of up."""
    return torch.cat((outputs[::2], outputs[1::2]))
