"""Which Redis a deck of faults needs."""

from __future__ import annotations

import pytest

from tests.chaos.rows import expanded, redis_of, usual


def test_rows_name_the_redis_that_they_need() -> None:
    assert redis_of(expanded(["redis"])) == "sentinels"
    assert redis_of(expanded(["redis-cluster"])) == "cluster"
    assert redis_of(expanded(["links", "kill redis"])) == redis_of(usual({"prefill": 1, "decode": 1})) == ""
    with pytest.raises(ValueError, match="different kinds"):
        redis_of(expanded(["redis", "redis-cluster"]))
    assert not {*expanded(["redis"]), *expanded(["redis-cluster"])} & {*usual({"prefill": 2, "decode": 2})}, (
        "the usual deck stays as it is"
    )
