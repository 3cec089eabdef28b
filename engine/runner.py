"""Runs a step plan on one rank: tokens through the decoder, keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.attention.base import AttentionBackend
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.ops.base import LayerOps
from engine.parallel.group import Arrivals, TpGroup
from engine.plan import ExportSink, PlanItem, StepPlan
from engine.sampling import draw


@dataclass(frozen=True)
class LoadedModel:
    """One rank's share of a model and its KV cache, made by engine/build.py."""

    config: EngineConfig  # resolved: no "auto" is left in it
    model_config: ModelConfig
    decoder: Decoder
    ops: LayerOps
    attention: AttentionBackend
    kv_cache: Tensor
    group: TpGroup

    @property
    def kv_head_range(self) -> tuple[int, int]:
        return self.decoder.kv_heads


class ModelRunner:
    """On the leader `execute` is called with a plan; other ranks follow in `serve`.

    `export_sink` is called after each layer for the items of a plan that are exported.
    """

    def __init__(self, model: LoadedModel, export_sink: ExportSink | None = None):
        self.config = model.config
        self.model_config = model.model_config
        self.kv_cache = model.kv_cache
        self.num_blocks = model.kv_cache.shape[0]
        self.page_size = model.config.page_size
        self.kv_head_range = model.kv_head_range
        self._decoder = model.decoder
        self._ops = model.ops
        self._attention = model.attention
        self._group = model.group
        self._export_sink = export_sink

    @property
    def arrivals(self) -> Arrivals:
        """This rank's progress through the group's collective operations."""
        return self._group.arrivals

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor:
        """float32 logits [items that want them, vocab], in the order of the items."""
        self._group.share(plan)
        return self._run(plan)

    @torch.inference_mode()
    def serve(self) -> None:
        """Run the leader's plans on another rank, until the leader stops the group."""
        while (plan := self._group.share(None)) is not None:
            self._run(plan)

    def stop_ranks(self) -> None:
        """End `serve` on the other ranks. On the leader, after its last step."""
        if self._group.size > 1 and self._group.rank == 0:
            self._group.share(None)

    def _run(self, plan: StepPlan) -> Tensor:
        for copy in plan.copies:
            self.kv_cache[copy.target].copy_(self.kv_cache[copy.source])
        items = plan.items
        device = self.kv_cache.device
        tokens = torch.tensor([token for item in items for token in item.token_ids], device=device)
        where = [position for item in items for position in range(item.begin, item.end)]
        slots = [slot for item in items for slot in self._slots(item)]
        sink = self._export_sink
        exporting = [item for item in items if item.export] if sink is not None else []
        self._ops.begin(torch.tensor(where, device=device), torch.tensor(slots, device=device))
        self._attention.begin(items)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed = self._attention.attend(layer, q, k, v)
            for item in exporting:
                assert sink is not None, "only a sink has items"
                sink.layer_computed(item.request_id, layer, item.begin, item.end, item.block_ids)
            return mixed

        hidden = self._decoder.forward(tokens, self._ops, attention)
        return self._decoder.logits(hidden[self._rows_of_logits(items)])

    def _slots(self, item: PlanItem) -> Iterator[int]:
        """Where each token's KV goes: block · page_size + offset."""
        page = self.page_size
        return (item.block_ids[p // page] * page + p % page for p in range(item.begin, item.end))

    @staticmethod
    def _rows_of_logits(items: Sequence[PlanItem]) -> list[int]:
        rows, row = [], 0
        for item in items:
            row += len(item.token_ids)
            if item.wants_logits:
                rows.append(row - 1)
        return rows

    def warm_up(self) -> None:
        """Compute one prompt and one token in the first blocks, so that the first request does not pay for first calls."""
        prompt = [0] * min(2 * self.page_size, self.config.max_model_len - 1)
        blocks = list(range(min(3, self.num_blocks)))
        self.execute(StepPlan([PlanItem("warm-up", prompt, 0, blocks, True)], []))
        logits = self.execute(StepPlan([PlanItem("warm-up", [0], len(prompt), blocks, True)], []))
        draw.warm_up(logits)
