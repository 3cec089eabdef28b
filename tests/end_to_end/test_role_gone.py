"""Every worker of a role dies and no other is started: how requests end, and what is still computed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from baton.client import Client
from cluster.errors import UnavailableError
from cluster.faults.orders import Order
from tests.end_to_end.conftest import UnderOrders, run_under_orders
from tests.end_to_end.handover import PROCESS, assert_all_free, assert_reference
from tests.harness.checkpoints import prompt_ids
from tests.harness.cluster import Cluster
from tests.harness.ended import gone
from tests.harness.fault_orders import give_orders, read_injected
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long

ADMISSION_SECONDS = 3.0
SLACK_SECONDS = 15.0  # of a busy machine
PAGE = 16
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnderOrders]:
    """Every test leaves as many workers as it found."""
    # A request waits as long as its first token may take, where that is longer.
    patience = ("--admission-seconds", str(ADMISSION_SECONDS), "--ttft-target-seconds-normal", "0")
    flags = (*PROCESS, "--decode", "2", *patience)
    with run_under_orders(tmp_path_factory, "gone", checkpoint("llama"), *flags) as started:
        yield started


@contextlib.contextmanager
def nobody_restarts(cluster: Cluster) -> Iterator[None]:
    """What dies is started again when it is over."""
    os.kill(cluster.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(cluster.process.pid, signal.SIGCONT)
        wait_for(lambda: len(live(cluster)) == 3, 90.0, "all are there again")


def live(cluster: Cluster, role: str = "") -> list[dict[str, Any]]:
    """The registry keeps a dead worker's last words for a while."""
    there = [w for w in cluster.workers() if (w["state"], w["lease"]) == ("ready", "live")]
    return [w for w in there if role in ("", w["role"]) and not gone(int(w["status"]["pid"]))]


def kill_all(cluster: Cluster, role: str) -> None:
    wait_for(lambda: len(live(cluster)) == 3, 60.0, "none of them is only suspected")
    for pid in [int(worker["status"]["pid"]) for worker in live(cluster, role)]:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: gone(pid), 60.0, "killed")


def test_without_decode_workers_requests_wait_and_get_a_retry_time(running: UnderOrders) -> None:
    cluster, prompt = running.cluster, prompt_ids(40, seed=51)
    body = {"model": running.model.name, "prompt": prompt, "max_tokens": 4}
    with Client(cluster.grpc) as client:
        with nobody_restarts(cluster):
            kill_all(cluster, "decode")
            began = time.monotonic()
            with pytest.raises(UnavailableError) as refused:
                client.generate(prompt, max_tokens=4, **OPTIONS)
            waited = time.monotonic() - began
            assert refused.value.retry_after_seconds > 0
            assert ADMISSION_SECONDS - 1.0 < waited < ADMISSION_SECONDS + SLACK_SECONDS
            with httpx.Client(base_url=cluster.http, timeout=60) as http:
                answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        served = client.generate(prompt, max_tokens=4, **OPTIONS)
    assert_reference(running.model, prompt, served.token_ids)
    assert served.timings is not None
    assert served.timings.kv_bytes_shipped > 0
    assert_all_free(cluster)


def test_without_prefill_workers_decode_workers_prefill(running: UnderOrders) -> None:
    cluster, prompt = running.cluster, prompt_ids(150, seed=52)
    with Client(cluster.grpc) as client, nobody_restarts(cluster):
        kill_all(cluster, "prefill")
        answers = [client.generate(prompt, max_tokens=24, **OPTIONS) for _ in range(2)]
    for answer in answers:
        assert_reference(running.model, prompt, answer.token_ids)
        assert answer.timings is not None
        assert answer.timings.kv_bytes_shipped == 0
        assert answer.timings.prefill_worker in ("", answer.timings.decode_worker)
    assert_all_free(cluster)


def test_after_a_decode_workers_death_only_what_is_new_is_prefilled(running: UnderOrders) -> None:
    """The prefill worker's prefix cache holds the rest: all full blocks of the prompt."""
    cluster, prompt, died_at, new = running.cluster, prompt_ids(200, seed=53), 40, 90

    def computed() -> int:
        (worker,) = live(cluster, "prefill")
        return int(worker["status"]["prompt_tokens_computed"])

    wait_for(lambda: len(live(cluster)) == 3, 60.0, "all are there")
    before = computed()
    order = Order("kill", "decode.tokens", "kill", at=died_at)
    give_orders(running.orders, [order])
    with Client(cluster.grpc) as client, nobody_restarts(cluster):
        answer = client.generate(prompt, max_tokens=new, **OPTIONS)
        assert [injected.id for injected in read_injected(running.orders)] == [order.id]
        assert_reference(running.model, prompt, answer.token_ids)
        assert answer.timings is not None
        assert answer.timings.attempts == 2
        wait_for(lambda: computed() - before > len(prompt), 60.0, "a status of both attempts")
        again = computed() - before - len(prompt)
    # At most so many tokens had been sent when it died, and the prompt's last block is never whole in the cache.
    assert again <= died_at + PAGE
    assert_all_free(cluster)
