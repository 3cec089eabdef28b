"""A tensor-parallel worker is lost with any of its ranks, within the bounds for a worker, and is replaced or rejoins."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from baton.client import Client
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import assert_all_free
from tests.harness.bounds import KILL_SECONDS, STOP_SECONDS, allowed
from tests.harness.checkpoints import prompt_ids
from tests.harness.cluster import Cluster
from tests.harness.exactness import judge
from tests.harness.rank_processes import rank_pids
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long

FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "16MiB")
COUNTS = ("--prefill", "2", "--decode", "2", "--prefill-tp", "2", "--decode-tp", "2")
STALL_SECONDS = 20.0  # silence of a rank after which its worker ends: longer than a busy machine takes to see a lease lost
HELD_SECONDS = 7.0  # length of a stop: longer than it takes to be lost
NEW = 400
SUSPECT_SECONDS = 2.0  # of silence: a shorter one would not show that the stop met a stream
STREAMS = 2


@pytest.fixture(scope="module")
def cluster(checkpoint, tmp_path_factory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_STEP_STALL_SECONDS", str(STALL_SECONDS))
        with run_cluster(tmp_path_factory.mktemp("ranks"), checkpoint("llama"), *FLAGS, *COUNTS) as running:
            yield running


@dataclass
class Load:
    """Clients that send one request after the other, and how long each went without a token."""

    grpc: str
    silences: list[tuple[float, float]] = field(default_factory=list)  # (from, to)
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    asked: int = 0
    # Client → workers of its running stream
    through: dict[int, tuple[str, ...]] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        with Client(self.grpc) as client:
            while not self.ended.is_set():
                self.asked += 1
                prompt = prompt_ids(100, seed=1000 * number + self.asked)
                heard = time.monotonic()
                stream = client.stream(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
                for _ in stream:
                    self.through[number] = stream.worker_ids
                    now = time.monotonic()
                    self.silences.append((heard, now))
                    heard = now
                self.through[number] = ()
                self.answers.append((prompt, list(stream.completion().token_ids)))

    def longest_silence(self, since: float) -> float:
        return max(end - begin for begin, end in self.silences if end >= since)


@contextlib.contextmanager
def load(cluster: Cluster, model: Path) -> Iterator[Load]:
    """Run clients; at the end check every token and that nothing is still held."""
    running = Load(cluster.grpc)
    threads = [threading.Thread(target=running.run, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(running.answers) >= STREAMS, 60.0, "answers come")
        yield running
    finally:
        running.ended.set()
        for thread in threads:
            thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    for prompt, tokens in running.answers:
        assert len(tokens) == NEW
        assert not judge(model, prompt, tokens).wrong


def whole(cluster: Cluster) -> list[dict]:
    """The workers, once two of each role are there."""

    def there() -> list[dict]:
        live = [one for one in cluster.workers() if one["lease"] == "live"]
        pids = [one["status"]["pid"] for one in live]
        good = len(live) == 4 and all(psutil.pid_exists(pid) and rank_pids(pid) for pid in pids)
        return live if good else []

    return wait_for(there, 90.0, "two workers of each role, with their ranks")


def victim(cluster: Cluster, running: Load, role: str) -> tuple[dict, int]:
    """A worker that serves a stream now, and the pid of its rank."""
    workers = {one["id"]: one for one in whole(cluster) if one["role"] == role}

    def busy() -> dict | None:
        through = {worker for stream in running.through.values() for worker in stream}
        return next((worker for name, worker in workers.items() if name in through), None)

    worker = wait_for(busy, 60.0, f"a stream goes through a {role} worker")
    (rank,) = rank_pids(worker["status"]["pid"])
    return worker, rank


def is_live(cluster: Cluster, worker: dict) -> bool:
    return any(one["id"] == worker["id"] and one["lease"] == "live" for one in cluster.workers())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_rank_costs_a_pause_and_its_worker_is_replaced(role, checkpoint, cluster):
    with load(cluster, checkpoint("llama")) as running:
        worker, rank = victim(cluster, running, role)
        injected = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(worker["status"]["pid"]), 30.0, "its worker has ended")
    # The streams have ended, so that what starts again has the processors: beside them it takes half a minute longer.
    assert worker["id"] not in [one["id"] for one in whole(cluster)]
    assert running.longest_silence(injected) <= allowed(KILL_SECONDS)
    assert_all_free(cluster)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_stopped_rank_costs_no_more_than_a_stopped_worker_and_wakes_under_a_new_epoch(
    role, checkpoint, cluster
):
    with load(cluster, checkpoint("llama")) as running:
        worker, rank = victim(cluster, running, role)
        injected = time.monotonic()
        os.kill(rank, signal.SIGSTOP)
        try:
            wait_for(lambda: not is_live(cluster, worker), 30.0, "its lease runs out")
            time.sleep(max(0.0, injected + HELD_SECONDS - time.monotonic()))  # the fault itself
        finally:
            os.kill(rank, signal.SIGCONT)

        def rejoined() -> bool:
            now = [one for one in cluster.workers() if one["id"] == worker["id"] and one["lease"] == "live"]
            return bool(now) and now[0]["epoch"] != worker["epoch"]

        wait_for(rejoined, 30.0, "a new epoch")
    silence = running.longest_silence(injected)
    assert silence <= allowed(STOP_SECONDS)
    assert role == "prefill" or silence > SUSPECT_SECONDS, "the stop met no stream"
    assert_all_free(cluster)


def test_a_rank_that_is_stopped_while_nothing_runs_is_noticed_and_its_worker_is_replaced_in_the_end(
    checkpoint, cluster
):
    worker = next(one for one in whole(cluster) if one["role"] == "decode")
    pid = worker["status"]["pid"]
    (rank,) = rank_pids(pid)
    os.kill(rank, signal.SIGSTOP)
    try:
        wait_for(lambda: not is_live(cluster, worker), allowed(STOP_SECONDS), "nothing new is placed on it")
        with Client(cluster.grpc) as client:
            prompt = prompt_ids(100, seed=77)
            began = time.monotonic()
            stream = client.stream(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
            next(stream)
            assert time.monotonic() - began < allowed(
                KILL_SECONDS
            )  # of its tokens, a busy machine makes few a second
            for _ in stream:
                pass
            answer = stream.completion()
            assert answer.timings.attempts == 1
        assert not judge(checkpoint("llama"), prompt, list(answer.token_ids)).wrong
        wait_for(lambda: not psutil.pid_exists(pid), STALL_SECONDS + 30.0, "its worker has ended")
        assert not psutil.pid_exists(rank)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGCONT)
    assert worker["id"] not in [one["id"] for one in whole(cluster)]
    assert_all_free(cluster)
