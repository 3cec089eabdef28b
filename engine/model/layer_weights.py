"""One rank's share of the tensors of a layer, by the family's names and in the form that the decoder computes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.protocol.kv_heads import head_range
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint

# Where a checkpoint's tensors begin: text models, and the text part of models for several media, as Hugging Face writes
# it now and wrote it before.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class LayerWeights:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, rank: int, size: int):
        self._config, self._checkpoint = config, checkpoint
        c, dim = config, config.head_dim
        kv = head_range(rank, size, c.num_kv_heads)
        heads, width = c.num_heads // size, c.intermediate_size // size
        self._q_rows = slice(rank * heads * dim, (rank + 1) * heads * dim)
        self._kv_rows = slice(kv[0] * dim, kv[1] * dim)
        self._inner = slice(rank * width, (rank + 1) * width)
        self._order = c.dim_order()
        self._prefix = next(
            (one for one in _PREFIXES if checkpoint.has(f"{one}embed_tokens.weight")), _PREFIXES[0]
        )

    def table(self, name: str, rows: slice) -> Tensor:
        """Of the vocabulary: `embed_tokens` or `lm_head`."""
        full = f"{self._prefix}{name}.weight"
        if name == "lm_head":
            full = next((one for one in _HEADS if self._checkpoint.has(one)), _HEADS[0])
        return self._checkpoint.get(full, self._config.vocab_size, self._config.hidden_size, rows=rows)

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

    def qkv(self, at: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the rank's queries, keys and values."""
        c, names = self._config, self._config.family.names
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        rows = (self._q_rows, self._kv_rows, self._kv_rows)
        weights = self._parts(at, names.qkv, (q, kv, kv), rows, "weight")
        biases = self._parts(at, names.qkv, (q, kv, kv), rows, "bias") if c.attention_bias else None
        return self._joined_heads(weights), None if biases is None else self._joined_heads(biases)

    def gate_up(self, at: str) -> tuple[Tensor, Tensor | None]:
        c, names = self._config, self._config.family.names
        sizes, rows = (c.intermediate_size,) * 2, (self._inner,) * 2
        weight = torch.cat(self._parts(at, names.gate_up, sizes, rows, "weight"))
        bias = torch.cat(self._parts(at, names.gate_up, sizes, rows, "bias")) if c.mlp_bias else None
        return weight, bias

    def output(self, at: str) -> Tensor:
        c = self._config
        return self.get(
            f"{at}self_attn.o_proj.weight", c.hidden_size, c.num_heads * c.head_dim, columns=self._q_rows
        )

    def output_bias(self, at: str) -> Tensor | None:
        c = self._config
        return self.get(f"{at}self_attn.o_proj.bias", c.hidden_size) if c.output_bias else None

    def down(self, at: str) -> Tensor:
        c = self._config
        return self.get(f"{at}mlp.down_proj.weight", c.hidden_size, c.intermediate_size, columns=self._inner)

    def down_bias(self, at: str) -> Tensor | None:
        c = self._config
        return self.get(f"{at}mlp.down_proj.bias", c.hidden_size) if c.mlp_bias else None

    def has(self, name: str) -> bool:
        return self._checkpoint.has(self._prefix + name)

    def get(self, name: str, *shape: int, **part: Any) -> Tensor:
        """A tensor of a layer; `part` as in Checkpoint.get."""
        return self._checkpoint.get(self._prefix + name, *shape, **part)

    def _parts(
        self, at: str, names: Sequence[str], sizes: Sequence[int], rows: Sequence[slice], kind: str
    ) -> list[Tensor]:
        """Of each product, the given rows of its weight or bias. Products of one name follow each other in one tensor."""
        inputs = (self._config.hidden_size,) if kind == "weight" else ()
        found = []
        for index, (name, own) in enumerate(zip(names, rows, strict=True)):
            same = [size for other, size in zip(names, sizes, strict=True) if other == name]
            before = sum(
                size for other, size in zip(names[:index], sizes[:index], strict=True) if other == name
            )
            at_rows = slice(own.start + before, own.stop + before)
            found.append(self.get(f"{at}{name}.{kind}", sum(same), *inputs, rows=at_rows))
        return found

    def _joined_heads(self, parts: list[Tensor]) -> Tensor:
        q, k, v = parts
        return torch.cat((self._ordered(q), self._ordered(k), v))

    def _ordered(self, rows: Tensor) -> Tensor:
        """Rows of heads, with the dimensions of each in the order in which the kernels rotate them."""
        if self._order is None:
            return rows
        heads = rows.view(-1, self._config.head_dim, *rows.shape[1:])
        return heads[:, self._order].reshape(rows.shape)

    def _offset(self, weight: Tensor) -> Tensor:
        """1 + w where the family has it so; rounded once, to the dtype of the weights."""
        if not self._config.family.norm_offset:
            return weight
        return (weight.float() + 1.0).to(weight.dtype)
