"""Runs a step plan over a paged, block-major KV cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.config import EngineConfig
from cluster.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.weights import Checkpoint
from engine.plan import ExportSink, PlanItem, StepPlan

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRunner:
    def __init__(self, config: EngineConfig):
        model = ModelConfig.read(config.model)
        dtype_name = config.dtype
        if dtype_name == "auto":
            dtype_name = "float32" if model.dtype == "float32" else "bfloat16"
        max_len = min(config.max_model_len or model.max_model_len, model.max_model_len)
        dtype = _DTYPES[dtype_name]
        self.config = config.model_copy(
            update={
                "dtype": dtype_name,
                "max_model_len": max_len,
                "device": "cpu",
                "attention_backend": "sdpa",
            }
        )
        self.model_config = model
        torch.set_num_threads(config.threads)
        self.decoder = Decoder(model, Checkpoint(config.model, dtype), dtype)
        self.page_size = config.page_size
        self.kv_head_range = (0, model.num_kv_heads)
        shape = (model.num_layers, 2, model.num_kv_heads, config.page_size, model.head_dim)
        block_bytes = torch.Size(shape).numel() * dtype.itemsize
        memory = config.kv_memory_bytes or (512 << 20)
        self.num_blocks = memory // block_bytes
        need = -(-max_len // config.page_size)
        if self.num_blocks < need:
            raise ConfigError(
                f"the KV pool holds {self.num_blocks * config.page_size} tokens, one context of {max_len} needs "
                f"{(need - self.num_blocks) * block_bytes} bytes more",
                field="kv_memory",
            )
        self.kv_cache = torch.zeros((self.num_blocks, *shape), dtype=dtype)
        self.export_sink: ExportSink | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor:
        for copy in plan.copies:
            self.kv_cache[copy.target].copy_(self.kv_cache[copy.source])
        items = plan.items
        tokens = torch.tensor([t for item in items for t in item.token_ids])
        positions = torch.tensor([p for item in items for p in range(item.begin, item.end)])
        blocks = torch.tensor(
            [item.block_ids[p // self.page_size] for item in items for p in range(item.begin, item.end)]
        )
        offsets = positions % self.page_size

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kv_cache[blocks, layer, 0, :, offsets] = k
            self.kv_cache[blocks, layer, 1, :, offsets] = v
            outs, start = [], 0
            for item in items:
                n = len(item.token_ids)
                outs.append(self._attend(layer, item, q[start : start + n]))
                start += n
            self._export(items, layer)
            return torch.cat(outs)

        hidden = self.decoder.forward(tokens, positions, attention)
        wanted, start = [], 0
        for item in items:
            start += len(item.token_ids)
            if item.wants_logits:
                wanted.append(start - 1)
        return self.decoder.logits(hidden[wanted])

    def _attend(self, layer: int, item: PlanItem, q: Tensor) -> Tensor:
        c = self.model_config
        end, n = item.end, len(item.token_ids)
        count = -(-end // self.page_size)
        kv = self.kv_cache[item.block_ids[:count], layer]
        k, v = (kv[:, i].transpose(0, 1).reshape(c.num_kv_heads, -1, c.head_dim)[:, :end] for i in (0, 1))
        group = c.num_heads // c.num_kv_heads
        q = (
            q.view(n, c.num_kv_heads, group, c.head_dim)
            .permute(1, 2, 0, 3)
            .reshape(c.num_kv_heads, -1, c.head_dim)
        )
        window = c.windows[layer]
        mask = None
        if n > 1 or window:
            rows = torch.arange(item.begin, end)[:, None]
            cols = torch.arange(end)[None, :]
            allowed = cols <= rows
            if window:
                allowed &= cols > rows - window
            mask = allowed.repeat(group, 1)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return out.view(c.num_kv_heads, group, n, c.head_dim).permute(2, 0, 1, 3).reshape(n, -1)

    def _export(self, items: list[PlanItem], layer: int) -> None:
        if self.export_sink is None:
            return
        for item in items:
            if item.export:
                self.export_sink.layer_computed(item.request_id, layer, item.begin, item.end, item.block_ids)

    def warm_up(self) -> None:
        pass
