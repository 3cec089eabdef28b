"""Pauses between the slots that a worker asks for while the index keeps losing them."""

from __future__ import annotations

import random

import pytest

from cluster.index.backoff import FIRST_SECONDS, MAX_SECONDS, SlotBackoff


class Asking:
    def __init__(self, seed: int = 1):
        self.now = 5.0
        self.backoff = SlotBackoff(random.Random(seed), clock=lambda: self.now)

    def pause(self) -> float:
        """Ask for a slot, and wait until another may be asked for."""
        assert self.backoff.may_ask()
        self.backoff.asked()
        began = self.now
        while not self.backoff.may_ask():
            self.now += 0.01
        return self.now - began


def test_pauses_double_up_to_a_bound() -> None:
    asking = Asking()
    for expected in (1, 2, 4, 8, 16, 32, 32, 32):
        assert 0.5 * expected <= asking.pause() <= expected + 0.02


def test_pauses_are_random() -> None:
    assert len({round(Asking(seed).pause(), 2) for seed in range(8)}) > 4


@pytest.mark.parametrize(("kept", "again"), [(1.01, FIRST_SECONDS), (0.9, MAX_SECONDS)])
def test_a_slot_that_was_kept_for_long_begins_anew(kept: float, again: float) -> None:
    asking = Asking()
    for _ in range(8):
        asking.pause()
    asking.now += kept * MAX_SECONDS
    assert 0.5 * again <= asking.pause() <= again + 0.02
