"""Hand-offs of one tenant that were refused: how often others of it pass, and that a claim is for one that still comes."""

from __future__ import annotations

import random

import pytest

from cluster.errors import BlocksExhaustedError
from engine.scheduler.hand_off_line import LONGEST_LINE, MAX_PASSED, HandOffLine, Moment
from engine.scheduler.refusals import KEPT_SECONDS, KEPT_STEPS
from tests.engine.parts import PAGE, STEP_SECONDS, Parts, request
from tests.harness.calls import count_calls

BLOCKS = 40
KEPT = round(KEPT_SECONDS / STEP_SECONDS)  # steps


class Load:
    """Before each step small hand-offs of two blocks, which run for 3 to 25 steps: never do all end at once."""

    def __init__(self, tenant: str = "x", seed: int = 1, step_seconds: float = STEP_SECONDS):
        self.parts = Parts(BLOCKS)
        self.parts.step_seconds = step_seconds
        self.tenant, self.rng = tenant, random.Random(seed)
        self.now, self.offered, self.small, self.ends = 0, 0, 0, dict[str, int]()
        self.refusals = self.parts.scheduler.refusals

    def offer(self, name: str, blocks: int, tenant: str = "x") -> bool:
        asked = request(f"{name} {self.now}", [3], 200, tenant=tenant)
        try:
            sequence = self.parts.scheduler.reserve(asked, [name.encode()], blocks * PAGE)
        except BlocksExhaustedError:
            return False
        self.parts.scheduler.start_reserved(sequence)
        sequence.tokens.append(13)
        name = asked.request_id
        self.ends[name] = self.now + self.rng.randint(3, 25)
        return True

    def step(self, small: int = 3) -> None:
        for _ in range(small):
            self.offered += 1
            if not self.offer(f"small {self.offered}", 2, self.tenant):
                break
            self.small += 1
        self.parts.step(check=False)
        self.now += 1
        for name in [name for name, end in self.ends.items() if end <= self.now]:
            self.parts.scheduler.remove(name)
            del self.ends[name]

    def fill(self) -> None:
        while self.parts.pool.num_free > 1:
            self.step()

    def steps_until_taken(self, blocks: int, limit: int = 400, every: int = 2) -> int:
        """Offered before every so many steps, with another id each time."""
        began = self.now
        for step in range(limit):
            if step % every == 0 and self.offer(f"large {began}", blocks):
                return step
            self.step()
        raise AssertionError("it is refused for ever")


@pytest.mark.parametrize("blocks", [12, 18, 24, 30, 38])
def test_a_large_hand_off_is_passed_by_a_bounded_number_of_small_ones_of_its_tenant(blocks: int) -> None:
    load = Load()
    for _ in range(5):
        load.fill()
        before = load.small
        assert load.steps_until_taken(blocks) <= 2 * KEPT
        assert load.small - before <= 2 * MAX_PASSED, "a few more, which leave it all that it needs"
        for _ in range(30):
            load.step()
    load.parts.check()


def lines_of_a_large_one(load: Load) -> None:
    """It is next in its tenant's line."""
    load.fill()
    before = load.small
    while load.small - before < MAX_PASSED:
        load.offer("large", 30)
        load.step()
    assert not load.offer("large", 30)


def test_one_that_is_next_keeps_no_other_tenant_out() -> None:
    load = Load()
    lines_of_a_large_one(load)
    while load.parts.pool.num_free < 4:
        assert not load.offer("large", 30)
        load.step()
    assert load.parts.pool.num_free < 30
    assert not load.offer("own", 2)
    assert load.offer("other", 4, "z"), "its tenant holds less"


def test_one_that_passes_beside_the_next_leaves_it_its_claim() -> None:
    load = Load()
    lines_of_a_large_one(load)
    while load.parts.pool.num_free < 32:
        load.step(small=0)
    before = [(one.request.tenant, count) for one, count in load.refusals.claims()]
    assert before == [("x", BLOCKS // 2)]
    assert load.offer("own", 1)
    assert [(one.request.tenant, count) for one, count in load.refusals.claims()] == before


def test_one_that_is_next_keeps_the_others_of_its_tenant_out_only_while_it_comes() -> None:
    load = Load()
    lines_of_a_large_one(load)
    before = load.small
    for _ in range(KEPT - 3):
        load.step()
    assert load.small == before or load.parts.pool.num_free >= 30 - 2
    for _ in range(4):
        load.step()
    assert load.small > before


def test_one_that_is_next_is_forgotten_where_the_engine_makes_no_steps() -> None:
    load = Load()
    lines_of_a_large_one(load)
    for name in list(load.parts.scheduler.requests):
        load.parts.scheduler.set_paused(name, True)
        if load.parts.pool.num_free < 30:
            load.parts.scheduler.remove(name)
    assert not load.parts.scheduler.has_work
    blocks = load.parts.pool.num_free - 29
    assert not load.offer("own", blocks), "all but one of them are for the other one"
    load.parts.now += KEPT_SECONDS
    assert load.offer("own", blocks)


def test_a_large_one_is_not_passed_for_ever_by_larger_ones() -> None:
    """There is always another larger one, beside the small ones."""
    load = Load()
    load.fill()
    for step in range(400):
        load.offer(f"larger {step // 10}", 20)
        if load.offer("large", 12):
            return
        load.step()
    raise AssertionError("it is refused for ever")


def test_a_claim_is_not_for_one_that_has_gone_elsewhere() -> None:
    """A small one was refused and does not come again; the large one's offers kept its claim, of two blocks, alive."""
    load = Load("y")
    load.fill()
    assert not load.offer("small of x", 2)
    load.step()
    assert load.steps_until_taken(18) <= 2 * KEPT
    parts = Parts(BLOCKS)
    parts.hand_off("holds", blocks=BLOCKS - 1)
    for _ in range(KEPT + 3):
        for blocks in (18,) if parts.scheduler.refusals._of else (2, 18):
            with pytest.raises(BlocksExhaustedError):
                parts.hand_off("refused", blocks=blocks)
        parts.step()
    assert [count for _, count in parts.scheduler.refusals.claims()] == [18]


@pytest.mark.parametrize("blocks", [30, 38])
def test_a_hand_off_that_needs_more_than_half_of_the_cache_is_taken_in_time(blocks: int) -> None:
    """Beside small ones of another tenant. All claims together are at most half of the cache until it has aged."""
    load = Load("y", step_seconds=0.1)
    for _ in range(3):
        load.fill()
        load.steps_until_taken(blocks)


def test_only_the_first_claim_is_to_more_than_half_of_the_cache() -> None:
    def claims(*needs: int) -> list[list[int]]:
        parts, found = Parts(BLOCKS), list[list[int]]()
        parts.hand_off("holds", blocks=BLOCKS - 1)
        for _ in range(3):
            for tenant, need in zip("xz", needs, strict=True):
                with pytest.raises(BlocksExhaustedError):
                    parts.hand_off("large", blocks=need, tenant=tenant)
            found.append([count for _, count in parts.scheduler.refusals.claims()])
            parts.now += 29.0
        return found

    assert claims(30, 12) == [[20], [20], [30]]
    assert claims(12, 30) == [[12, 8], [12, 8], [12, 8]]


BEFORE, NOW, LATER = Moment(1, 1.0), Moment(5, 3.0), Moment(10, 6.0)


def test_a_line_is_in_the_order_of_first_refusals() -> None:
    line = HandOffLine()
    for what, need in enumerate((3, 5, 4)):
        line.refused(what, need, NOW)
    line.refused(0, 2, LATER)
    assert line.first(BEFORE) == (0, 2, False) and line.kept_from(2, BEFORE) == 0
    for _ in range(MAX_PASSED):
        line.taken("another")
    assert line.first(BEFORE) == (1, 5, True)
    assert [line.kept_from(what, BEFORE) for what in (0, 1, 2, "new")] == [0, 2, 5, 5]
    line.taken(1)
    assert [line.kept_from(what, BEFORE) for what in (0, 2, "new")] == [0, 2, 4]
    limit = Moment(6, 3.0)
    assert line.first(limit) == (0, 2, True) and line.kept_from("new", limit) == 2
    line.forget(Moment(11, 6.0))
    assert len(line) == 0 and line.first(BEFORE) is None


@pytest.mark.parametrize(("limit", "over"), [((6, 3.0), True), ((5, 9.0), False), ((9, 2.9), False)])
def test_a_hand_off_has_left_its_line_after_so_many_steps_and_so_much_time(
    limit: tuple[int, float], over: bool
) -> None:
    line = HandOffLine()
    line.refused("one", 3, NOW)
    assert (line.first(Moment(*limit)) is None) is over
    line.forget(Moment(*limit))
    assert len(line) == (not over)


@pytest.mark.parametrize(
    ("step_seconds", "every"), [(0.0003, 170), (0.0003, 700), (0.01, 100), (0.1, 10), (1.0, 3), (30.0, 3)]
)
@pytest.mark.parametrize("tenant", "xy")
def test_a_hand_off_that_a_router_offers_again_is_taken_however_fast_or_slow_steps_are(
    step_seconds: float, every: int, tenant: str
) -> None:
    """Again after 50 ms, 200 ms, a second (two pauses of a router), or, where steps are slower, after three."""
    load = Load(tenant, step_seconds=step_seconds)
    for _ in range(3):
        load.fill()
        before = load.small
        load.steps_until_taken(18, (2 * MAX_PASSED + KEPT_STEPS) * every, every)
        if tenant == "x":
            assert load.small - before <= 60 * every
    load.parts.check()


@pytest.mark.parametrize("step_seconds", [0.0003, 0.01, 0.3, 30.0])
@pytest.mark.parametrize("tenant", "xy")
def test_a_hand_off_that_has_gone_elsewhere_keeps_its_blocks_free_for_the_time_of_a_router(
    step_seconds: float, tenant: str
) -> None:
    """From its own tenant as the next in the line, from another one by its claim."""
    parts = Parts(BLOCKS)
    parts.hand_off("holds", blocks=20, tenant="a")
    for number in range(MAX_PASSED + 1):
        if number:
            parts.hand_off(f"passes {number}", blocks=2, tenant="x")
            parts.scheduler.remove(f"passes {number}")
        with pytest.raises(BlocksExhaustedError):
            parts.hand_off(f"large {number}", blocks=38, tenant="x")
    began, steps = parts.now, 0
    while True:
        try:
            parts.hand_off("small", blocks=2, tenant=tenant)
        except BlocksExhaustedError:
            parts.now += step_seconds
            steps += 1
            parts.scheduler.schedule()
        else:
            break
    assert steps >= KEPT_STEPS and parts.now - began >= 0.999 * KEPT_SECONDS
    assert steps <= KEPT_STEPS or parts.now - began <= 1.1 * KEPT_SECONDS + step_seconds


def test_a_line_is_bounded_and_keeps_those_that_need_most() -> None:
    line = HandOffLine()
    line.refused("large", 9, NOW)
    for number in range(3 * LONGEST_LINE):
        line.refused(number, 2, NOW)
    line.refused("later", 5, NOW)
    assert len(line) == LONGEST_LINE
    for _ in range(MAX_PASSED):
        line.taken("another")
    assert line.kept_from("later", BEFORE) == 9
    line.taken("large")
    assert line.kept_from("new", BEFORE) == 5


def test_lines_of_tenants_whose_hand_offs_went_elsewhere_are_forgotten() -> None:
    load = Load("y")
    load.fill()
    for number in range(20):
        load.offer("large", 38, f"t{number}")
    assert len(load.refusals._lines) >= 20
    for _ in range(KEPT + 3):
        load.step(small=1)
    assert len(load.refusals._lines) <= 1


def test_a_refusal_costs_no_more_beside_many_tenants_with_refused_hand_offs() -> None:
    def calls(tenants: int) -> int:
        parts = Parts(BLOCKS)
        parts.hand_off("holds", blocks=BLOCKS - 1)
        parts.step()
        for number in range(tenants):
            with pytest.raises(BlocksExhaustedError):
                parts.hand_off("refused", blocks=8, tenant=f"t{number}")

        def refuse() -> None:
            with pytest.raises(BlocksExhaustedError):
                parts.hand_off("refused", blocks=9, tenant="t0")

        refuse()
        return count_calls(refuse)

    assert calls(400) <= calls(20) + 20
