"""The time that a digest adds to each side's copy of a part: the same copies with and without it, alternating."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.context import Context
from bench.figures import Figure, Section
from bench.handoff_common import BLOCKS, PAGE_SIZE, kv_cache
from bench.limits import COPY_BYTES, COPY_PART_BYTES, peer_memory, timed, write_to
from kv_transfer.layout.digest import XXH3_128, digest
from kv_transfer.layout.geometry import scatter
from kv_transfer.layout.rows import CacheRegion
from kv_transfer.memory import aligned_bytes

BOUND = "≤ 0.15"


def run(context: Context) -> Section:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prefill, decode = _at_prefill(context.repeats(60)), _at_decode(context.repeats(60))
    finally:
        torch.set_num_threads(threads)
    size = f"{COPY_BYTES >> 20} MiB in parts of {COPY_PART_BYTES >> 20} MiB"
    figures = []
    for name, side, copy in (
        ("digest_cost_prefill", prefill, "written into another process's ring"),
        ("digest_cost_decode", decode, "scattered out of the ring"),
    ):
        note = f"time it adds to {size}, {copy}: {side.plain * 1e3:.2f} → {side.digested * 1e3:.2f} ms"
        figures.append(Figure(name, side.digested / side.plain - 1, "", BOUND, note))
    return Section("digests", "Digests", figures)


@dataclass(frozen=True)
class Side:
    """Seconds for all parts, medians."""

    plain: float
    digested: float


def _at_prefill(repeats: int) -> Side:
    """Copy out of the KV pool itself, as prefill workers write."""
    source = kv_cache(BLOCKS).view(-1).view(torch.uint8)
    with peer_memory(huge=True) as (pid, address):
        return _by_turns(
            lambda: write_to(pid, source, address),
            lambda: write_to(pid, source, address, lambda part: digest([part], XXH3_128)),
            repeats,
        )


def _at_decode(repeats: int) -> Side:
    cache = kv_cache(BLOCKS)
    ring = aligned_bytes(COPY_BYTES).fill_(1)
    layers, heads = range(cache.shape[1]), range(cache.shape[3])
    block_bytes = cache[0].numel() * cache.element_size()
    at_once = COPY_PART_BYTES // block_bytes

    def land(*, digested: bool) -> None:
        for first in range(0, BLOCKS, at_once):
            part = ring[first * block_bytes : (first + at_once) * block_bytes]
            if digested:
                digest([part], XXH3_128)
            ids = range(first, first + at_once)
            tokens = range(first * PAGE_SIZE, (first + at_once) * PAGE_SIZE)
            scatter(cache, part.view(cache.dtype), CacheRegion(layers, heads, tokens, ids))

    return _by_turns(lambda: land(digested=False), lambda: land(digested=True), repeats)


def _by_turns(plain: Callable[[], None], digested: Callable[[], None], repeats: int) -> Side:
    ways = timed(plain), timed(digested)
    pairs = [(ways[0](), ways[1]()) for _ in range(repeats + 1)][1:]
    return Side(*(statistics.median(seconds) for seconds in zip(*pairs, strict=True)))
