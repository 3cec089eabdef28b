"""Owners of waiting items take turns."""

from __future__ import annotations

import random
import time

import pytest

from cluster.round_robin import CountedRoundRobin, RoundRobin


def test_one_owners_many_items_delay_anothers_by_one() -> None:
    waiting: RoundRobin[str] = RoundRobin()
    for item in ("a1", "a2", "a3"):
        waiting.push("a", item)
    waiting.push("b", "b1")
    assert [waiting.pop() for _ in range(2)] == ["a1", "b1"]
    waiting.push("c", "c1")
    assert [waiting.pop() for _ in range(3)] == ["a2", "c1", "a3"]
    with pytest.raises(KeyError):
        waiting.pop()


def test_items_that_are_appended_go_behind_those_of_their_owner_and_new_owners_behind_the_others() -> None:
    waiting: RoundRobin[str] = RoundRobin()
    newer: RoundRobin[str] = RoundRobin()
    for item in ("a1", "b1"):
        waiting.push(item[0], item)
    for item in ("c1", "a2", "c2"):
        newer.push(item[0], item)
    waiting.append_all(newer)
    assert len(waiting) == 5
    assert [waiting.pop() for _ in range(5)] == ["a1", "b1", "c1", "a2", "c2"]


def test_the_newest_of_the_owner_with_the_most_leaves_first() -> None:
    waiting: CountedRoundRobin[str] = CountedRoundRobin()
    for item in ("a1", "b1", "b2", "b3"):
        waiting.push(item[0], item)
    assert [waiting.pop_newest_of_most() for _ in range(2)] == ["b3", "b2"]
    assert len(waiting) == 2 and [waiting.pop() for _ in range(2)] == ["a1", "b1"]
    with pytest.raises(KeyError):
        waiting.pop_newest_of_most()


def test_the_number_of_items_is_that_of_what_waits_after_any_sequence() -> None:
    rng = random.Random(7)
    waiting: CountedRoundRobin[int] = CountedRoundRobin()
    expected: set[tuple[str, int]] = set()
    for number in range(2000):
        owner = rng.choice("abc")
        match rng.randrange(3):
            case 0:
                waiting.push(owner, number)
                expected.add((owner, number))
            case 1 if expected:
                item = waiting.pop()
                expected.remove(next(one for one in expected if one[1] == item))
            case _:
                known = rng.choice(sorted(expected)) if expected else (owner, -1)
                waiting.remove(*known)
                waiting.remove(owner, -1)  # waits nowhere
                expected.discard(known)
        assert len(waiting) == len(expected)
    assert sorted(waiting.pop() for _ in range(len(waiting))) == sorted(item for _, item in expected)


def test_who_has_the_most_after_any_sequence() -> None:
    rng = random.Random(11)
    waiting: CountedRoundRobin[int] = CountedRoundRobin()
    expected: dict[str, list[int]] = {owner: [] for owner in "abcd"}
    for number in range(2000):
        owner = rng.choice("abcd")
        match rng.randrange(6):
            case 0 | 1:
                waiting.push(owner, number)
                expected[owner].append(number)
            case 2 if any(expected.values()):
                item = waiting.pop()
                next(one for one in expected.values() if item in one).remove(item)
            case 3 if any(expected.values()):
                item = waiting.pop_newest_of_most()
                most = next(one for one in expected.values() if item in one)
                assert most[-1] == item and len(most) == max(map(len, expected.values()))
                most.pop()
            case 4 if any(expected.values()):
                item = waiting.oldest_of_most()
                assert waiting.pop_oldest_of_most() == item
                most = next(one for one in expected.values() if item in one)
                assert most[0] == item and len(most) == max(map(len, expected.values()))
                most.pop(0)
            case 5 if number % 4 == 0:
                newer: CountedRoundRobin[int] = CountedRoundRobin()
                for more in rng.choices("abcd", k=rng.randrange(4)):
                    number += 10_000
                    newer.push(more, number)
                    expected[more].append(number)
                waiting.append_all(newer)


def test_an_item_is_removed_without_a_look_at_the_others_of_its_owner() -> None:
    looks = 0

    class Item:
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return self is other

        def __hash__(self) -> int:
            return id(self)

    waiting: CountedRoundRobin[Item] = CountedRoundRobin()
    items = [Item() for _ in range(1000)]
    for item in items:
        waiting.push("a", item)
    for item in reversed(items):
        waiting.remove("a", item)
    assert not waiting and looks < len(items)


def test_many_owners_do_not_make_the_search_for_the_most_slow() -> None:
    def seconds(owners: int) -> float:
        waiting: CountedRoundRobin[int] = CountedRoundRobin()
        for number in range(owners):
            waiting.push(str(number), number)
        began = time.process_time()
        for number in range(200):
            waiting.push(f"further {number}", number)
            waiting.pop_newest_of_most()
        return time.process_time() - began

    # A search through all of them takes 500 times as long for the larger number.
    assert min(seconds(5000) for _ in range(3)) < 20 * max(min(seconds(10) for _ in range(3)), 1e-4)
