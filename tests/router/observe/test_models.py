"""The metrics of a router's cluster view with several models, and what its models share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from cluster.config.router import RouterConfig
from cluster.membership.topology import LEVELS
from router.dispatch.services import Services
from router.observe.cluster import _read_at_a_scrape
from router.server import _services
from tests.router.frontends.golden.stub_gateway import DEMO

CACHE_BYTES = 1 << 20


@pytest.fixture
async def services() -> AsyncIterator[Services]:
    further = [{"name": name, "model": str(DEMO)} for name in ("b", "c")]
    config = RouterConfig(
        model=Path(DEMO),
        served_model_name="a",
        models=further,
        secret="x" * 16,
        redis_url="redis://127.0.0.1:1/0",
        tokenized_cache_bytes=CACHE_BYTES,
    )
    made = _services(config, MagicMock(), None)
    yield made
    await made.close()


def shown(services: Services, name: str) -> dict[tuple[str, ...], float]:
    (found,) = [one for one in _read_at_a_scrape(services) if one.family().name == name]
    return dict(found.samples())


async def test_models_share_the_cache_of_pieces_and_show_their_own(services: Services) -> None:
    texts = {"a": services.text, **services.further_texts}
    caches = {name: text.piece_cache for name, text in texts.items()}
    assert sum(one._max_bytes for one in caches.values() if one) <= CACHE_BYTES
    for turn, name in enumerate(caches):
        cache = caches[name]
        assert cache is not None and cache._max_bytes == CACHE_BYTES // 3
        cache.hit_characters, cache.missed_characters, cache.bytes = turn, 10 + turn, 20 + turn
    for metric, base in (("hits", 0), ("misses", 10), ("bytes", 20)):
        assert shown(services, f"baton_tokenized_cache_{metric}") == {
            ("a",): base,
            ("b",): base + 1,
            ("c",): base + 2,
        }


async def test_each_model_shows_what_was_learned_of_it(services: Services) -> None:
    calibrations = services.placement.calibrations
    calibrations.of("b").a, calibrations.of("c").bandwidths = 0.5, {0: 7e9}
    prefill = shown(services, "baton_placement_learned_prefill_seconds_per_token")
    assert prefill == {("a",): calibrations.first.a, ("b",): 0.5, ("c",): calibrations.first.a}
    bandwidth = shown(services, "baton_placement_learned_bandwidth_bytes_per_second")
    assert set(bandwidth) == {(name, level) for name in "abc" for level in LEVELS}
    assert bandwidth["c", LEVELS[0]] == 7e9 != bandwidth["a", LEVELS[0]]
