"""Random requests in a small cache: every answer equals the one of an otherwise idle engine, and every block is freed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.errors import BlocksExhaustedError
from cluster.protocol.block_hash import hash_blocks, pack_tokens
from engine.engine import Engine
from engine.plan import StepPlan
from engine.request import EngineRequest, EngineReservation, TokenOutput
from engine.sampling.host_sampler import HostDraw, HostSampler
from engine.sampling.row import Row
from engine.sampling.sampler import Result
from engine.scheduler.sequence import NO_ROW
from engine.speculation.per_sequence import PerSequence
from tests.engine.fake_model import PAGE, FakeRunner, continuation, greedy
from tests.engine.parts import STEP_SECONDS

SECRET, SALT = b"p", bytes(16)


class LateRunner(FakeRunner):
    """Writes a step's KV only when its results are read, or the next step is computed: as late as a device may.

    That of a step without draws at once: nobody waits for it, and a device lets what lands wait for it (ADR 0142)."""

    def __init__(self, blocks: int, **settings: Any):
        super().__init__(blocks, **settings)
        self.late: list[tuple[Tensor, Tensor]] = []

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        self.write()
        before = self.cache.clone()
        logits = super().execute(plan, drawn)
        step = self.follower
        for copy in plan.copies:
            before[copy.target] = before[copy.source]
        self.late = [(step.slots.clone(), step.tokens.clone())]
        self.cache.copy_(before)
        if not len(logits):
            self.write()
        return logits

    def write(self) -> None:
        for slots, tokens in self.late:
            self.cache.view(-1)[slots] = tokens
        self.late = []


class LateSampler(HostSampler):
    def __init__(self, runner: LateRunner):
        self._runner = runner

    def begin(self, logits: Tensor, source: list[int], rows: Seq[Row]) -> HostDraw:
        draw, runner = super().begin(logits, source, rows), self._runner
        mine, results = runner.late, draw.results

        def read() -> list[Result]:
            if runner.late is mine:
                runner.write()
            return results()

        draw.results = read  # type: ignore[method-assign]
        return draw


class HalfRight:
    """Proposes the model's own tokens, with a wrong one among them in about half of the drafts."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        drafts = continuation(tokens, count)
        wrong = (7 * len(tokens) + tokens[-1]) % (2 * count)
        return [*drafts[:wrong], 1, *drafts[wrong + 1 :]] if wrong < count else drafts


class World:
    def __init__(
        self,
        blocks: int,
        budget: int,
        chunked: bool,
        limit: int,
        batch: int = 256,
        tenants: int = 1,
        overlap: bool = False,
        speculation: bool = False,
    ):
        self.runner = LateRunner(
            blocks,
            overlap="on" if overlap and not speculation else "off",
            speculation="ngram" if speculation else "none",
            max_batch_tokens=budget,
            max_batch_requests=batch,
            chunked_prefill=chunked,
            recompute_limit_tokens=limit,
        )
        self.tenants = tenants
        self.now = 0.0
        self.engine = Engine(self.runner, self.runner.config, secret=SECRET, clock=lambda: self.now)
        self.engine._outputs._sampler = LateSampler(self.runner)
        if speculation:
            self.engine._drafter.method = PerSequence(HalfRight)
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.reserved: dict[str, list[int]] = {}
        # Parts of them may still be landing.
        self.evicted: list[tuple[str, EngineReservation, list[int]]] = []
        self.taken: dict[str, EngineReservation] = {}
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def request(self, name: str, prompt: list[int], new: int, n: int) -> EngineRequest:
        tenant = f"t{self.count % self.tenants}"
        return EngineRequest(name, prompt, greedy(new), n=n, salt=SALT, tenant=tenant)

    def add(self, prompt: list[int], new: int, n: int) -> None:
        name = self.name()
        self.engine.add(self.request(name, prompt, new, n))
        for choice in range(n):
            self.expected[name, choice] = continuation(prompt, new)

    def reserve(self, prompt: list[int], new: int, n: int) -> None:
        """What a decode worker does for a prompt that another worker computes."""
        name = self.name()
        request = self.request(name, prompt, new, n)
        hashes = hash_blocks(pack_tokens(prompt), PAGE, secret=SECRET, salt=SALT)
        try:
            taken = self.engine.reserve(request, hashes, growth_tokens=min(new, 4))
        except BlocksExhaustedError:
            return
        self.runner.store(taken.block_ids, taken.held_tokens, prompt[taken.held_tokens :])
        self.reserved[name] = prompt
        self.taken[name] = taken
        for choice in range(n):  # first tokens differ, as sampled ones do: from there on choices part
            first = 3 + choice
            self.expected[name, choice] = [first, *continuation([*prompt, first], new - 1)]

    def commit(self) -> None:
        if not self.reserved:
            return
        name, prompt = next(iter(self.reserved.items()))
        del self.reserved[name]
        del self.taken[name]
        choices = [choice for owner, choice in self.expected if owner == name]
        tokens = [TokenOutput(name, choice, len(prompt), 3 + choice) for choice in choices]
        for choice in choices:
            self.got[name, choice] = [3 + choice]
        self.engine.commit(name, tokens)

    def abort(self, index: int) -> None:
        names = sorted({name for name, _ in self.expected})
        if names:
            self.drop(names[index % len(names)])

    def drop(self, name: str) -> None:
        self.engine.abort(name)
        self.forget(name)

    def forget(self, name: str) -> None:
        self.reserved.pop(name, None)
        self.taken.pop(name, None)
        for key in [key for key in self.expected if key[0] == name]:
            del self.expected[key]

    def pause(self, index: int) -> None:
        """Perhaps before its choices part: those that come then are not paused."""
        names = sorted({name for name, _ in self.expected})
        if names:
            self.engine.pause(names[index % len(names)])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        if not self.engine.has_work:
            return
        self.now += STEP_SECONDS
        output = self.engine.step()
        for token in output.tokens:
            self.got.setdefault((token.request_id, token.choice), []).append(token.token_id)
        for done in output.done:
            assert done.error is None
            if done.preempted:  # with its tokens so far
                for key in [key for key in self.expected if key[0] == done.request_id]:
                    said = self.got.get(key, [])
                    assert said == self.expected[key][: len(said)]
                self.forget(done.request_id)
        for name in output.evicted_reservations:
            self.evicted.append((name, self.taken[name], self.reserved[name]))
            self.forget(name)
            with pytest.raises(BlocksExhaustedError):  # all of it had come, and the commit was under way
                self.engine.commit(name, [TokenOutput(name, 0, 1, 3)])

    def check(self) -> None:
        """Also every row of the block tables, on the leader and on a rank that follows it."""
        self.engine.check_integrity()
        for s in self.engine._scheduler.sequences():
            if s.row == NO_ROW:
                assert s.blocks_in_row == 0
                continue
            for buffers in (self.runner.leader, self.runner.follower):
                assert buffers.table[s.row, : s.blocks_in_row].tolist() == s.blocks[: s.blocks_in_row]
            assert s.blocks_in_row >= self.engine._scheduler.blocks_for(s.num_computed)

    def last_part(self) -> None:
        """It lands only now; then no write is left, and the reservation is released."""
        if self.evicted:
            name, taken, prompt = self.evicted.pop(0)
            self.runner.store(taken.block_ids, taken.held_tokens, [99] * (len(prompt) - taken.held_tokens))
            self.engine.abort(name)

    def finish(self) -> None:
        while self.reserved:
            self.commit()
        for name, _ in self.expected:
            self.engine.resume(name)
        for turn in range(3000):
            if not self.engine.has_work and not self.evicted:
                break
            if turn % 3 == 0:
                self.last_part()
            self.step()
            self.check()
        assert not self.engine.has_work


prompts = st.lists(st.integers(3, 5), min_size=1, max_size=18)  # few letters: prefixes are often shared
operations = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(2, 40), st.integers(1, 3)),
    st.tuples(st.just("reserve"), prompts, st.integers(2, 40), st.integers(1, 3)),
    st.tuples(st.just("commit")),
    st.tuples(st.just("abort"), st.integers(0, 50)),
    st.tuples(st.just("last_part")),
    st.tuples(st.just("pause"), st.integers(0, 50)),
    st.tuples(st.just("steps"), st.integers(1, 12)),  # so many that requests grow into what others hold
    st.tuples(st.just("step")),
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(operations, min_size=10, max_size=60),
    blocks=st.integers(16, 28),
    budget=st.sampled_from([3, 8, 64]),
    chunked=st.booleans(),
    limit=st.sampled_from([0, 12]),
    batch=st.sampled_from([2, 256]),
    tenants=st.integers(1, 3),
    overlap=st.booleans(),
    speculation=st.booleans(),
)
def test_every_answer_is_its_own(steps, blocks, budget, chunked, limit, batch, tenants, overlap, speculation):
    world = World(blocks, budget, chunked, limit, batch, tenants, overlap, speculation)
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
        world.check()
    world.finish()
    for key, tokens in world.expected.items():
        assert world.got[key] == tokens, key
    assert world.engine.stats().blocks_held == 0


def test_a_sibling_of_an_evicted_choice_takes_no_blocks():
    """The choice that grows runs out of blocks, and the one whose turn it is to give way is its paused sibling: the whole
    request goes back to the router."""
    runner = FakeRunner(10, recompute_limit_tokens=4)
    engine = Engine(runner, runner.config, secret=SECRET)
    engine.add(EngineRequest("both", [3] * 8, greedy(50), n=2, salt=SALT))
    engine.step()
    engine._scheduler.requests["both"][0].paused = True  # the second choice is not
    done = []
    for _ in range(60):
        done += engine.step().done
        engine.check_integrity()
    assert [(one.request_id, one.preempted) for one in done] == [("both", True)]
    assert engine.stats().blocks_held == 0


def test_a_copy_for_a_choice_that_had_to_go_is_not_made_later():
    """Its blocks are another request's by then: what a hand-off has brought there would be overwritten."""
    runner = FakeRunner(4, recompute_limit_tokens=4)
    engine = Engine(runner, runner.config, secret=SECRET)
    engine.reserve(EngineRequest("high", [9], greedy(2), salt=SALT, priority=1), [], growth_tokens=0)
    engine.add(EngineRequest("three", [3] * 6, greedy(9), n=3, salt=SALT))
    assert len(engine.step().tokens) == 3
    output = engine.step()  # the first choice has a block for its copy, the second one has none
    assert [one.preempted for one in output.done] == [True] and not output.tokens
    engine.abort("high")
    prompt = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    taken = engine.reserve(EngineRequest("after", prompt, greedy(4), salt=SALT), [], growth_tokens=4)
    runner.store(taken.block_ids, 0, prompt)
    first, *rest = continuation(prompt, 4)
    engine.commit("after", [TokenOutput("after", 0, len(prompt), first)])
    tokens = [one.token_id for _ in range(3) for one in engine.step().tokens]
    assert tokens == rest


def test_a_prompts_cost_is_its_share_of_the_steps_that_computed_it():
    """What was waited for others in the same batch belongs to the others: a queue's length is told from it."""
    runner = FakeRunner(64, max_batch_tokens=16)
    engine = Engine(runner, runner.config, secret=SECRET)
    for index in range(4):
        engine.add(EngineRequest(f"r{index}", [index] * (8 + 8 * index), greedy(1), salt=SALT))
    done = []
    while engine.has_work:
        done += engine.step().done
    shares = [one.prompt_compute_seconds for one in done]
    assert len(shares) == 4 and min(shares) > 0
    assert sum(shares) <= sum(engine.step_times.total_seconds.values())


def test_the_less_important_is_preempted_though_it_came_first():
    runner = FakeRunner(12, max_batch_tokens=64)
    engine = Engine(runner, runner.config, secret=SECRET)
    for name, priority, letter in (("batch", -1, 3), ("normal", 0, 4), ("high", 1, 5)):
        engine.add(EngineRequest(name, [letter] * 8, greedy(24), salt=SALT, priority=priority))
    ended = []
    while engine.has_work:
        ended += [done.request_id for done in engine.step().done]
    assert ended == ["high", "normal", "batch"]
    assert engine.stats().preemptions > 0


def test_the_least_important_reservation_goes_first():
    runner = FakeRunner(12, max_batch_tokens=64)
    engine = Engine(runner, runner.config, secret=SECRET)
    for name, priority, letter in (("batch", -1, 3), ("high", 1, 5)):
        request = EngineRequest(name, [letter] * 8, greedy(8), salt=SALT, priority=priority)
        engine.reserve(request, [], growth_tokens=0)
    engine.add(EngineRequest("running", [6] * 8, greedy(32), salt=SALT))
    evicted: list[str] = []
    while engine.has_work and not evicted:
        evicted += engine.step().evicted_reservations
    assert evicted == ["batch"]


def test_blocks_of_an_eviction_are_for_running_requests():
    """Neither a new reservation nor a new request takes the blocks that a running sequence waits for."""
    runner = FakeRunner(8, max_batch_tokens=64)
    engine = Engine(runner, runner.config, secret=SECRET)
    engine.add(EngineRequest("running", [6] * 12, greedy(16), salt=SALT))
    engine.step()
    reserved = EngineRequest("reserved", [3] * 16, greedy(8), salt=SALT)
    blocks = engine.reserve(reserved, [], growth_tokens=0).block_ids
    while not (output := engine.step()).evicted_reservations:
        assert output.tokens
    assert output.evicted_reservations == ["reserved"] and not output.tokens
    assert engine.block_ids("reserved") == blocks
    assert not engine.step().evicted_reservations  # no other reservation is evicted meanwhile
    engine.abort("reserved")
    with pytest.raises(BlocksExhaustedError):
        engine.reserve(reserved, [], growth_tokens=0)
    engine.add(EngineRequest("new", [4] * 16, greedy(2), salt=SALT))
    tokens = [token for _ in range(4) for token in engine.step().tokens]
    assert [token.request_id for token in tokens] == ["running"] * 4
