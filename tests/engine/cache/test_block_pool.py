"""Eviction of cached blocks: its order, its reports, its cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool


def name(*path: int) -> bytes:
    return bytes(path)


def cache(pool: BlockPool, *path: int) -> list[int]:
    """Blocks of a prompt whose prefixes are path[:1], path[:2], …; all of them held, those that were cached shared."""
    hashes = [name(*path[: end + 1]) for end in range(len(path))]
    held = pool.match(hashes)
    pool.retain(held)
    blocks = held + pool.allocate(len(hashes) - len(held))
    for index in range(len(held), len(hashes)):
        pool.register(blocks[index], hashes[index], hashes[index - 1] if index else None)
    return blocks


# --- order --------------------------------------------------------------------------------------------------


def test_the_tail_of_a_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = cache(pool, 1, 2, 3, 4)
    pool.free(blocks)
    assert [pool.allocate(1)[0] for _ in range(4)] == blocks[::-1]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(6)
    first, second, third = cache(pool, 1, 2), cache(pool, 3, 4), cache(pool, 5, 6)
    pool.free(second)
    pool.free(first)
    pool.free(third)
    pool.retain(second)  # used again, and with that the youngest
    pool.free(second)
    assert pool.allocate(6) == [*first[::-1], *third[::-1], *second[::-1]]


def test_blocks_that_hold_nothing_go_before_all_cached_ones() -> None:
    """Also those freed later: a partly filled block can never be a prefix hit."""
    pool = BlockPool(5)
    cached = cache(pool, 1, 2)
    pool.free(cached)
    empty = pool.allocate(2)
    pool.free(empty)
    assert set(pool.allocate(3)) == set(range(5)) - set(cached)
    assert pool.match([name(1), name(1, 2)]) == cached


def test_a_shared_prefix_outlives_its_tails() -> None:
    pool = BlockPool(4)
    one = cache(pool, 1, 2, 3)
    other = cache(pool, 1, 2, 4)
    pool.free(one)
    pool.free(other)
    assert pool.allocate(2) == [one[2], other[2]]
    assert pool.match([name(1), name(1, 2), name(1, 2, 3)]) == one[:2]


# --- reports ------------------------------------------------------------------------------------------------


def test_a_run_of_evictions_of_one_chain_is_reported_once() -> None:
    told: list[tuple[list[bytes], int]] = []
    pool = BlockPool(8, lambda chain, held: told.append((list(chain), held)))
    pool.free(cache(pool, 1, 2, 3, 4))
    pool.free(cache(pool, 9, 8, 7, 6))
    pool.allocate(6)
    chains = [[name(*path[: end + 1]) for end in range(4)] for path in ((1, 2, 3, 4), (9, 8, 7, 6))]
    assert told == [(chains[0], 0), (chains[1], 2)]


def test_no_report_claims_a_chain_with_a_gap() -> None:
    """Two sequences compute one prefix at the same time; the first one's block is cached, and is evicted first."""
    told: list[tuple[list[bytes], int]] = []
    pool = BlockPool(5, lambda chain, held: told.append((list(chain), held)))
    first = cache(pool, 1, 2)
    own = pool.allocate(3)  # the same two blocks computed again, and one behind them
    assert not pool.register(own[0], name(1), None) and not pool.register(own[1], name(1, 2), name(1))
    assert pool.register(own[2], name(1, 2, 3), name(1, 2))
    pool.free(first)
    pool.allocate(1)  # evicts 1-2; 1-2-3 is still held, but no longer reachable
    assert told == [([name(1), name(1, 2)], 1)]
    assert pool.chains() == [[name(1)]]
    pool.free(own)
    told.clear()
    pool.allocate(4)
    assert told == [([name(1), name(1, 2)], 0)]  # all of 1-2-3 was reported before


def test_a_chain_of_which_blocks_go_in_another_order_is_held_up_to_its_first_gap() -> None:
    told: list[tuple[int, int]] = []
    pool = BlockPool(4, lambda chain, held: told.append((len(chain), held)))
    blocks = cache(pool, 1, 2, 3, 4)
    for block in (blocks[3], blocks[1], blocks[2]):
        pool.free([block])
    for _ in range(3):
        pool.allocate(1)
    assert told == [(4, 3), (4, 1)]


def test_a_block_cached_and_evicted_again_is_reported_again() -> None:
    told: list[tuple[int, int]] = []
    pool = BlockPool(3, lambda chain, held: told.append((len(chain), held)))
    first = cache(pool, 1, 2)
    for _ in range(3):
        pool.free(first[1:])
        pool.free(pool.allocate(2))  # the empty block, and the tail
        assert pool.match([name(1), name(1, 2)]) == first[:1]
        first = first[:1] + pool.allocate(1)
        pool.register(first[1], name(1, 2), name(1))
    assert told == [(2, 1)] * 3


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            prompts,
            st.tuples(st.just("drop"), st.integers(0, 9)),
            st.tuples(st.just("take"), st.integers(1, 6)),
            st.tuples(st.just("forget"), st.integers(0, 9)),
        ),
        max_size=40,
    )
)
def test_reports_suffice_to_derive_what_is_cached(steps: list) -> None:
    """An index that applies every report finds the same prefixes as the pool, after every step."""
    known: dict[bytes, bool] = {}

    def told(chain: list[bytes], held: int) -> None:
        for depth, block in enumerate(chain):
            known[block] = depth < held

    pool = BlockPool(12, told)
    held: list[list[int]] = []
    for step in steps:
        if isinstance(step, list):
            if len(step) > pool.num_free:
                continue
            held.append(cache(pool, *step))
            known.update({name(*step[: end + 1]): True for end in range(len(step))})
        elif step[0] == "drop" and held:
            pool.free(held.pop(step[1] % len(held)))
        elif step[0] == "forget" and held:
            pool.invalidate(held[step[1] % len(held)])
        elif step[0] == "take" and step[1] <= pool.num_free:
            pool.free(pool.allocate(step[1]))
        pool.check_integrity(_counted(held))
        for path in itertools.chain.from_iterable(itertools.product(range(3), repeat=n) for n in (1, 2, 3)):
            hashes = [name(*path[: end + 1]) for end in range(len(path))]
            believed = next((i for i, one in enumerate(hashes) if not known.get(one)), len(hashes))
            assert believed == len(pool.match(hashes)), path


def _counted(held: list[list[int]]) -> dict[int, int]:
    references: dict[int, int] = {}
    for blocks in held:
        for block in blocks:
            references[block] = references.get(block, 0) + 1
    return references


# --- cost ---------------------------------------------------------------------------------------------------


class Counted(bytes):
    """A hash that counts table lookups."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()


BLOCKS = 2048


def long_chain(tail: int = 0) -> list[Counted]:
    shared = [Counted(index.to_bytes(16, "little")) for index in range(BLOCKS)]
    return [*shared, Counted(tail.to_bytes(16, "big"))] if tail else shared


def remember(pool: BlockPool, hashes: list[Counted]) -> list[int]:
    blocks = pool.match(hashes)
    pool.retain(blocks)
    blocks += pool.allocate(len(hashes) - len(blocks))
    for index, block in enumerate(blocks):
        pool.register(block, hashes[index], hashes[index - 1] if index else None)
    return blocks


@pytest.mark.parametrize("at_once", [BLOCKS, 128, 1])
def test_taking_the_blocks_of_a_long_prompt_is_linear_in_their_number(at_once: int) -> None:
    """A prompt of 32k tokens: at once, in chunks, and block by block as streams grow."""
    told: list[int] = []
    pool = BlockPool(BLOCKS, lambda chain, held: told.append(held))
    pool.free(remember(pool, long_chain()))
    Counted.looks = 0
    for _ in range(BLOCKS // at_once):
        pool.allocate(at_once)
    assert Counted.looks <= 12 * BLOCKS
    assert told == list(range(BLOCKS - at_once, -1, -at_once))


@pytest.mark.long
def test_many_tails_of_one_long_prefix_cost_no_walk_to_the_root_each() -> None:
    told: list[tuple[int, int]] = []
    pool = BlockPool(BLOCKS + 500, lambda chain, held: told.append((len(chain), held)))
    for tail in range(1, 501):
        pool.free(remember(pool, long_chain(tail)))
    Counted.looks = 0
    pool.allocate(500)
    assert Counted.looks <= 4 * BLOCKS + 20 * 500
    assert told == [(BLOCKS + 1, BLOCKS)] * 500
