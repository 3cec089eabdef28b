"""The products of a layer that adapters may change, and this rank's share of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.decoder import DOWN, GATE_UP, OUTPUT, QKV
from engine.model.layer_weights import RankRows, ordered, rows_of

O_PROJ, DOWN_PROJ = "self_attn.o_proj", "mlp.down_proj"


@dataclass(frozen=True)
class Part:
    """Some outputs of a product: `rows` of the module's B, and `columns` of its A."""

    module: str  # below the layer
    outputs: int  # of the whole module
    inputs: int
    rows: slice
    columns: slice
    heads: bool = False  # its rows are those of rotated heads, which the engine keeps in an order of its own

    @property
    def width(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def own_inputs(self) -> int:
        """The number of inputs of this rank's share."""
        return int(self.columns.stop - self.columns.start)

    def own_b(self, config: ModelConfig, b: Tensor) -> Tensor:
        """[outputs, rank] of the module → [width, rank]."""
        rows = b[self.rows]
        return ordered(config, rows) if self.heads else rows


Product = tuple[Part, ...]  # the outputs of its parts lie side by side


def products(config: ModelConfig, layer: int, rank: int, size: int) -> Mapping[str, Product]:
    """A layer's products by name; those of experts are left out."""
    c, own = config, RankRows.of(config, rank, size)
    hidden, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    everything = slice(0, hidden)
    found: dict[str, Product] = {
        QKV: tuple(
            Part(one.name, one.size, hidden, one.rows, everything, heads=index < 2)
            for index, one in enumerate(rows_of(c.family.names.qkv, (q, kv, kv), (own.q, own.kv, own.kv)))
        ),
        OUTPUT: (Part(O_PROJ, hidden, q, everything, own.q),),
    }
    if c.experts is None or not c.experts.layers[layer]:
        inner = c.intermediate_size
        found[GATE_UP] = tuple(
            Part(one.name, one.size, hidden, one.rows, everything)
            for one in rows_of(c.family.names.gate_up, (inner, inner), (own.inner, own.inner))
        )
        found[DOWN] = (Part(DOWN_PROJ, hidden, inner, everything, own.inner),)
    return found


def parts(config: ModelConfig, rank: int, size: int) -> Mapping[str, Sequence[Part]]:
    """A rank's parts of every module that an adapter may change, by the module's name without the model's prefix: one, or
    those of a fused module."""
    found: dict[str, list[Part]] = {}
    for layer in range(config.num_layers):
        for product in products(config, layer, rank, size).values():
            for part in product:
                found.setdefault(f"layers.{layer}.{part.module}", []).append(part)
    return found
