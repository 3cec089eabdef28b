"""A scheduler under load of many tenants."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

from cluster.errors import BlocksExhaustedError
from engine.request import TokenOutput
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from tests.engine.parts import PAGE, STEP_SECONDS, Parts, request

NEW = 14  # tokens at most of a request
LONGEST_WAIT = 250  # steps, for a token or for blocks; of budgets below four tokens more
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.5}


class World:
    """Local prompts and hand-offs. These come again when they are refused; reservations, pauses and evictions end. One
    tenant may flood it: with hand-offs until one is refused, or with prompts of which some always wait.

    Only hand-offs of one size wait no longer than others: a refused one waits nowhere, and smaller ones find room first.
    """

    def __init__(
        self,
        seed: int,
        flood: str = "",
        ranks: tuple[int, ...] = (0,),
        one_size: bool = False,
        **settings: Any,
    ):
        rng = self.rng = random.Random(seed)
        self.flood, self.flooding = flood, rng.choice("ab")  # what always wants more, and of which tenant
        self.ranks, self.one_size = ranks, one_size
        self.blocks = rng.choice((16, 24, 40))
        drawn = {
            "max_batch_tokens": rng.choice((5, 8, 64)),
            "max_batch_requests": rng.choice((2, 6, 256)),
            "chunked_prefill": rng.random() < 0.8,
            "prefix_caching": rng.random() < 0.7,
            "recompute_limit_tokens": rng.choice((0, 0, 12)),
        }
        given = {**drawn, **settings}
        self.parts = Parts(self.blocks, **given)
        self.budget, self.chunked = int(given["max_batch_tokens"]), bool(given["chunked_prefill"])
        self.longest_wait = LONGEST_WAIT * (1 if self.budget > 3 else 3)
        self.scheduler = self.parts.scheduler
        self.now = self.count = 0
        self.ending = False
        self.due: defaultdict[int, list[Any]] = defaultdict(list)  # what ends in which step
        self.tokens: dict[Sequence, tuple[int, int]] = {}  # of each that could run, and since when
        self.below: Counter[str] = Counter()  # steps in a row that a tenant is below its share
        self.offers: list[tuple[int, Any]] = []  # refused hand-offs, and since when
        self.kinds: Counter[str] = Counter()

    # --- load --------------------------------------------------------------------------------------------

    def request(self) -> Any:
        self.count += 1
        tenant = self.rng.choice("aaaaabbcd")
        length = 2 * PAGE + 1 if self.one_size else self.rng.randint(1, 5 * PAGE)
        prompt = [self.rng.choice((3, 4)) for _ in range(length)]
        return request(
            f"r{self.count}",
            prompt,
            10 if self.one_size else self.rng.randint(2, NEW),
            tenant=tenant,
            weight=WEIGHTS[tenant],
            n=1 if self.one_size else self.rng.choice((1, 1, 1, 3)),
            priority=self.rng.choice(self.ranks),
            salt=tenant.encode() * 16,
        )

    def later(self, steps: int, what: Any, *arguments: Any) -> None:
        self.due[self.now + steps].append(lambda: what(*arguments))

    def act(self) -> None:
        kind = self.rng.choice(("prompt", "hand-off", "hand-off", "abort", "pause", "park", "none"))
        names = list(self.scheduler.requests)
        if kind == "prompt" and len(self.scheduler.waiting) < 12:
            self.scheduler.add(self.request())
        elif kind == "hand-off" and len(self.offers) < 4:
            self.offers.append((self.now, self.request()))
        elif kind == "abort" and names and self.rng.random() < 0.3:
            self.scheduler.remove(self.rng.choice(names))
        elif kind == "pause" and names:
            name = self.rng.choice(names)
            self.scheduler.set_paused(name, True)
            self.later(self.rng.randint(1, 12), self.scheduler.set_paused, name, False)
        elif kind == "park" and names and self.rng.random() < 0.3:
            name = self.rng.choice(names)
            if all(one.state in (S.WAITING, S.RUNNING, S.FINISHED) for one in self.parts.choices(name)):
                self.scheduler.park(name)
                self.later(5, self.scheduler.remove, name)

    def offer(self) -> None:
        """Again what was refused, now and then, as a router does."""
        for since, one in list(self.offers):
            if self.rng.random() < 0.5:
                continue
            try:
                growth = min(one.sampling.max_tokens, 2 * PAGE)
                sequence = self.scheduler.reserve(one, [], len(one.prompt_tokens) + growth)
            except BlocksExhaustedError:
                waited = self.now - since
                assert waited <= self.longest_wait or not self.one_size, f"{one.request_id} is always refused"
                continue
            self.kinds["reserved"] += 1
            self.offers.remove((since, one))
            self.later(self.rng.randint(1, 6), self.commit, sequence)

    def more(self) -> None:
        """What the flood wants before a step: small requests, all there is room for."""
        for _ in range(self.blocks if self.flood and not self.ending else 0):
            self.count += 1
            one = request(f"f{self.count}", [5], 6, tenant=self.flooding, weight=WEIGHTS[self.flooding])
            if self.flood == "prompts":
                if len(self.scheduler.waiting) >= 8:
                    return
                self.scheduler.add(one)
            else:
                try:
                    self.commit(self.scheduler.reserve(one, [], 2 * PAGE))
                except BlocksExhaustedError:
                    return

    def commit(self, sequence: Sequence) -> None:
        if sequence.state is S.WAITING_FOR_KV:
            one = sequence.request
            position = len(one.prompt_tokens)
            self.scheduler.start_reserved(sequence)
            tokens = [TokenOutput(one.request_id, choice, position, 13) for choice in range(one.n)]
            self.parts.outputs.append_tokens(sequence, tokens)

    # --- a step ------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += 1
        for end in self.due.pop(self.now, ()):
            end()
        self.offer()
        self.more()
        self.parts.now += STEP_SECONDS
        decision = self.scheduler.schedule()
        self.kinds["preempted"] += decision.preemptions
        self.kinds["returned"] += len(decision.returned)
        for name in decision.evicted_reservations:
            self.kinds["evicted"] += 1
            self.later(self.rng.randint(1, 3), self.scheduler.remove, name)
        if decision.scheduled:
            assert self.alone(decision.scheduled) or sum(decision.scheduled.values()) <= self.budget
            assert all(s.state is S.RUNNING for s in decision.scheduled)
            rows = sum(item.num_logits for item in decision.plan().items)
            self.parts.process(decision, [13] * rows)
        self.check_owners()
        self.check_waits()
        self.check_shares()

    def alone(self, scheduled: dict[Sequence, int]) -> bool:
        return len(scheduled) == 1 and not self.chunked

    def check_owners(self) -> None:
        """A block is of several sequences only with the same tokens at the same place."""
        self.parts.check()
        holders: defaultdict[int, list[tuple[int, Sequence]]] = defaultdict(list)
        for one in self.scheduler.sequences():
            for index, block in enumerate(one.blocks):
                holders[block].append((index, one))
        for shared in holders.values():
            first = shared[0]
            for index, one in shared[1:]:
                end = min((index + 1) * PAGE, one.num_computed, first[1].num_computed)
                assert index == first[0] and one.tokens[:end] == first[1].tokens[:end]
        queued = set(self.scheduler.waiting) | set(self.scheduler.running)
        assert len(queued) == len(self.scheduler.waiting) + len(self.scheduler.running)
        assert queued <= set(self.scheduler.sequences())
        assert self.scheduler.waiting == sorted(self.scheduler.waiting, key=lambda s: s.order)
        assert all(not one.blocks for one in self.scheduler.waiting)

    def check_waits(self) -> None:
        present = {}
        for one in (*self.scheduler.waiting, *self.scheduler.running):
            progress, since = self.tokens.get(one, (-1, self.now))
            if one.paused or one.num_computed + len(one.tokens) > progress:
                progress, since = max(progress, one.num_computed + len(one.tokens)), self.now
            assert self.now - since <= self.longest_wait, f"{one.request.request_id} waits for ever"
            present[one] = (progress, since)
        self.tokens = present

    def check_shares(self) -> None:
        """Of a tenant that waits for blocks, no other holds more than its part for long while it holds less."""
        shares = self.scheduler.blocks.shares
        first: dict[str, Sequence] = {}
        for one in self.scheduler.waiting:
            if not one.paused:
                first.setdefault(one.request.tenant, one)
        holding = {one.request.tenant: one.request for one in self.scheduler.sequences()}
        fair = self.blocks / sum(request.weight for request in holding.values()) if holding else 0.0
        for tenant in WEIGHTS:
            waits = first.get(tenant)
            is_below = (
                waits is not None
                and shares.of(waits.request, self.scheduler.blocks.claim(waits)) <= fair
                and any(shares.of(other) > fair for name, other in holding.items() if name != tenant)
            )
            self.below[tenant] = self.below[tenant] + 1 if is_below else 0
            assert self.below[tenant] <= self.longest_wait, tenant

    def run(self) -> None:
        for _ in range(2 * self.longest_wait):
            for _ in range(self.rng.choice((0, 0, 1)) if self.flood else self.rng.randint(0, 4)):
                self.act()
            self.step()
        self.ending = True
        for _ in range(4 * self.longest_wait):  # no more comes
            if not (self.scheduler.requests or self.offers):
                break
            self.step()
        assert not self.scheduler.requests and not self.offers
        assert not self.scheduler.waiting and not self.scheduler.running
        assert not self.scheduler.reservations.eviction_pending
        assert len(self.scheduler.reservations) == len(self.scheduler.claims) == 0
        assert self.parts.pool.num_free == self.blocks
        assert not self.scheduler.batch_full or not self.scheduler.running
