"""The decoder: pre-norm attention and SwiGLU; families differ by flags only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import ModelConfig, inverse_frequencies
from engine.model.weights import Checkpoint


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype):
        self.config = config
        c, get = config, checkpoint.get
        self.embedding = get("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.norm = get("model.norm.weight", c.hidden_size)
        self.head = self.embedding if c.tie_embeddings else get("lm_head.weight", c.vocab_size, c.hidden_size)
        self.layers = [self._layer(checkpoint, index) for index in range(c.num_layers)]
        freq = inverse_frequencies(c)
        angles = torch.outer(torch.arange(c.max_model_len, dtype=torch.float32), freq)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def _layer(self, checkpoint: Checkpoint, index: int) -> Layer:
        c, get, p = self.config, checkpoint.get, f"model.layers.{index}."
        h, q, kv, i = (
            c.hidden_size,
            c.num_heads * c.head_dim,
            c.num_kv_heads * c.head_dim,
            c.intermediate_size,
        )
        a = p + "self_attn."
        qkv = [
            get(a + "q_proj.weight", q, h),
            get(a + "k_proj.weight", kv, h),
            get(a + "v_proj.weight", kv, h),
        ]
        bias = None
        if c.attention_bias:
            bias = torch.cat(
                [get(a + "q_proj.bias", q), get(a + "k_proj.bias", kv), get(a + "v_proj.bias", kv)]
            )
        m = p + "mlp."
        return Layer(
            input_norm=get(p + "input_layernorm.weight", h),
            qkv=torch.cat(qkv),
            qkv_bias=bias,
            output=get(a + "o_proj.weight", h, q),
            output_bias=get(a + "o_proj.bias", h) if c.output_bias else None,
            q_norm=get(a + "q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=get(a + "k_norm.weight", c.head_dim) if c.qk_norm else None,
            post_norm=get(p + "post_attention_layernorm.weight", h),
            gate_up=torch.cat([get(m + "gate_proj.weight", i, h), get(m + "up_proj.weight", i, h)]),
            gate_up_bias=torch.cat([get(m + "gate_proj.bias", i), get(m + "up_proj.bias", i)])
            if c.mlp_bias
            else None,
            down=get(m + "down_proj.weight", h, i),
            down_bias=get(m + "down_proj.bias", h) if c.mlp_bias else None,
        )

    def forward(self, tokens: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """tokens, positions: int64 [T] → hidden states [T, hidden] before the final norm."""
        c = self.config
        cos, sin = self.cos[positions][:, None, :], self.sin[positions][:, None, :]
        x = F.embedding(tokens, self.embedding)
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        for index, layer in enumerate(self.layers):
            y = self._rms(x, layer.input_norm)
            q, k, v = torch.split(F.linear(y, layer.qkv, layer.qkv_bias), [q_size, kv_size, kv_size], dim=-1)
            q = q.view(-1, c.num_heads, c.head_dim)
            k = k.view(-1, c.num_kv_heads, c.head_dim)
            v = v.view(-1, c.num_kv_heads, c.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            out = attention(index, q, k, v)
            x = x + F.linear(out.reshape(out.shape[0], -1), layer.output, layer.output_bias)
            y = self._rms(x, layer.post_norm)
            gate, up = F.linear(y, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._rms(hidden, self.norm), self.head).float()

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
