"""The parts of a hand-off: every layer of every token that the decode worker does not hold, once, and nothing else."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import messages as m
from kv_transfer.layout.geometry import Flow
from kv_transfer.prefill_side.rank_transfer import Cutting, Transfer

PAGE, TOKEN_BYTES = 4, 32


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """(layers, tokens, held by D, borders of the chunks): the first chunk begins behind P's own prefix cache."""
    layers, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 60))
    held = PAGE * draw(st.integers(0, tokens // PAGE))  # perhaps all of them
    cached = PAGE * draw(st.integers(0, (tokens - 1) // PAGE))
    inner = draw(st.lists(st.integers(cached, tokens), max_size=3))
    return layers, tokens, held, sorted({cached, *inner, tokens})


@settings(max_examples=300, deadline=None)
@given(
    prompt=prompts(),
    part_bytes=st.sampled_from([1, 512, 4096, 1 << 20]),
    slot_bytes=st.sampled_from([256, 1024, 1 << 14]),
    flows=st.sampled_from([[(0, 0, 2)], [(0, 0, 1), (1, 1, 2)]]),
)
def test_every_layer_of_every_missing_token_once(prompt, part_bytes, slot_bytes, flows):
    layers, tokens, held, borders = prompt
    opened = m.OpenTransfer(
        b"t" * 16,
        "r",
        "p",
        "nixl",
        [Flow(0, target, begin, end) for target, begin, end in flows],
        held,
        tokens,
        slot_bytes,
        1,
        2,
    )
    cutting = Cutting(layers, PAGE, TOKEN_BYTES, part_bytes, 1 << 20)
    transfer = Transfer(opened, cutting)
    blocks = list(range(100, 100 + -(-tokens // PAGE)))
    for begin, end in itertools.pairwise(borders):
        for layer in range(layers):
            transfer.note(layer, begin, end, blocks[: -(-end // PAGE)])
            transfer.cut()
    assert transfer.all_cut
    parts = transfer.ask(10_000)
    for target, first_head, last_head in flows:
        shipped: Counter[tuple[int, int]] = Counter()
        for part in parts:
            job = part.job
            if job.flow.target_rank != target:
                continue
            assert job.bytes <= max(slot_bytes, (last_head - first_head) * 2 * PAGE * TOKEN_BYTES)
            assert list(job.block_ids) == blocks[job.tokens.start // PAGE : -(-job.tokens.stop // PAGE)]
            shipped.update((layer, token) for layer in job.layers for token in job.tokens)
        wanted = {(layer, token) for layer in range(layers) for token in range(held, tokens)}
        assert set(shipped) == wanted
        assert set(shipped.values()) <= {1}, "shipped twice"
    assert sum(part.job.bytes for part in parts) == transfer.bytes
