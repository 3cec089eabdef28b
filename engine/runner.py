"""Runs a step plan on one rank: tokens through the decoder, keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.attention.base import AttentionBackend
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.ops.base import LayerOps
from engine.parallel.group import Arrivals, TpGroup
from engine.plan import ExportSink, PlanItem, StepPlan


class ModelRunner:
    """Built by engine/build.py. On the leader `execute` is called with a plan; other ranks follow in `serve`."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        decoder: Decoder,
        ops: LayerOps,
        attention: AttentionBackend,
        kv_cache: Tensor,
        group: TpGroup,
    ):
        self.config = config  # resolved: no "auto" is left in it
        self.model_config = model_config
        self.kv_cache = kv_cache
        self.num_blocks = kv_cache.shape[0]
        self.page_size = config.page_size
        self.kv_head_range = decoder.kv_heads
        self._export_sink: ExportSink | None = None
        self._decoder = decoder
        self._ops = ops
        self._attention = attention
        self._group = group

    def export_to(self, sink: ExportSink) -> None:
        """Report to `sink` every layer that is computed of requests that export their KV."""
        self._export_sink = sink

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
        """A rank that is not the leader: runs the leader's plans until it says stop."""
        while (plan := self._group.share(None)) is not None:
            self._run(plan)

    def stop_ranks(self) -> None:
        """The leader, at its end."""
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
        exporting = [item for item in items if item.export] if self._export_sink is not None else []
        self._ops.begin(torch.tensor(where, device=device), torch.tensor(slots, device=device))
        self._attention.begin(items)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed = self._attention.attend(layer, q, k, v)
            self._export(exporting, layer)
            return mixed

        hidden = self._decoder.forward(tokens, self._ops, attention)
        return self._decoder.logits(hidden[self._wanted(items)])

    def _slots(self, item: PlanItem) -> Iterator[int]:
        """Where each token's KV goes: block · page_size + offset."""
        page = self.page_size
        return (item.block_ids[p // page] * page + p % page for p in range(item.begin, item.end))

    @staticmethod
    def _wanted(items: Sequence[PlanItem]) -> list[int]:
        rows, row = [], 0
        for item in items:
            row += len(item.token_ids)
            if item.wants_logits:
                rows.append(row - 1)
        return rows

    def _export(self, items: Sequence[PlanItem], layer: int) -> None:
        for item in items:
            assert self._export_sink is not None, "only then there are items"
            self._export_sink.layer_computed(item.request_id, layer, item.begin, item.end, item.block_ids)

    def warm_up(self) -> None:
        """One prompt and one token through block 0, so that the first request does not pay for first times."""
        prompt = [0] * min(2 * self.page_size, self.config.max_model_len - 1)
        blocks = list(range(min(3, self.num_blocks)))
        self.execute(StepPlan([PlanItem("warm-up", prompt, 0, blocks, True)], []))
        self.execute(StepPlan([PlanItem("warm-up", [0], len(prompt), blocks, True)], []))
