"""The table of sizes in docs/kubernetes.md is what the rule of the KV pool says.

`BATON_WRITE_GOLDEN=1 pytest tests/deploy/test_sizes.py` writes it again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cluster.errors import ConfigError
from engine import build, kv_cache
from tests.deploy.fit import engine_of, memory_of, needs_of, values_of
from tests.engine.fake_memory import GIB
from tests.engine.shapes import SHAPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md"
TABLE = re.compile(r"(?<=<!-- sizes: begin -->\n).*?(?=<!-- sizes: end -->)", re.DOTALL)
CARDS = ("NVIDIA-L4", "NVIDIA-L40S", "NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
RANKS = (1, 2, 4, 8, 16)
LENGTH = 32_768


def row(name: str, card: str) -> str:
    """The fewest ranks that hold one context; all of them share the tokens of the worker's pool."""
    model = SHAPES[name]
    for ranks in RANKS:
        values = values_of(
            f"decode: {{tensorParallel: {ranks}}}\nmodel: {{dtype: bfloat16, maxModelLen: {LENGTH}}}"
        )
        config = engine_of(values, "decode", model)
        block, needs = build.block_bytes(model, config), needs_of(values, "decode", model, config)
        memory = memory_of(card)
        try:
            kv_cache.check_before_load(config, block, memory, needs)
        except ConfigError:
            continue
        tokens = kv_cache.room_for_pool(config, block, memory, needs) // block * config.page_size
        per_token = block * min(ranks, model.num_kv_heads) // config.page_size // 1024
        weights = needs.weights / GIB
        return f"| {name} | {card} | {ranks} | {weights:.1f} | {per_token} | {tokens // 1000 * 1000:,} |"
    return f"| {name} | {card} | more than {RANKS[-1]} | – | – | – |"


def test_the_table_of_sizes_follows_from_the_rule() -> None:
    rows = [
        "",
        "| model | card | GPUs of a worker | weights, GiB per GPU | KV, KiB per token | tokens in its KV pool, about |",
        "|---|---|---:|---:|---:|---:|",
        *(row(name, card) for name in SHAPES for card in CARDS),
        "",
        "",
    ]
    text, table = PAGE.read_text(), "\n".join(rows)
    if os.environ.get("BATON_WRITE_GOLDEN"):
        PAGE.write_text(TABLE.sub(table, text))
    assert TABLE.findall(PAGE.read_text()) == [table]
