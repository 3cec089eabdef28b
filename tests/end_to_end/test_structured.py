"""Answers that match a grammar, through whole clusters."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.client import Client, Completion, Timings
from cluster.faults.orders import InjectedFault, Order
from cluster.faults.points import Point
from cluster.membership.registry import request_drain
from tests.end_to_end.conftest import UnderOrders, run_under_orders
from tests.end_to_end.handover import NEW, PROCESS, assert_all_free, pid_of
from tests.end_to_end.registries import registry
from tests.harness.checkpoints import prompt_ids
from tests.harness.fault_orders import give_orders, read_injected
from tests.harness.schemas import schema_of, validate
from tests.harness.waiting import wait_for

WORDS = {"type": "array", "items": {"enum": ["alpha", "beta", 1, None]}, "minItems": 150, "maxItems": 150}
FEWER = {**WORDS, "minItems": 80, "maxItems": 80}


def answers(cluster: Any, schemas: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    found = []
    with Client(cluster.grpc) as client:
        for seed, schema in enumerate(schemas):
            answer = client.generate(
                prompt_ids(40 + seed, seed=seed),
                max_tokens=300,
                seed=seed,
                json_schema=schema,
                min_tokens=NEW,
            )
            assert answer.finish_reason == "stop"
            validate(answer.text, schema)
            found.append(answer.token_ids)
    return found


@pytest.mark.long
def test_answers_are_valid_wherever_they_are_computed(checkpoint, start_cluster):
    """Handed over, by one worker alone, and after the decode worker was killed: the same tokens."""
    model, schemas = checkpoint("llama"), [schema_of(seed) for seed in range(10)]
    cluster = start_cluster(model, *PROCESS, "--prefill", "2", "--decode", "2")
    handed_over = answers(cluster, schemas)
    prompt = prompt_ids(60, seed=9)
    options: dict[str, Any] = {"max_tokens": 900, "seed": 5, "json_schema": WORDS}
    with Client(cluster.grpc) as client:
        undisturbed = client.generate(prompt, **options)
        assert undisturbed.timings.kv_bytes_shipped > 0 and undisturbed.finish_reason == "stop"
        stream = client.stream(prompt, **options)
        chunks = [next(stream) for _ in range(5)]
        os.kill(pid_of(cluster, "decode", stream.worker_ids), signal.SIGKILL)
        chunks += list(stream)
        answer = stream.completion()
    assert answer.timings.attempts == 2
    assert answer.token_ids == undisturbed.token_ids
    validate(answer.text, WORDS)
    alone = start_cluster(model, *PROCESS, "--local-prefill", "always")
    assert answers(alone, schemas) == handed_over


def in_short_turns(pid: int) -> None:
    """Continue a stopped worker so that it reads what is wanted of it before its answer ends: it looks by the clock, some
    times a second, and the rest of the answer takes as long."""
    with contextlib.suppress(ProcessLookupError):  # it has left
        for _ in range(10):
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.2)
        os.kill(pid, signal.SIGCONT)


class Disturbed:
    """Answers that match FEWER, of a cluster whose workers leave while it computes them."""

    def __init__(self, running: UnderOrders):
        self.running, self.gone = running, list[str]()

    def _ready(self, worker: str) -> bool:
        return any(one["id"] == worker and one["state"] == "ready" for one in self.running.cluster.workers())

    def check(self, answer: Completion) -> Timings:
        assert answer.finish_reason == "stop" and answer.timings is not None
        validate(answer.text, FEWER)
        return answer.timings

    def order(self, point: Point, act: str, at: int = 1) -> None:
        """Of the next process that passes the point, once there are two workers of each role."""

        def enough() -> bool:
            workers = [w for w in self.running.cluster.workers() if w["id"] not in self.gone]
            roles = [w["role"] for w in workers if (w["state"], w["lease"]) == ("ready", "live")]
            return min(roles.count("prefill"), roles.count("decode")) >= 2

        wait_for(enough, 90.0, "two workers of each role")
        give_orders(self.running.orders, [Order(f"fault-{len(self.gone)}", point.value, act, at)])

    def injected(self) -> InjectedFault:
        """It is to leave, or has left: the process that has carried out the last order."""

        def found() -> InjectedFault | None:
            known = {one.id: one for one in read_injected(self.running.orders)}
            return known.get(f"fault-{len(self.gone)}")

        fault: InjectedFault = wait_for(found, 60.0, "the order was carried out")
        self.gone.append(fault.process)
        return fault

    def prefill_killed(self, client: Client, prompt: list[int], **options: Any) -> Completion:
        """Its first token has been sent; the hand-off is not committed."""
        self.order(Point.PREFILL_COMPUTED, "kill")
        answer = client.generate(prompt, **options)
        timings = self.check(answer)
        assert timings.attempts > 1 and timings.prefill_worker != self.injected().process
        return answer

    def prefill_drained(self, client: Client, prompt: list[int], **options: Any) -> Completion:
        """With its grant, before it has computed anything. It hands over what it has begun, or another one computes it."""
        self.order(Point.PREFILL_RESERVED, "stop")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.generate, prompt, **options)
            fault = self.injected()
            try:
                assert request_drain(*registry(self.running.cluster), fault.process)
            finally:
                in_short_turns(fault.pid)
            answer = running.result(90.0)
        self.check(answer)
        wait_for(lambda: not self._ready(fault.process), 30.0, "the prefill worker has left")
        return answer

    def decode_drained(self, client: Client, prompt: list[int], **options: Any) -> Completion:
        """In the middle of the answer, which another one continues: it is stopped until it is to leave."""
        self.order(Point.DECODE_TOKENS, "stop", at=100)
        stream = client.stream(prompt, **options)
        next(stream)
        fault = self.injected()
        try:
            assert request_drain(*registry(self.running.cluster), fault.process)
        finally:
            in_short_turns(fault.pid)
        for _ in stream:
            pass
        answer = stream.completion()
        timings = self.check(answer)
        assert timings.attempts > 1 and timings.decode_worker != fault.process
        return answer


@pytest.mark.long
def test_killed_and_drained_workers_change_no_answer(checkpoint, tmp_path_factory):
    """Greedy ones and drawn ones are valid, and to the last token those of an undisturbed run."""
    flags = (*PROCESS, "--prefill", "2", "--decode", "2")
    # At once, and the prompt's KV in several parts: with one, Finish could be sent before the signal works.
    environment = {"BATON_DRAIN_MIGRATE_SECONDS": "0", "BATON_TRANSFER__SLOT_BYTES": "65536"}
    model = checkpoint("llama")
    with run_under_orders(tmp_path_factory, "structured", model, *flags, **environment) as running:
        disturbed = Disturbed(running)
        for seed, temperature in enumerate((0.0, 1.0)):
            prompt = prompt_ids(300, seed=seed)
            options: dict[str, Any] = {"max_tokens": 700, "seed": 5, "json_schema": FEWER}
            options["temperature"] = temperature
            with Client(running.cluster.grpc) as client:
                disturbed_answers = [
                    disturbed.prefill_killed(client, prompt, **options),
                    disturbed.prefill_drained(client, prompt, **options),
                    disturbed.decode_drained(client, prompt, **options),
                ]
                undisturbed = client.generate(prompt, **options)
            assert disturbed.check(undisturbed).attempts == 1
            assert [one.token_ids for one in disturbed_answers] == [undisturbed.token_ids] * 3
        assert_all_free(running.cluster)
