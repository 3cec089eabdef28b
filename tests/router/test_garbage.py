"""Starting many streams does not trigger garbage collections."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
import uvloop

from cluster.config.router import RouterConfig
from router.server import Router

OBJECTS = 10_000


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_streams_that_begin_cause_no_collection_each(redis_url, namespace, checkpoint):
    config = RouterConfig(
        model=checkpoint("llama"), redis_url=redis_url, namespace=namespace, http_port=0, grpc_port=0
    )

    async def collections() -> list[int]:
        router = Router(config)
        await router.start()
        try:
            assert gc.isenabled()
            gc.collect()
            before = [one["collections"] for one in gc.get_stats()]
            kept = [[number] for number in range(OBJECTS)]
            after = [one["collections"] for one in gc.get_stats()]
            assert len(kept) == OBJECTS
            return [b - a for a, b in zip(before, after, strict=True)]
        finally:
            await router.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        young, middle, old = runner.run(collections())
    assert (middle, old) == (0, 0)
    assert young <= 2, "the default makes 14 of them"
