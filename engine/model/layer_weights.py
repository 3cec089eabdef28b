"""One rank's share of the tensors of a layer, by the family's names and in the form that the decoder computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.errors import ModelError
from cluster.protocol.kv_heads import head_range
from engine.layers.linear import Int8Weight, Weight, join
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from engine.ops.codes import CodedWeight

# Where a checkpoint's tensors begin: text models, and the text part of models for several media, as Hugging Face writes
# it now and wrote it before; base models.
PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_COMPARED_ROWS = 4096


class LayerWeights:
    """`at` is the layer, "layers.N."; each method raises ModelError naming a tensor that is missing or misshapen."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, rank: int, size: int):
        self._config, self._checkpoint = config, checkpoint
        own = RankRows.of(config, rank, size)
        self._q_rows, self._kv_rows, self._inner = own.q, own.kv, own.inner
        self._prefix = next(
            (one for one in PREFIXES if checkpoint.has(f"{one}embed_tokens.weight")), PREFIXES[0]
        )

    def embedding(self, rows: slice) -> Tensor:
        c = self._config
        return self.get("embed_tokens.weight", c.vocab_size, c.hidden_size, rows=rows)

    def head(self, rows: slice, embedding: Tensor) -> Weight:
        """The output head [rows, hidden]: `embedding`, of the same rows, where the configuration ties them. A stored head
        that differs is taken even so, as by Hugging Face, which warns of it."""
        c, name = self._config, self._stored_head()
        if c.tie_embeddings and (name is None or self._equals_embedding(name, rows, embedding)):
            return embedding
        return self._checkpoint.head(name or _HEADS[0], c.vocab_size, c.hidden_size, rows=rows)

    def has_untied_head(self) -> bool:
        """Whether a stored head differs from the embedding, although the configuration ties them. Compares all rows, in
        parts: the load reads them again, from the page cache."""
        c, name = self._config, self._stored_head()
        if not c.tie_embeddings or name is None:
            return False
        parts = (
            slice(at, min(at + _COMPARED_ROWS, c.vocab_size)) for at in range(0, c.vocab_size, _COMPARED_ROWS)
        )
        return not all(self._equals_embedding(name, rows, self.embedding(rows)) for rows in parts)

    def _stored_head(self) -> str | None:
        return next((one for one in _HEADS if self._checkpoint.has(one)), None)

    def _equals_embedding(self, name: str, rows: slice, embedding: Tensor) -> bool:
        """Compared in parts, so that a model that fits without a head of its own needs no room for one."""
        c = self._config
        for first in range(0, len(embedding), _COMPARED_ROWS):
            own = embedding[first : first + _COMPARED_ROWS]
            begin = rows.start + first
            part = slice(begin, begin + len(own))
            stored = self._checkpoint.head(name, c.vocab_size, c.hidden_size, rows=part)
            if not isinstance(stored, Tensor) or not torch.equal(stored, own):
                return False
        return True

    def norm(self, name: str | None, at: str = "") -> Tensor | None:
        if name is None:
            return None
        weight = self.get(f"{at}{name}.weight", self._config.hidden_size)
        return self._offset(weight)

    def qk_norms(self, at: str) -> tuple[Tensor | None, Tensor | None]:
        c = self._config
        q, k = f"{at}self_attn.q_norm.weight", f"{at}self_attn.k_norm.weight"
        if not c.qk_norm:
            return None, None
        if c.qk_norm == "row":
            dim = c.head_dim
            return (
                self._ordered(self.get(q, c.num_heads * dim, rows=self._q_rows)),
                self._ordered(self.get(k, c.num_kv_heads * dim, rows=self._kv_rows)),
            )
        return self._offset(self._ordered(self.get(q, c.head_dim))), self._offset(
            self._ordered(self.get(k, c.head_dim))
        )

    def qkv(self, at: str) -> tuple[Weight, Tensor | None]:
        """Weight and bias of the rank's queries, keys and values."""
        c = self._config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        rows = (self._q_rows, self._kv_rows, self._kv_rows)
        parts = rows_of(c.family.names.qkv, (q, kv, kv), rows)
        *heads, values = self._matrices(at, parts)
        weight = join(f"{self._prefix}{at}self_attn", [*map(self._ordered_weight, heads), values])
        if not c.attention_bias:
            return weight, None
        *heads_bias, value_bias = self._biases(at, parts)
        return weight, torch.cat([*map(self._ordered, heads_bias), value_bias])

    def gate_up(self, at: str) -> tuple[Weight, Tensor | None]:
        c = self._config
        parts = rows_of(c.family.names.gate_up, (c.intermediate_size,) * 2, (self._inner,) * 2)
        weight = join(f"{self._prefix}{at}mlp", self._matrices(at, parts))
        return weight, torch.cat(self._biases(at, parts)) if c.mlp_bias else None

    def output(self, at: str) -> Weight:
        c = self._config
        return self.matrix(
            f"{at}self_attn.o_proj.weight", c.hidden_size, c.num_heads * c.head_dim, columns=self._q_rows
        )

    def output_bias(self, at: str) -> Tensor | None:
        c = self._config
        return self.get(f"{at}self_attn.o_proj.bias", c.hidden_size) if c.output_bias else None

    def sinks(self, at: str) -> Tensor:
        """Attention sinks, float32 [heads of this rank]."""
        heads = self._config.num_heads
        own = slice(self._q_rows.start // self._config.head_dim, self._q_rows.stop // self._config.head_dim)
        name = f"{at}self_attn.sinks"
        found = self.get(name, heads, rows=own, dtype=torch.float32)
        if not (found < torch.inf).all():  # -inf is no sink; beside NaN or inf no score has a weight
            raise ModelError(
                f"tensor {self._prefix}{name} has sinks that are NaN or infinite", field=self._prefix + name
            )
        return found

    def down(self, at: str) -> Weight:
        c = self._config
        name = f"{at}mlp.down_proj.weight"
        return self.matrix(name, c.hidden_size, c.intermediate_size, columns=self._inner)

    def down_bias(self, at: str) -> Tensor | None:
        c = self._config
        return self.get(f"{at}mlp.down_proj.bias", c.hidden_size) if c.mlp_bias else None

    def has(self, name: str) -> bool:
        return self._checkpoint.has(self._prefix + name)

    def get(self, name: str, *shape: int, **part: Any) -> Tensor:
        """A tensor of a layer; `part` as in Checkpoint.get."""
        return self._checkpoint.get(self._prefix + name, *shape, **part)

    def matrix(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None
    ) -> Weight:
        return self._checkpoint.matrix(self._prefix + name, *shape, rows=rows, columns=columns)

    def expert(self, name: str, *shape: int, **part: Any) -> Tensor:
        """An expert's matrix; `shape` and `part` as in Checkpoint.expert."""
        return self._checkpoint.expert(self._prefix + name, *shape, **part)

    def _matrices(self, at: str, parts: Sequence[Rows]) -> list[Weight]:
        hidden = self._config.hidden_size
        return [self.matrix(f"{at}{one.name}.weight", one.size, hidden, rows=one.rows) for one in parts]

    def _biases(self, at: str, parts: Sequence[Rows]) -> list[Tensor]:
        return [self.get(f"{at}{one.name}.bias", one.size, rows=one.rows) for one in parts]

    def _ordered_weight(self, weight: Weight) -> Weight:
        if isinstance(weight, Tensor):
            return self._ordered(weight)
        if isinstance(weight, CodedWeight):
            return weight.each(self._ordered)
        return Int8Weight(self._ordered(weight.codes), self._ordered(weight.scales))

    def _ordered(self, rows: Tensor) -> Tensor:
        return ordered(self._config, rows)

    def _offset(self, weight: Tensor) -> Tensor:
        """1 + w for families that multiply by it; in float32, because bf16 would round it to a multiple of 2⁻⁷."""
        return weight.float() + 1.0 if self._config.family.norm_offset else weight


class RankRows(NamedTuple):
    """A rank's rows of queries, of keys and of values, and of the MLP's inner size."""

    q: slice
    kv: slice
    inner: slice

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> RankRows:
        c, dim = config, config.head_dim
        kv = head_range(rank, size, c.num_kv_heads)
        heads, width = c.num_heads // size, c.intermediate_size // size
        return cls(
            slice(rank * heads * dim, (rank + 1) * heads * dim),
            slice(kv[0] * dim, kv[1] * dim),
            slice(rank * width, (rank + 1) * width),
        )


def ordered(config: ModelConfig, rows: Tensor) -> Tensor:
    """Rows of heads, with the dimensions of each in the order in which the kernels rotate them.

    Scales move with their row: those of blocks of several rows (FP8 in blocks of 128) have been repeated for each row.
    """
    order = config.dim_order()
    if order is None:
        return rows
    heads = rows.view(-1, config.head_dim, *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor; `size`: all that it has."""

    name: str
    size: int
    rows: slice


def rows_of(names: Sequence[str], sizes: Sequence[int], own: Sequence[slice]) -> list[Rows]:
    """The rows to read: of each product `own`, in the tensor of its name. Products of one name follow each other in one
    tensor."""
    found = []
    for index, (name, rows) in enumerate(zip(names, own, strict=True)):
        of_name = [size if other == name else 0 for other, size in zip(names, sizes, strict=True)]
        before = sum(of_name[:index])
        found.append(Rows(name, sum(of_name), slice(rows.start + before, rows.stop + before)))
    return found
