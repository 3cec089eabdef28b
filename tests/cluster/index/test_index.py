"""The radix index against a plain model of sets: inserts, reports, predictions, splits, slot turnovers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.index import scripts
from tests.cluster.index.radix_index import PAGE, Index, Sets, chain

prompts = st.lists(st.integers(0, 1), min_size=2, max_size=14)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reports=st.lists(st.tuples(st.sampled_from("123"), prompts), min_size=1, max_size=25))
def test_reported_chains_are_found_again_after_any_split(reports, redis_server):
    index, model = Index(redis_server.url), Sets()
    for slot in "123":
        index.own(slot)
    for slot, tokens in reports:
        blocks = chain(tokens)
        if blocks:
            assert index.report(slot, blocks, len(blocks)) == b"ok"
            model.report(slot, blocks, len(blocks))
    for _, tokens in reports:
        blocks = chain(tokens)
        assert index.match(blocks) == model.match(blocks)
    index.redis.close()


@pytest.fixture
def index(redis_url):
    made = Index(redis_url)
    made.own("1")
    made.own("2")
    yield made
    made.redis.close()


def test_predictions_expire_and_reports_do_not(index):
    blocks = chain([1] * 8)
    index.predict("1", blocks, until_ms=-1)
    assert index.match(blocks) == {}
    index.report("2", blocks, 3)
    assert index.match(blocks) == {"2": 3}


def test_a_prediction_that_has_expired_keeps_no_shorter_one_from_counting(index):
    blocks = chain([1] * 8)
    index.predict("1", blocks, until_ms=-1)
    index.predict("1", blocks[:2])
    assert index.match(blocks) == {"1": 2}


def test_a_report_of_what_is_gone_leaves_the_predictions_of_what_is_held(index):
    """Where reports do not count, each eviction at a worker ended all that was predicted there of the same beginning."""
    stem, talk, other = chain([1] * 8), chain([1] * 8 + [0] * 4), chain([1] * 8 + [2] * 4)
    for blocks in (talk, other):
        index.predict("1", blocks, unreported=True)
    index.report("1", talk, len(stem))
    assert index.match(talk, unreported=True) == {"1": len(stem)}
    assert index.match(other, unreported=True) == {"1": len(other)}
    index.report("1", other, 0)
    assert index.match(other, unreported=True) == {}
    assert index.match(stem) == {}


def test_an_unknown_slot_must_register_again(index):
    assert index.report("9", chain([1] * 8), 1) == b"register"


def test_lost_batches_are_asked_for_and_repeated_ones_change_nothing(index):
    blocks = chain([1] * 8)
    assert index.report("1", blocks, 2, sequence=3) == 1
    assert index.report("1", blocks, 2, sequence=1) == b"ok"
    assert index.report("1", blocks, 4, sequence=1) == b"ok"
    assert index.match(blocks) == {"1": 2}


def test_nodes_expire_and_children_never_before_their_parents(index):
    long, branch = chain([1] * 12), chain([1] * 6 + [0] * 6)
    index.report("1", long, len(long))
    index.report("1", branch, len(branch))
    root, child = long[0], branch[3]
    ttls = [index.redis.pttl(index.prefix.encode() + b"n:" + key) for key in (root, child)]
    assert all(0 < ttl <= 60000 for ttl in ttls)
    assert ttls[0] >= ttls[1] - 5


def test_a_conversation_grows_by_appending(index):
    for turns in range(1, 6):
        blocks = chain([1] * (8 * turns))
        index.report("1", blocks, len(blocks))
    keys = index.redis.keys(index.prefix + "n:*")
    assert len(keys) == 1


def test_a_leaf_goes_with_its_last_holder(index):
    stem, talk = chain([1] * 8), chain([1] * 8 + [0] * 4)
    other = chain([1] * 8 + [2] * 4)
    index.own("2")
    for slot, blocks in (("1", talk), ("1", other), ("2", talk)):
        index.report(slot, blocks, len(blocks))
    leaf = index.prefix.encode() + b"n:" + talk[len(stem)]
    index.report("1", talk, len(stem))
    assert index.redis.exists(leaf), "another holds it"
    index.report("2", talk, len(stem))
    assert not index.redis.exists(leaf)
    for blocks in (other, stem):
        for slot in ("1", "2"):
            index.report(slot, blocks, 0)
    kinds = [key[len(index.prefix) :][:2] for key in index.redis.keys(index.prefix + "*")]
    assert sorted(kinds) == [b"n:", b"w:"], "the node that had children, until it expires"
    index.report("1", talk, len(talk))
    assert index.match(talk) == {"1": len(talk)}


def test_a_cut_behind_a_fork_does_not_affect_the_other_branch(index):
    stem, other = chain([1] * 8), chain([1] * 4 + [0] * 4)
    index.report("1", stem, 4)
    assert index.report("1", other, 2) == b"ok"
    assert index.match(stem) == {"1": 4}


def test_slots_without_an_owner_are_swept_from_the_nodes_that_are_visited(index):
    blocks = chain([1] * 8)
    for slot in range(10, 60):
        index.own(str(slot))
        index.report(str(slot), blocks, 4)
        index.redis.hdel(index.owners, str(slot))
    index.report("1", blocks, 4)
    sweep = index.redis.register_script(
        scripts.walk()
        + "walk(ARGV[1], ARGV[2], tonumber(ARGV[3]), now_ms() + 60000, KEYS[1], 16, 1000) return 1"
    )
    for visit in range(40):
        sweep(keys=[index.owners], args=[index.prefix, b"".join(blocks), visit * 7])
    assert index.match(blocks) == {"1": 4}


def test_a_node_whose_holders_were_evicted_keeps_its_children(redis_url):
    """A full Redis evicts the two keys of a node separately."""
    index = Index(redis_url)
    for slot in ("1", "2"):
        index.own(slot)
    stem = chain([1] * 8)
    first, other, third = (chain([1] * 8 + [last] * 8) for last in (2, 3, 4))
    index.report("1", first, len(first))
    index.report("1", other, len(other))
    index.redis.delete(index.prefix.encode() + b"w:" + stem[0])
    index.report("2", third, len(third))
    index.report("1", stem, len(stem))
    assert index.match(first) == {"1": len(first), "2": len(stem)}
    assert index.match(third) == {"1": len(stem), "2": len(third)}
    index.redis.delete(index.prefix.encode() + b"n:" + stem[0])
    assert index.match(first) == {}
    index.report("1", first, len(first))
    assert index.match(first) == {"1": len(first)}
    index.redis.close()


@pytest.mark.parametrize("shortest_first", [True, False])
def test_of_a_chain_of_many_nodes_the_deepest_are_neither_split_nor_visited(index, shortest_first):
    """One client makes every block of a prefix a node, by requests alone."""
    depth, length = 64, 200
    trunk = [1] * (PAGE * length)
    whole = chain(trunk)
    index.own("3")
    index.report("3", whole, length)
    for blocks in range(1, length) if shortest_first else range(length - 1, 0, -1):
        index.report("1", chain(trunk[: PAGE * blocks] + [2] * PAGE), blocks + 1)
        index.predict("2", chain(trunk[: PAGE * blocks] + [3] * PAGE))
    nodes = sum(1 for _ in index.redis.scan_iter(index.prefix + "n:*", 10_000))
    if shortest_first:
        assert nodes < 4 * depth
        assert index.match(whole)["3"] == length, "the last node is not split any more"
    else:
        assert set(index.match(whole).values()) == {depth}
    assert index.report("3", whole, 3) == b"ok"
    assert index.match(whole)["3"] == 3


def test_a_chain_of_the_deepest_node_grows(index):
    trunk = [1] * (PAGE * 63)
    for blocks in range(1, 64):
        index.report("1", chain(trunk[: PAGE * blocks] + [2] * PAGE), blocks + 1)
    for length in (70, 80):
        grown = chain(trunk + [3] * PAGE * (length - 63))
        index.report("1", grown, length)
        assert index.match(grown)["1"] == length


def test_a_report_of_deep_chains_is_taken_in_parts(index):
    depth = 60
    trunk = [1] * (PAGE * depth)
    chains = [b"".join(chain(trunk[: PAGE * blocks] + [2] * PAGE)) for blocks in range(1, depth)]

    def report(batch: list[bytes], number: int) -> Any:
        pairs = [part for one in batch for part in (len(one) // 8, one)]
        script_keys = [index.owners, index.sequences]
        return index._report(keys=script_keys, args=[index.prefix, "1", "w1@1", number, 60000, *pairs])

    waiting, calls = list(chains), 0
    while True:
        answer, calls = report(waiting, 1), calls + 1
        if answer == b"ok":
            break
        assert 0 < answer[0] < len(waiting)
        if calls == 1:
            assert report(waiting, 1)[0] > 0, "a repetition is no later report"
        del waiting[: answer[0]]
    assert 2 < calls < 8
    assert report(chains[:1], 2) == b"ok"
    for one in chains:
        held = tuple(one[i : i + 8] for i in range(0, len(one), 8))
        assert index.match(held) == {"1": len(held)}
