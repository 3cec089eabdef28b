"""Runs a step plan on one rank: tokens through the decoder, keys and values into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.attention.base import AttentionBackend
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.ops.base import LayerOps
from engine.ops.team import KernelTeam, Team
from engine.parallel.group import Arrivals, TpGroup
from engine.plan import ExportSink, PlanItem, StepPlan, table_rows
from engine.sampling import cuts, draw
from engine.step_buffers import StepBuffers
from engine.step_delta import StepDelta

if TYPE_CHECKING:
    from engine.decode_jobs import DecodeJobs


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
    team: Team

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
        self._buffers = self._make_buffers()
        self._decode_jobs = _decode_jobs(model, self._buffers)

    def _make_buffers(self) -> StepBuffers:
        config = self.config
        most = config.max_batch_tokens if config.chunked_prefill else config.max_model_len
        return StepBuffers(
            table_rows(config.max_batch_tokens, self.num_blocks),
            -(-config.max_model_len // config.page_size),
            max(most, config.max_batch_tokens),
            config.page_size,
            self.kv_cache.device,
        )

    @property
    def arrivals(self) -> Arrivals:
        """This rank's progress through the group's collective operations."""
        return self._group.arrivals

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor:
        """float32 logits [tokens that want them, vocab], in the order of the items."""
        delta = StepDelta.of(plan)
        if self._group.size > 1:
            self._group.share(delta.to_bytes())
        return self._run(delta)

    @torch.inference_mode()
    def serve(self) -> None:
        """Run the leader's plans on another rank, until the leader stops the group."""
        while content := self._group.share(None):
            self._run(StepDelta.from_bytes(content))

    def stop_ranks(self) -> None:
        """End `serve` on the other ranks. On the leader, after its last step."""
        if self._group.size > 1 and self._group.rank == 0:
            self._group.share(None)

    def _run(self, delta: StepDelta) -> Tensor:
        for source, target in delta.copies.tolist():
            self.kv_cache[target].copy_(self.kv_cache[source])
        step = self._buffers
        step.load(delta)
        if self._decode_jobs is not None and not delta.exports and self._decode_jobs.takes(step):
            return self._decode_jobs.run()
        self._ops.begin(step.positions, step.slots)
        self._attention.begin(step)
        sink = self._export_sink
        exports = step.exports() if sink is not None else []

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed = self._attention.attend(layer, q, k, v)
            for request_id, begin, end, block_ids in exports:
                assert sink is not None, "only a sink has exports"
                sink.layer_computed(request_id, layer, begin, end, block_ids)
            return mixed

        hidden = self._decoder.forward(step.tokens, self._ops, attention)
        return self._decoder.logits(hidden[step.logit_rows])

    def warm_up(self) -> None:
        """Compute one prompt and one token in the first blocks, so that the first request does not pay for first calls."""
        prompt = [0] * min(2 * self.page_size, self.config.max_model_len - 1, self.config.max_batch_tokens)
        blocks = list(range(min(3, self.num_blocks)))
        self.execute(StepPlan([PlanItem("warm-up", prompt, 0, blocks, 0, 1)], []))
        logits = self.execute(StepPlan([PlanItem("warm-up", [0], len(prompt), blocks, 0, 1)], []))
        draw.warm_up(logits)
        cuts.warm_up(logits)


def _decode_jobs(model: LoadedModel, step: StepBuffers) -> DecodeJobs | None:
    """None where something of the model is not computed by the CPU's own kernels."""
    if not isinstance(model.team, KernelTeam):
        return None
    from engine.decode_jobs import DecodeJobs

    return DecodeJobs.make(model.decoder, model.ops, model.attention, model.team, step)
