"""The decoder: attention and a gated MLP; families differ by flags only (families.py). Every rank runs its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.protocol.kv_heads import head_range
from engine.layers.linear import Linear, MakeLinear
from engine.layers.moe import MAX_PAIRS, Mlp, Moe
from engine.layers.row_norms import RowNorms
from engine.model.config import ModelConfig
from engine.model.expert_weights import ExpertWeights
from engine.model.layer_weights import LayerWeights
from engine.model.make_moe import make_moe
from engine.model.weights import Checkpoint
from engine.ops.base import LayerOps
from engine.parallel.group import TpGroup


@dataclass(frozen=True)
class Layer:
    """Norms that the family lacks are None: in front of attention and MLP, and of what these add to the stream."""

    attention_in: Tensor | None
    qkv: Linear
    output: Linear
    output_bias: Tensor | None  # added once, after the ranks' shares are summed
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Tensor | None
    mlp_in: Tensor | None
    mlp: Mlp | Moe
    down_bias: Tensor | None
    mlp_out: Tensor | None


AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]


QKV, OUTPUT, GATE_UP, DOWN = "qkv", "output", "gate_up", "down"  # products of a layer
# Of a layer, the product of a name that computes with adapters what this one computes without.
Adapt = Callable[[int, str, Linear], Linear]


def _unchanged(layer: int, name: str, linear: Linear) -> Linear:
    return linear


class Decoder:
    """`forward` returns hidden states, `logits` the logits of chosen rows of them."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        group: TpGroup,
        linear: MakeLinear,
        *,
        expert_parallel: bool = False,
        adapt: Adapt = _unchanged,
    ):
        """`adapt` makes the products that adapters may change."""
        c = self.config = config
        self._adapt = adapt
        self._whole_experts = expert_parallel
        self.group = group
        size, rank = group.size, group.rank
        self.num_heads = c.num_heads // size
        self.kv_heads = head_range(rank, size, c.num_kv_heads)
        self.num_kv_heads = self.kv_heads[1] - self.kv_heads[0]
        share = c.vocab_size // size
        self._vocab = slice(rank * share, (rank + 1) * share)
        weights = LayerWeights(config, checkpoint, rank, size)
        self.embedding = weights.embedding(self._vocab)
        # In the dtype of the table, as Hugging Face has it
        self.embedding_scale = embedding_scale(c, self.embedding.dtype)
        final_norm = weights.norm("norm")
        assert final_norm is not None, "it has a name"
        self.final_norm = final_norm
        self.head = linear(weights.head(self._vocab, self.embedding), None, shared=c.tie_embeddings)
        self.layers = [self._layer(weights, index, linear) for index in range(c.num_layers)]
        # Attention sinks, float32 [layers, heads of this rank]
        self.sinks = (
            torch.stack([weights.sinks(f"layers.{index}.") for index in range(c.num_layers)])
            if c.family.sinks
            else None
        )
        # Of each layer, the norm after it
        self.following = [layer.attention_in for layer in self.layers[1:]] + [self.final_norm]
        self.finish = _finish_of(config)

    @property
    def capturable(self) -> bool:
        """Whether its steps may be recorded as CUDA graphs. Not those with experts: no card has yet recorded a grouped
        product."""
        return self.config.experts is None

    def unmeasured_bytes(self, tokens: int) -> int:
        """Bytes that a step of so many tokens may take beside those of one that was measured: a rank of whole experts
        takes the most if it holds those of every token."""
        experts = self.config.experts
        if experts is None or not self._whole_experts or self.group.size == 1:
            return 0
        pairs = min(MAX_PAIRS, tokens * experts.per_token)
        return pairs * (2 * self.config.hidden_size + 3 * experts.width) * self.embedding.itemsize

    def _layer(self, weights: LayerWeights, index: int, linear: MakeLinear) -> Layer:
        names, at = self.config.family.names, f"layers.{index}."
        qkv, bias = weights.qkv(at)
        q_norm, k_norm = weights.qk_norms(at)
        product = self._adapt(index, QKV, linear(qkv, bias))
        if self.config.qk_norm == "row":
            assert q_norm is not None and k_norm is not None, "the family has them"
            product = RowNorms(product, (q_norm, k_norm), self.config.norm_eps, self.group)
            q_norm = k_norm = None
        return Layer(
            attention_in=weights.norm(names.attention_in, at),
            qkv=product,
            output=self._adapt(index, OUTPUT, linear(weights.output(at), None, split_inputs=True)),
            output_bias=weights.output_bias(at),
            q_norm=q_norm,
            k_norm=k_norm,
            attention_out=weights.norm(names.attention_out, at),
            mlp_in=weights.norm(names.mlp_in, at),
            mlp=self._mlp(weights, index, linear),
            down_bias=weights.down_bias(at),
            mlp_out=weights.norm(names.mlp_out, at),
        )

    def _mlp(self, weights: LayerWeights, index: int, linear: MakeLinear) -> Mlp | Moe:
        c, at = self.config, f"layers.{index}."
        if c.experts is None or not c.experts.layers[index]:
            gate_up, down = linear(*weights.gate_up(at)), linear(weights.down(at), None, split_inputs=True)
            return Mlp(self._adapt(index, GATE_UP, gate_up), self._adapt(index, DOWN, down))
        rank, size = self.group.rank, self.group.size
        own = ExpertWeights(weights, c.experts, c.hidden_size, at, rank, size, whole=self._whole_experts)
        return make_moe(c.experts, own, linear)

    def forward(self, tokens: Tensor, ops: LayerOps, attention: AttentionFunction) -> Tensor:
        """tokens: int64 [T] → hidden states [T, hidden] after the final norm. Call `ops.begin` first."""
        x = self.embed(tokens)
        first = self.layers[0].attention_in
        y = x if first is None else ops.norm(x, first)
        for index, layer in enumerate(self.layers):
            q, k, v = ops.heads(index, layer.qkv(y), layer.q_norm, layer.k_norm)
            mixed = layer.output(attention(index, q, k, v))
            y = _add(ops, x, self._sum(ops, mixed, layer.output_bias, layer.attention_out), layer.mlp_in)
            inner = layer.mlp(y, ops.gate)
            y = _add(ops, x, self._sum(ops, inner, layer.down_bias, layer.mlp_out), self.following[index])
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        return self.whole_logits(self.head(hidden))

    def whole_logits(self, share: Tensor) -> Tensor:
        """Logits of all ranks from this rank's share of the head's output: [rows, own tokens] → float32 [rows, vocab]."""
        return self.finish(self.group.gather_last(share).float())

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [T] → [T, hidden]."""
        if self.group.size == 1:
            x = F.embedding(tokens, self.embedding)
        else:
            inside = (tokens >= self._vocab.start) & (tokens < self._vocab.stop)
            local = torch.where(inside, tokens - self._vocab.start, 0)
            x = self.group.all_reduce(F.embedding(local, self.embedding) * inside[:, None])
        return x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)

    def _sum(self, ops: LayerOps, share: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
        """Sum a part's output over the ranks, add its bias and norm it: the result is added to the stream."""
        whole = self.group.all_reduce(share)
        if bias is not None:
            whole = whole + bias
        return whole if norm is None else ops.norm(whole, norm)


def _add(ops: LayerOps, x: Tensor, delta: Tensor, norm: Tensor | None) -> Tensor:
    """x += delta, in place; returns what the next part of the layer reads."""
    return x.add_(delta) if norm is None else ops.add_norm(x, delta, norm)


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """`dtype`: of the weights."""
    scale = config.embedding_scale
    return float(torch.tensor(scale).to(dtype)) if config.family.scaled_embedding else scale


def _finish_of(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The family's last operation on float32 logits; it may work in place."""
    cap, divisor = config.logits_cap, config.logits_divisor
    if cap:
        return lambda logits: logits.div_(cap).tanh_().mul_(cap)
    if divisor != 1.0:
        return lambda logits: logits.div_(divisor)
    return lambda logits: logits
