"""The radix index driven at random beside a plain model of sets, in the order of calls that workers and routers make."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.cluster.index.radix_index import PAGE, Index, Sets, chain

# Blocks of two kinds only: most chains part from another one somewhere.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda blocks: [token for token in blocks for _ in range(PAGE)]
)
WORKERS = st.sampled_from("abc")
NUMBERS = st.integers(0, 11)


class IndexMachine(RuleBasedStateMachine):
    """Three workers. `held` is what each has for certain, `promised` what it has or placements expect of it."""

    url = ""

    @initialize(prompts=st.lists(TOKENS, min_size=6, max_size=12))
    def begin(self, prompts: list[list[int]]) -> None:
        self.index = Index(self.url)
        self.slots: dict[str, str] = {}
        self.held, self.promised = Sets(), Sets()
        self.known = sorted({chain(tokens) for tokens in prompts})
        self.next_slot = 0
        for worker in "abc":
            self._take_slot(worker)

    def _take_slot(self, worker: str) -> None:
        if worker in self.slots:
            self.index.redis.hdel(self.index.owners, self.slots[worker])
        self.next_slot += 1
        self.slots[worker] = str(self.next_slot)
        self.index.own(self.slots[worker])

    @rule(worker=WORKERS, number=NUMBERS)
    def store(self, worker: str, number: int) -> None:
        blocks = self.known[number % len(self.known)]
        assert self.index.report(self.slots[worker], blocks, len(blocks)) == b"ok"
        for model in (self.held, self.promised):
            model.report(worker, blocks, len(blocks))

    @rule(worker=WORKERS, number=NUMBERS)
    def repeat_a_batch(self, worker: str, number: int) -> None:
        """One that was applied already, sent again with other words, changes nothing."""
        blocks = self.known[number % len(self.known)]
        slot = self.slots[worker]
        before = self.index._sequence.get(slot, 1) - 1
        if before >= 1:
            assert self.index.report(slot, blocks, 0, sequence=before) == b"ok"

    @rule(worker=WORKERS, number=NUMBERS)
    def predict(self, worker: str, number: int) -> None:
        blocks = self.known[number % len(self.known)]
        self.index.predict(self.slots[worker], blocks)
        self.promised.report(worker, blocks, len(blocks))

    @rule(worker=WORKERS, number=NUMBERS)
    def predict_what_has_expired(self, worker: str, number: int) -> None:
        """It may end a promise that still stood; it never makes one, nor touches what is held."""
        blocks = self.known[number % len(self.known)]
        self.index.predict(self.slots[worker], blocks, until_ms=-1)

    @rule(worker=WORKERS, number=NUMBERS, data=st.data())
    def evict(self, worker: str, number: int, data: st.DataObject) -> None:
        """A block goes, and with it whatever continues it; every chain concerned is reported."""
        blocks = self.known[number % len(self.known)]
        cut = data.draw(st.integers(0, len(blocks) - 1))
        block = blocks[cut]
        concerned = [one for one in self.known if block in one]
        for model in (self.held, self.promised):
            for one in concerned:
                model.held.setdefault(worker, set()).difference_update(one[cut:])
        for one in data.draw(st.permutations(concerned)):
            mine = self.held.match(one).get(worker, 0)
            assert self.index.report(self.slots[worker], one, mine) == b"ok"

    @rule(worker=WORKERS, kind=st.sampled_from(["restart", "resync", "lose_redis"]), data=st.data())
    def begin_again(self, worker: str, kind: str, data: st.DataObject) -> None:
        """One rule for all of it: what is forgotten too often proves nothing."""
        if kind == "restart":
            self._restart(worker)
        elif kind == "resync":
            self._resync(worker, data)
        else:
            self._lose_redis()

    def _restart(self, worker: str) -> None:
        """A new life, a new slot, an empty cache."""
        self._take_slot(worker)
        for model in (self.held, self.promised):
            model.held[worker] = set()

    def _resync(self, worker: str, data: st.DataObject) -> None:
        """A new slot for the same cache: everything is published again."""
        self._take_slot(worker)
        for one in data.draw(st.permutations(self.known)):
            mine = self.held.match(one).get(worker, 0)
            if mine:
                self.index.report(self.slots[worker], one[:mine], mine)
        self.promised.held[worker] = set(self.held.held.get(worker, set()))

    def _lose_redis(self) -> None:
        """It comes back empty: every worker takes a new slot and starts from nothing here."""
        keys = self.index.redis.keys(self.index.prefix + "*")
        if keys:
            self.index.redis.delete(*keys)
        for worker in "abc":
            self._restart(worker)

    @invariant()
    def promises_lie_between_what_is_held_and_what_is_expected(self) -> None:
        for blocks in getattr(self, "known", ()):
            found = self.index.match(blocks)
            held, promised = self.held.match(blocks), self.promised.match(blocks)
            for worker, slot in self.slots.items():
                low, high = held.get(worker, 0), promised.get(worker, 0)
                assert low <= found.get(slot, 0) <= high, (worker, low, found.get(slot, 0), high)

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.redis.close()


@pytest.mark.timeout(120)
def test_the_index_keeps_its_word(redis_server):
    class Machine(IndexMachine):
        url = redis_server.url

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=32, stateful_step_count=40, deadline=None)
    )
