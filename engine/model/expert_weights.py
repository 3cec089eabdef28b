"""One rank's share of the tensors of a layer's experts.

Checkpoints have a tensor for each expert and matrix, or one of three dimensions for all experts: [experts, 2 · inner,
hidden] and [experts, hidden, inner].
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.experts import ExpertConfig
from engine.model.layer_weights import LayerWeights


class ExpertWeights:
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
        block = next((one for one in names.blocks if weights.has(f"{at}{one}.gate.weight")), names.blocks[0])
        self._at = f"{at}{block}."
        self._fused = weights.has(f"{self._at}experts.gate_up_proj")
        self.held = config.held(rank, size, whole)
        self._own = slice(0, config.width) if whole else self._share(config.width)

    def router(self) -> Tensor:
        weight = self._weights.get(f"{self._at}gate.weight", self._config.count, self._hidden)
        # The sigmoid form multiplies in fp32, with weights that were rounded to the model's dtype
        return weight.float() if self._config.flags.scores == "sigmoid" else weight

    def correction(self) -> Tensor | None:
        if self._config.flags.scores == "softmax":
            return None
        name = f"{self._at}gate.e_score_correction_bias"
        return self._weights.get(name, self._config.count, dtype=torch.float32)

    def gate_up(self, expert: int) -> Tensor:
        """[2 · inner, hidden] of this rank."""
        width, own = self._config.width, self._own
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
        if not self._fused:
            name = f"{self._at}experts.{expert}.{self._config.flags.names.parts[2]}.weight"
            return self._weights.get(name, self._hidden, width, columns=own)
        shape = (self._config.count, self._hidden, width)
        return self._weights.get(f"{self._at}experts.down_proj", *shape, item=expert, columns=own)

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

    def _get(self, name: str, rows: int, columns: int, own: slice) -> Tensor:
        return self._weights.get(self._at + name, rows, columns, rows=own)

    def _share(self, width: int) -> slice:
        share = width // self._size
        return slice(self._rank * share, (self._rank + 1) * share)
