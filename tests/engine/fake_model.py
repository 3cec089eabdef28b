"""A model whose answer depends on every token it reads back through the block table.

It stores token ids where a real model stores keys and values; the next token is a hash of the sequence as the cache
holds it. A wrong block table, a block shared by mistake, a copy not made: each changes the answer.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.model.config import ModelConfig
from engine.plan import StepPlan

VOCAB = 97
PAGE = 4
CONTEXT = 64


def next_token(tokens: list[int]) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(tokens)}I", *tokens), digest_size=4).digest()
    return 3 + int.from_bytes(digest, "little") % (VOCAB - 3)


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    def __init__(self, num_blocks: int, **settings: object):
        self.num_blocks = num_blocks
        self.page_size = PAGE
        self.config = EngineConfig(model=Path("/fake"), max_model_len=CONTEXT, page_size=PAGE, **settings)  # type: ignore[arg-type]
        self.cache = torch.zeros(num_blocks, PAGE, dtype=torch.int64)
        self.sick: set[str] = set()  # requests whose logits are NaN
        self.model_config = ModelConfig(
            family="fake",
            vocab_size=VOCAB,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            norm_eps=1e-6,
            max_model_len=CONTEXT,
            rope={},
            tie_embeddings=False,
            attention_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            windows=(0,),
            eos_token_ids=(2,),
            dtype="float32",
        )

    def store(self, block_ids: list[int], begin: int, tokens: list[int]) -> None:
        """What a step, or a hand-off, leaves in the cache."""
        for position, token in enumerate(tokens, begin):
            self.cache[block_ids[position // PAGE], position % PAGE] = token

    def execute(self, plan: StepPlan) -> Tensor:
        for copy in plan.copies:
            self.cache[copy.target] = self.cache[copy.source]
        logits = []
        for item in plan.items:
            self.store(item.block_ids, item.begin, item.token_ids)
        for item in plan.items:
            if item.wants_logits:
                used = self.cache[item.block_ids[: -(-item.end // PAGE)]].flatten()[: item.end].tolist()
                row = torch.zeros(VOCAB)
                row[next_token(used)] = 1.0
                if item.request_id in self.sick:
                    row[:] = torch.nan
                logits.append(row)
        return torch.stack(logits) if logits else torch.zeros(0, VOCAB)
