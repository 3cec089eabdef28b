"""Two KV groups of workers during a rolling upgrade: pairs are made inside one of them only."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cluster.config.worker import Role
from cluster.errors import UnavailableError
from cluster.membership.types import WorkerInfo
from router.placement.kv_groups import KvGroups, kv_group_of
from router.placement.types import Mode
from wire import common_pb2


def worker(role: Role, index: int, *, dtype: str = "bfloat16", model: str = "m", tp: int = 1) -> WorkerInfo:
    layout = common_pb2.KvLayout(
        wire_version=1, model_id=model, dtype=dtype, page_size=16, num_layers=2, tensor_parallel=tp
    ).SerializeToString()
    return WorkerInfo(f"{role}-{index}", 1, index, role, model, "a:1", "", layout, "", "h", 4096, 100)


def chosen(prefill: list[WorkerInfo], decode: list[WorkerInfo], mode: Mode = "fallback") -> set[str]:
    kv_groups, rng = KvGroups(prefill, decode, mode), random.Random(3)
    return {common_pb2.KvLayout.FromString(kv_groups.choose(None, rng).layout).dtype for _ in range(200)}


def test_the_degree_of_tensor_parallelism_does_not_part_workers() -> None:
    assert kv_group_of(worker("prefill", 0, tp=4)) == kv_group_of(worker("decode", 1, tp=2))
    assert kv_group_of(worker("prefill", 0)) != kv_group_of(worker("decode", 1, dtype="float32"))
    assert kv_group_of(worker("prefill", 0)) != kv_group_of(worker("prefill", 0, model="other"))
    assert kv_group_of(worker("prefill", 0)) != kv_group_of(replace(worker("prefill", 0), page_size=32))


def test_only_complete_generations_serve() -> None:
    old = [worker("prefill", 0), worker("decode", 1)]
    new_decode = worker("decode", 2, dtype="float32")
    assert chosen([old[0]], [old[1], new_decode]) == {"bfloat16"}
    new_prefill = worker("prefill", 3, dtype="float32")
    assert chosen([old[0], new_prefill], [old[1], new_decode]) == {"bfloat16", "float32"}
    assert chosen([new_prefill], [old[1], new_decode]) == {"float32"}


def test_decode_workers_alone_serve_where_they_may_prefill() -> None:
    decode, prefill = worker("decode", 0), worker("prefill", 1, dtype="float32")
    assert chosen([prefill], [decode]) == {"bfloat16"}
    with pytest.raises(UnavailableError, match="no prefill worker that fits"):
        chosen([prefill], [decode], "never")
    with pytest.raises(UnavailableError, match="no decode worker"):
        chosen([prefill], [])


def test_a_request_stays_with_its_kind_then_with_its_model() -> None:
    rng = random.Random(1)
    old, same_model = worker("decode", 0), worker("decode", 1, dtype="float32")
    other_model = [worker("decode", index, model="n") for index in range(2, 40)]
    before = kv_group_of(old)
    every = KvGroups([], [old, same_model, *other_model], "fallback")
    assert {every.choose(before, rng) for _ in range(50)} == {before}
    rest = KvGroups([], [same_model, *other_model], "fallback")
    assert {rest.choose(before, rng) for _ in range(50)} == {kv_group_of(same_model)}
    gone = KvGroups([], other_model, "fallback")
    assert gone.choose(before, rng) == kv_group_of(other_model[0])


def test_a_group_that_failed_is_chosen_only_where_all_have_failed() -> None:
    """A false registration of a group of its own was tried again until the request's time was over."""
    rng = random.Random(1)
    false, *true = (worker("decode", index, dtype=str(index)) for index in range(3))
    groups = KvGroups([], [false, *true], "fallback")
    failed = {kv_group_of(false)}
    assert {groups.choose(None, rng, failed) for _ in range(50)} == {kv_group_of(one) for one in true}
    everyone = {kv_group_of(one) for one in (false, *true)}
    assert {groups.choose(None, rng, everyone) for _ in range(50)} == everyone
    assert groups.choose(kv_group_of(false), rng, failed) == kv_group_of(false), "its tokens are from there"
