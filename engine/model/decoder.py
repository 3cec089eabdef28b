"""The decoder: pre-norm attention and SwiGLU; families differ by flags only. Every rank runs its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.protocol.kv_heads import head_range
from engine.layers.linear import Linear, MakeLinear, Weight, join
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from engine.ops.base import LayerOps
from engine.parallel.group import TpGroup


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    output: Linear
    output_bias: Tensor | None  # added once, after the ranks' shares are summed
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    down_bias: Tensor | None


AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """`forward` returns hidden states, `logits` the logits of chosen rows of them."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, group: TpGroup, linear: MakeLinear):
        c = self.config = config
        self.group = group
        size, rank = group.size, group.rank
        self.num_heads = c.num_heads // size
        self.kv_heads = head_range(rank, size, c.num_kv_heads)
        self.num_kv_heads = self.kv_heads[1] - self.kv_heads[0]
        share = c.vocab_size // size
        self._vocab = slice(rank * share, (rank + 1) * share)
        name = "model.embed_tokens.weight"
        self.embedding = checkpoint.get(name, c.vocab_size, c.hidden_size, rows=self._vocab)
        self.final_norm = checkpoint.get("model.norm.weight", c.hidden_size)
        head: Weight = self.embedding
        if not c.tie_embeddings:
            head = checkpoint.matrix("lm_head.weight", c.vocab_size, c.hidden_size, rows=self._vocab)
        self.head = linear(head, None)
        self.layers = [self._layer(checkpoint, index, linear) for index in range(c.num_layers)]

    def _layer(self, checkpoint: Checkpoint, index: int, linear: MakeLinear) -> Layer:
        c, get, matrix, p = self.config, checkpoint.get, checkpoint.matrix, f"model.layers.{index}."
        rank, dim, hidden, inner = self.group.rank, c.head_dim, c.hidden_size, c.intermediate_size
        q_rows = slice(rank * self.num_heads * dim, (rank + 1) * self.num_heads * dim)
        kv_rows = slice(self.kv_heads[0] * dim, self.kv_heads[1] * dim)
        width = inner // self.group.size
        mine = slice(rank * width, (rank + 1) * width)
        q_all, kv_all = c.num_heads * dim, c.num_kv_heads * dim
        parts = (("q_proj", q_all, q_rows), ("k_proj", kv_all, kv_rows), ("v_proj", kv_all, kv_rows))
        a, m = p + "self_attn.", p + "mlp."
        qkv = join(a, [matrix(f"{a}{name}.weight", out, hidden, rows=rows) for name, out, rows in parts])
        qkv_bias = None
        if c.attention_bias:
            qkv_bias = torch.cat([get(f"{a}{name}.bias", out, rows=rows) for name, out, rows in parts])
        gate_up = join(
            m, [matrix(f"{m}{name}.weight", inner, hidden, rows=mine) for name in ("gate_proj", "up_proj")]
        )
        gate_up_bias = None
        if c.mlp_bias:
            gate_up_bias = torch.cat(
                [get(f"{m}{name}.bias", inner, rows=mine) for name in ("gate_proj", "up_proj")]
            )
        return Layer(
            input_norm=get(p + "input_layernorm.weight", hidden),
            qkv=linear(qkv, qkv_bias),
            output=linear(
                matrix(a + "o_proj.weight", hidden, q_all, columns=q_rows), None, split_inputs=True
            ),
            output_bias=get(a + "o_proj.bias", hidden) if c.output_bias else None,
            q_norm=get(a + "q_norm.weight", dim) if c.qk_norm else None,
            k_norm=get(a + "k_norm.weight", dim) if c.qk_norm else None,
            post_norm=get(p + "post_attention_layernorm.weight", hidden),
            gate_up=linear(gate_up, gate_up_bias),
            down=linear(matrix(m + "down_proj.weight", hidden, inner, columns=mine), None, split_inputs=True),
            down_bias=get(m + "down_proj.bias", hidden) if c.mlp_bias else None,
        )

    def forward(self, tokens: Tensor, ops: LayerOps, attention: AttentionFunction) -> Tensor:
        """tokens: int64 [T] → hidden states [T, hidden] after the final norm. Call `ops.begin` first."""
        x = self._embed(tokens)
        y = ops.norm(x, self.layers[0].input_norm)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for index, layer in enumerate(self.layers):
            q, k, v = ops.heads(index, layer.qkv(y), layer.q_norm, layer.k_norm)
            mixed = layer.output(attention(index, q, k, v))
            y = ops.add_norm(x, self._sum(mixed, layer.output_bias), layer.post_norm)
            inner = layer.down(ops.gate(layer.gate_up(y)))
            y = ops.add_norm(x, self._sum(inner, layer.down_bias), following[index])
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        return self.group.gather_last(self.head(hidden)).float()

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.embedding)
        inside = (tokens >= self._vocab.start) & (tokens < self._vocab.stop)
        local = torch.where(inside, tokens - self._vocab.start, 0)
        return self.group.all_reduce(F.embedding(local, self.embedding) * inside[:, None])

    def _sum(self, share: Tensor, bias: Tensor | None) -> Tensor:
        whole = self.group.all_reduce(share)
        return whole if bias is None else whole + bias
