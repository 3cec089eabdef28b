"""A model whose answer depends on every token it reads back through the block table.

It stores token ids where a real model stores keys and values; the next token is a hash of the sequence as the cache
holds it. A wrong block table, a block shared by mistake, a copy not made: each changes the answer.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.lora.loaded import NoAdapters
from engine.model.config import ModelConfig
from engine.model.families import FAMILIES
from engine.plan import StepPlan, table_rows
from engine.prompt_scores import Scores
from engine.request import SamplingParams
from engine.step_buffers import Padding, StepBuffers
from engine.step_delta import StepDelta

VOCAB = 97
PAGE = 4
CONTEXT = 64
MAX_PADDING = 3


def next_token(tokens: list[int]) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(tokens)}I", *tokens), digest_size=4).digest()
    return 3 + int.from_bytes(digest, "little") % (VOCAB - 3)


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def greedy(count: int, **more: Any) -> SamplingParams:
    """Exactly `count` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


class FakeRunner:
    adapters = NoAdapters()

    def __init__(
        self,
        num_blocks: int,
        *,
        model: Path = Path("/fake"),
        context: int = CONTEXT,
        vocab: int = VOCAB,
        **settings: Any,
    ):
        self.num_blocks = num_blocks
        self.page_size = PAGE
        self.config = EngineConfig(model=model, max_model_len=context, page_size=PAGE, **settings)
        self.device = torch.device("cpu")
        self.num_ranks = 1
        self.cache = torch.zeros(num_blocks + 1, PAGE, dtype=torch.int64)
        rows = table_rows(self.config.max_batch_tokens, num_blocks)
        self.leader, self.follower = (
            StepBuffers(
                rows,
                num_blocks,
                2 * num_blocks * PAGE,
                PAGE,
                self.device,
                staged=staged,
                padding=Padding(rows + MAX_PADDING, rows + MAX_PADDING, num_blocks),
            )
            for staged in (False, True)
        )
        self.ahead = 0  # steps that were launched before the last one's tokens were read
        self.sick: set[str] = set()  # requests whose logits are NaN
        self.model_config = ModelConfig(
            family=FAMILIES["LlamaForCausalLM"],
            vocab_size=vocab,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            norm_eps=1e-6,
            max_model_len=context,
            rope={},
            tie_embeddings=False,
            attention_bias=False,
            output_bias=False,
            mlp_bias=False,
            windows=(0,),
            eos_token_ids=(2,),
            dtype="float32",
        )

    def store(self, block_ids: list[int], begin: int, tokens: list[int]) -> None:
        """What a step, or a hand-off, leaves in the cache."""
        for position, token in enumerate(tokens, begin):
            self.cache[block_ids[position // PAGE], position % PAGE] = token

    def _load(self, plan: StepPlan, drawn: Tensor | None) -> None:
        """As a leader, and as a rank that follows it. Each item's row must be its blocks on both; steps of single tokens
        are padded, as recorded ones are."""
        delta = StepDelta.of(plan)
        if all(len(item.token_ids) == item.num_logits == 1 for item in plan.items):
            delta = delta.padded(-len(plan.items) % (MAX_PADDING + 1), 1, self.leader.null_row)
        self.ahead += drawn is not None
        self.leader.load(delta, drawn)
        self.follower.load(StepDelta.from_bytes(delta.to_bytes()), drawn)
        for buffers in (self.leader, self.follower):
            for item in plan.items:
                assert buffers.table[item.row, : len(item.block_ids)].tolist() == item.block_ids, item
            assert buffers.table[buffers.null_row].eq(self.num_blocks).all(), "the row of padding"

    def take_scores(self) -> list[Scores]:
        raise AssertionError("no request asks for log probabilities of its prompt")

    def take_pooled(self) -> list[Tensor]:
        raise AssertionError("no request asks for an embedding")

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        """Reads and writes the cache by the follower's buffers alone."""
        self._load(plan, drawn)
        step = self.follower
        for copy in plan.copies:
            self.cache[copy.target] = self.cache[copy.source]
        self.cache.view(-1)[step.slots] = step.tokens
        logits, wanted = [], iter(step.logit_rows.tolist())
        for index, item in enumerate(plan.items):
            if item.num_logits:
                end = int(step.ends[index])
                assert (
                    next(wanted) == int(step.cu_q[index + 1]) - 1
                    and int(step.positions[step.cu_q[index + 1] - 1]) == end - 1
                )
                used = self.cache[step.blocks_of(int(step.rows[index]), end)].flatten()[:end].tolist()
                row = self.row(used)
                if item.request_id in self.sick:
                    row[:] = torch.nan
                logits.append(row)
        return torch.stack(logits) if logits else torch.zeros(0, self.model_config.vocab_size)

    def row(self, tokens: list[int]) -> Tensor:
        """The logits after these tokens."""
        row = torch.zeros(self.model_config.vocab_size)
        row[next_token(tokens)] = 1.0
        return row
