"""Reports of a worker arrive in the index, whichever call fails on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from cluster.index import reporter as module
from cluster.index import scripts, slot_keys
from cluster.index.reporter import Chain, ChainReporter
from cluster.membership import keys
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import hash_blocks, index_keys, make_salt, pack_tokens
from cluster.redis.connect import connect
from tests.harness.waiting import wait_for

SECONDS = 60.0
_PROBE = """
local nodes = walk(ARGV[1], ARGV[2], now_ms(), now_ms() + 60000, KEYS[1], 0, 1000)
return covered(nodes, {tonumber(ARGV[3])}, now_ms())[tonumber(ARGV[3])] or 0
"""


def chain(number: int) -> Chain:
    hashes = hash_blocks(pack_tokens([number] * 40), 4, secret=b"s", salt=make_salt("m"))
    return hashes, len(hashes)


class Worker:
    """Registered, with a reporter whose calls fail as listed: an entry per call, None = it works."""

    def __init__(self, url: str, namespace: str, held: Callable[[], list[Chain]], *, apart: bool = False):
        info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
        self.registration = Registration(url, namespace, info)
        index_url = url if apart else ""
        self.reporter = ChainReporter(url, namespace, "m", self.registration, held, index_url=index_url)
        self.namespace = namespace
        self.failures: list[str | None] = []
        self._client = connect(url)
        self._probe = self._client.register_script(scripts.walk() + _PROBE)
        self._owners, self._prefix = keys.slot_owners(namespace), scripts.prefix(namespace, "m")
        script = self.reporter._script

        def call(**arguments: Any) -> Any:
            failure = self.failures.pop(0) if self.failures else None
            if failure == "before":
                raise redis.ConnectionError("cut before it arrived")
            answer = script(**arguments)
            if failure == "after":
                raise redis.TimeoutError("the answer was lost")
            return answer

        self.reporter._script = call  # type: ignore[assignment]

    def start(self) -> None:
        self.registration.start()
        wait_for(lambda: self.registration.slot, SECONDS, "registered")
        self.reporter.start()

    def in_index(self, numbers: range) -> bool:
        return self.holds([chain(number) for number in numbers])

    def holds(self, chains: list[Chain]) -> bool:
        for hashes, held in chains:
            args: list[str | bytes | int] = [self._prefix, index_keys(hashes), self.registration.slot]
            if int(self._probe(keys=[self._owners], args=args)) != held:
                return False
        return True

    def close(self) -> None:
        self.reporter.stop()
        self.registration.stop()
        self._client.close()


@pytest.fixture
def make(redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(module, "RESYNC_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(module, "BATCH_CHAINS", 4)
    made: list[Worker] = []

    def one(held: Callable[[], list[Chain]] = list, **options: bool) -> Worker:
        made.append(Worker(redis_url, namespace, held, **options))
        return made[-1]

    yield one
    for worker in made:
        worker.close()


@pytest.mark.parametrize("failure", ["before", "after"])
def test_a_whole_cache_is_reported_though_redis_fails_in_the_middle(make: Any, failure: str) -> None:
    worker = make(lambda: [chain(number) for number in range(12)])
    worker.failures = [None, failure, failure]
    worker.start()
    wait_for(lambda: worker.in_index(range(12)), SECONDS, "all of it is in the index")
    wait_for(lambda: worker.reporter.waiting == 0, SECONDS, "the last answer arrived too")
    assert not worker.failures


def test_a_lost_answer_does_not_take_later_reports_along(make: Any) -> None:
    """The index takes a number once: what comes meanwhile must not go out under the lost one's."""
    worker = make()
    worker.start()
    wait_for(lambda: worker.reporter._slot, SECONDS, "the empty cache is reported")
    worker.failures = ["after", "before", "before"]
    worker.reporter.report(*chain(0))
    wait_for(lambda: len(worker.failures) < 3, SECONDS, "the first call")
    worker.reporter.report(*chain(1))
    wait_for(lambda: worker.in_index(range(2)), SECONDS, "both are in the index")


def test_the_rest_of_a_batch_of_deep_chains_is_sent_too(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes as many as hold Redis for a short time only; the answers of two calls are lost."""
    monkeypatch.setattr(module, "BATCH_CHAINS", 64)
    tokens = [[1] * 4 * blocks + [2] * 4 for blocks in range(1, 60)]
    hashes = [hash_blocks(pack_tokens(one), 4, secret=b"s", salt=make_salt("m")) for one in tokens]
    chains = [(one, len(one)) for one in hashes]
    worker = make(lambda: list(chains))
    worker.failures = [None, "after", None, "after"]
    worker.start()
    wait_for(lambda: worker.holds(chains), SECONDS, "all of it is in the index")
    wait_for(lambda: worker.reporter.waiting == 0, SECONDS, "nothing is left")
    assert not worker.failures and worker.registration.standing[1] == 1, "in one registration"
    worker.reporter.report(*chain(0))
    wait_for(lambda: worker.in_index(range(1)), SECONDS, "what comes later")


def test_an_engine_that_does_not_answer_is_asked_again(make: Any) -> None:
    answers: list[Any] = [TimeoutError("a long step"), [chain(0)]]

    def held() -> list[Chain]:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    worker = make(held)
    worker.start()
    wait_for(lambda: worker.in_index(range(1)), SECONDS, "it is in the index")
    worker.reporter.report(*chain(1))
    wait_for(lambda: worker.in_index(range(2)), SECONDS, "and so is what came later")


def test_an_engine_that_hangs_costs_no_slot_of_an_index_of_its_own(make: Any) -> None:
    """Its slot is claimed once: another claim would be refused, and registering above it would revive the lease."""
    asked: list[None] = []

    def held() -> list[Chain]:
        asked.append(None)
        if len(asked) < 5:
            raise TimeoutError("it hangs")
        return [chain(0)]

    worker = make(held, apart=True)
    worker.start()
    wait_for(lambda: worker.in_index(range(1)), SECONDS, "it is in the index")
    assert worker.registration.standing[1] == 1


def test_reports_of_an_unknown_slot_wait_while_no_other_is_assigned(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is not asked again and again meanwhile."""
    worker = make(lambda: [chain(0)], apart=True)
    worker.start()
    wait_for(lambda: worker.in_index(range(1)), SECONDS, "it is in the index")
    refused: list[None] = []
    sent: list[None] = []
    script = worker.reporter._script

    def send(**arguments: Any) -> Any:
        sent.append(None)
        return script(**arguments)

    def refuse(above: int = 0) -> bool:
        refused.append(None)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(worker.registration, "register_again", refuse)
        patched.setattr(worker.reporter, "_script", send)
        worker._client.hdel(slot_keys.owners(worker.namespace), str(worker.registration.slot))
        worker.reporter.report(*chain(1))
        wait_for(lambda: len(refused) >= 5, SECONDS, "a slot was asked for")
        assert len(sent) <= 1
    wait_for(lambda: worker.registration.standing[1] == 2, SECONDS, "it has another slot")
    wait_for(lambda: worker.in_index(range(1)), SECONDS, "the whole cache is reported under it")


def test_an_index_that_keeps_losing_the_slot_is_not_given_one_each_time(make: Any) -> None:
    worker = make(apart=True)
    worker.registration.register_again()
    for _ in range(20):
        worker.reporter._resync_if_new_slot()
        worker._client.delete(*slot_keys.all_keys(worker.namespace))
        worker.reporter._claim._kept -= 10  # a renewal is due
    assert worker.registration.standing[1] == 2, "the first loss is made good at once"


def test_reports_of_a_worker_without_a_slot_wait_at_rest(make: Any) -> None:
    """One that was fenced while Redis is away has none, and reports of before: asked without a pause, they took a core."""
    worker = make()
    asked: list[None] = []
    wait = worker.reporter._wait

    def counted() -> bool:
        asked.append(None)
        return wait()

    worker.reporter._wait = counted  # type: ignore[method-assign]
    worker.reporter.report(*chain(0))
    worker.reporter.start()
    wait_for(lambda: len(asked) > 2, SECONDS, "it looks for a slot")
    before, began = len(asked), time.monotonic()
    time.sleep(0.2)
    assert len(asked) - before <= 2 + (time.monotonic() - began) / module.RETRY_SECONDS
    worker.registration.start()
    wait_for(lambda: worker.in_index(range(1)), SECONDS, "it has a slot now")
