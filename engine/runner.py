"""Runs a step plan on one rank: tokens through the decoder, keys and values into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine import warm_up
from engine.attention.base import AttentionBackend
from engine.graphs.base import Recorder
from engine.graphs.decode_graphs import DecodeGraphs, on_card, sizes_for
from engine.lora.adapter_files import Share
from engine.lora.message import AdapterMessage
from engine.lora.rank_adapters import RankAdapters
from engine.lora.slots import AdapterSlots
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.ops.base import LayerOps
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.parallel.group import Arrivals, TpGroup
from engine.plan import ExportSink, PlanItem, StepPlan, table_rows
from engine.pooling import pool
from engine.prompt_scores import Scores, score
from engine.step_buffers import Padding, StepBuffers
from engine.step_delta import StepDelta
from engine.warm_up import Stage, Tell

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
    kv_cache: Tensor  # the pool; `ops` and `attention` have one block more, the null block
    group: TpGroup
    team: Team
    adapters: AdapterSlots | None = None
    draft: ModelRunner | None = None  # the leader's, where a draft model is set

    @property
    def kv_head_range(self) -> tuple[int, int]:
        return self.decoder.kv_heads


class ModelRunner:
    """On the leader `execute` is called with a plan; other ranks follow in `serve`.

    `export_sink` is called after each layer for the items of a plan that are exported. With a `recorder` decode steps are
    recorded and replayed; on CUDA there is one unless the settings forbid it.
    """

    def __init__(
        self, model: LoadedModel, export_sink: ExportSink | None = None, recorder: Recorder | None = None
    ):
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
        self.num_ranks = model.group.size
        self._adapters = model.adapters
        self.adapters = _rank_adapters(model)
        self._export_sink = export_sink
        self.device = self.kv_cache.device
        recorder = recorder or on_card(self.device, self.config.cuda_graphs, self._can_record())
        self._buffers = self._make_buffers(recorder is not None)
        self._decode_jobs = _decode_jobs(model, self._buffers)
        self._graphs = self._make_graphs(recorder) if recorder else None
        self._scores: list[Scores] = []
        self._pooled: list[Tensor] = []

    def _can_record(self) -> bool:
        return self._decoder.capturable and self._attention.capturable

    def _make_buffers(self, padded: bool) -> StepBuffers:
        config = self.config
        largest = sizes_for(config.max_batch_requests)[-1]
        return StepBuffers(
            table_rows(config.max_batch_tokens, self.num_blocks),
            config.context_blocks,
            config.step_tokens,
            config.page_size,
            self.kv_cache.device,
            padding=Padding(largest, largest, self.num_blocks) if padded else None,
        )

    def _make_graphs(self, recorder: Recorder) -> DecodeGraphs:
        sizes = sizes_for(self.config.max_batch_requests)
        logits = torch.zeros(sizes[-1], self.model_config.vocab_size, device=self.kv_cache.device)
        return DecodeGraphs(self._compute, self._buffers, recorder, sizes, logits)

    def use_thread(self) -> None:
        """Prepare the calling thread for `execute`: its current card is the rank's. A new thread's is the node's first,
        where kernels that do not look at their tensors would run, and pinned memory would open a context."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def arrivals(self) -> Arrivals:
        """This rank's progress through the group's collective operations."""
        return self._group.arrivals

    @torch.inference_mode()
    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        """float32 logits [tokens that want them, vocab], in the order of the items; valid until the next step. For
        `drawn`, on a single rank only, see StepBuffers.load."""
        delta = StepDelta.of(plan)
        if self._group.size > 1:
            assert drawn is None, "other ranks have no draws"
            self._group.share(delta.to_bytes())
        return self._run(delta, drawn)

    def take_scores(self) -> list[Scores]:
        """Take the scores of the scored items of the last step, in order."""
        scores, self._scores = self._scores, []
        return scores

    def take_pooled(self) -> list[Tensor]:
        """Take the vectors of the pooled items of the last step, in order: float32 [hidden]."""
        pooled, self._pooled = self._pooled, []
        return pooled

    @torch.inference_mode()
    def serve(self) -> None:
        """Run the leader's plans on another rank, until the leader stops the group."""
        while content := self._group.share(None):
            if (message := AdapterMessage.of(content)) is not None:
                self.adapters.follow(message)
            else:
                self._run(StepDelta.from_bytes(content))

    @property
    def adapted_rows(self) -> int:
        """Rows of steps that were computed with an adapter, since the start."""
        return self._adapters.step.adapted_rows if self._adapters is not None else 0

    @property
    def listed_steps(self) -> int:
        """Steps that were computed as lists of jobs, since the start."""
        return self._decode_jobs.steps if self._decode_jobs is not None else 0

    def stop_ranks(self) -> None:
        """End `serve` on the other ranks. On the leader, after its last step."""
        if self._group.size > 1 and self._group.rank == 0:
            self._group.share(None)

    def _run(self, delta: StepDelta, drawn: Tensor | None = None) -> Tensor:
        for source, target in delta.copies.tolist():
            self.kv_cache[target].copy_(self.kv_cache[source])
        # What was recorded has no adapters, and neither that nor what was listed scores or pools a prompt.
        adapted, computed = bool(len(delta.adapters)), bool(len(delta.scored) or len(delta.pooled))
        plain = not adapted and not computed
        if self._adapters is not None:
            self._adapters.step.begin(delta.adapters, delta.counts)
        if plain and self._graphs is not None and self._graphs.takes(delta):
            if self._group.size > 1:  # the recorded operations of the group do not count themselves
                self._group.arrivals.arrive()
            return self._graphs.run(delta, drawn)
        step = self._buffers
        step.load(delta, drawn)
        listed = self._decode_jobs if not computed and not delta.exports else None
        if listed is not None and listed.takes(step):
            return listed.run(adapted)
        return self._compute(delta)

    def _compute(self, delta: StepDelta | None = None) -> Tensor:
        """The step in the buffers, operation by operation. `delta`: where it may have prompts to score or to pool."""
        step, sink = self._buffers, self._export_sink
        self._ops.begin(step.positions, step.slots)
        self._attention.begin(step)
        exports = step.exports() if sink is not None else []

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed = self._attention.attend(layer, q, k, v)
            for request_id, begin, end, block_ids in exports:
                assert sink is not None, "only a sink has exports"
                sink.layer_computed(request_id, layer, begin, end, block_ids)
            return mixed

        hidden = self._decoder.forward(step.tokens, self._ops, attention)
        if delta is not None and len(delta.scored):
            self._scores = score(self._decoder, hidden, step.tokens, delta)
        if delta is not None and len(delta.pooled) and self._group.rank == 0:
            self._pooled = pool(hidden, delta)
        return self._decoder.logits(hidden[step.logit_rows])

    def warm_up(self, tell: Tell = warm_up.say) -> None:
        """Run every kind of step and draw once, and record decode steps, so that no request meets a first call. On the
        leader. Raises SetupError if it takes longer than `warm_up_seconds`."""
        stages = [
            Stage(name, partial(self.execute, plan))
            for name, plan in warm_up.first_steps(self.config, self._buffers.null_row)
        ]
        # The largest first: the others use its memory.
        for size in reversed(self._graphs.sizes if self._graphs else ()):
            plan = _first_tokens(min(size, self._buffers.null_row))
            stages.append(
                Stage(f"the recording of decode steps of {size} sequences", partial(self.execute, plan))
            )
        logits = torch.zeros(1, self.model_config.vocab_size, device=self.device)
        stages.append(Stage("draws", partial(warm_up.first_draws, logits)))
        warm_up.run("the model is warmed up", stages, self.config.warm_up_seconds, tell, self.device)


def _first_tokens(count: int) -> StepPlan:
    """A decode step of `count` sequences without a request: all write to the first block."""
    return StepPlan([PlanItem("warm-up", [0], 0, [0], row, 1) for row in range(count)], [])


def _rank_adapters(model: LoadedModel) -> RankAdapters:
    dtype = model.adapters.dtype if model.adapters is not None else torch.float32
    share = Share(model.model_config, model.config.max_lora_rank, dtype, model.group.rank, model.group.size)
    return RankAdapters(share, model.adapters, model.group, model.kv_cache.device)


def _decode_jobs(model: LoadedModel, step: StepBuffers) -> DecodeJobs | None:
    """None where something of the model is not computed by the CPU's own kernels."""
    if not isinstance(model.team, KernelTeam):
        return None
    from engine.decode_jobs import DecodeJobs

    return DecodeJobs.make(model.decoder, model.ops, model.attention, model.team, step)
