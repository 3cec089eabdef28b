"""Ray over two nodes: workers on both, one over both, a node lost under load and back again, a head that hangs or is lost.

The tests of this file use one cluster, in their order. Each can also run alone.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial

import pytest

from baton.client import Client
from baton.doctor.ray_check import check_ray_head
from tests.conftest import Checkpoint
from tests.end_to_end.ray_processes import Streams
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import judge
from tests.harness.waiting import wait_for
from tests.system.ray_nodes import RayNodes, run_ray_nodes

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    began = time.monotonic()
    with run_ray_nodes(checkpoint("llama"), tmp_path_factory.mktemp("ray-nodes")) as running:
        print(f"Ray on two nodes after {time.monotonic() - began:.1f} s")
        yield running


@pytest.fixture(scope="module")
def wide(nodes: RayNodes) -> subprocess.Popen[bytes]:
    """A decode worker with a rank on each node."""
    started = nodes.start_wide("wide")
    wait_for(
        lambda: started.poll() is not None or "wide" in {one["id"] for one in nodes.workers()},
        240,
        f"it registers: {nodes.log('wide')}",
    )
    return started


@pytest.fixture(scope="module")
def pools(nodes: RayNodes) -> subprocess.Popen[bytes]:
    """`baton pools`: a prefill worker and two decode workers. Beside a rank of `wide` a node has one CPU left."""
    before = len(nodes.workers())
    started = nodes.start_pools()
    wait_for(lambda: started.poll() is not None or len(nodes.workers()) == before + 3, 240, "three workers")
    return started


@pytest.mark.usefixtures("wide")
def test_ranks_on_two_nodes_generate_the_references_tokens(nodes: RayNodes) -> None:
    assert nodes.pids("two", "ray::RankHost")
    with Client(nodes.grpc) as client:
        for seed in range(3):
            prompt = prompt_ids(70, seed=seed)
            answer = client.generate(prompt, max_tokens=64, temperature=0, ignore_eos=True)
            assert answer.timings is not None and answer.timings.decode_worker == "wide"
            assert not judge(nodes.model, prompt, list(answer.token_ids)).wrong


@pytest.mark.usefixtures("wide", "pools")
def test_pools_have_workers_on_both_nodes(nodes: RayNodes) -> None:
    assert len(nodes.on("one")) == 3 and len(nodes.on("two")) == 1


@pytest.mark.usefixtures("wide", "pools")
def test_a_lost_node_costs_no_request(nodes: RayNodes, wide: subprocess.Popen[bytes]) -> None:
    """Among the lost are a rank of a worker over both nodes, whose leader then ends, and a worker of the pools."""
    before = {one["id"] for one in nodes.workers()}
    lost = {one["id"] for one in nodes.on("two")}
    streams = Streams(nodes, threads=4)
    wait_for(lambda: streams.problems or _busy(nodes) & (lost | {"wide"}), 60, "a lost one has streams")
    killed = time.monotonic()
    nodes.kill("two")
    assert wide.wait(60) == 1
    print(f"the worker over both nodes ended {time.monotonic() - killed:.1f} s after its rank's node")
    wait_for(
        lambda: {one["id"] for one in nodes.workers()} == before - lost - {"wide"}, 30, "its workers are gone"
    )
    streams.wait_for_more(3)
    streams.stop(nodes.model)
    print(f"longest silence of {len(streams.answers)} streams: {streams.longest_silence_seconds:.1f} s")
    assert "rank 1" in nodes.log("wide").read_text()


@pytest.mark.usefixtures("pools")
def test_a_node_that_comes_back_gets_its_worker_again(nodes: RayNodes) -> None:
    """Without a word to `baton pools`: Serve has waited for room."""
    nodes.kill("two")
    wait_for(lambda: not nodes.on("two"), 30, "its workers are gone")
    began = time.monotonic()
    nodes.start_ray("two")
    nodes.wait_ray("two")
    print(f"the node is back in Ray after {time.monotonic() - began:.1f} s")
    wait_for(lambda: len(nodes.on("two")) == 1, 240, f"Serve starts a worker there: {nodes.told()}")
    print(f"its worker is back after {time.monotonic() - began:.1f} s")
    (back,) = nodes.on("two")
    with Client(nodes.grpc) as client:
        seeds = itertools.count(100)  # no worker has a prefix of these prompts
        wait_for(lambda: back["id"] in _workers_of(client, next(seeds)), 60, f"it serves: {back}")


@pytest.mark.usefixtures("pools")
def test_a_head_that_hangs_is_named_and_costs_no_request(nodes: RayNodes) -> None:
    before = {one["id"] for one in nodes.workers()}
    (gcs,) = nodes.pids("one", "gcs_server")
    streams = Streams(nodes)
    os.kill(gcs, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        started = {"wide-2": nodes.start_wide("wide-2"), "pools-2": nodes.start_pools("pools-2", decode=3)}
        _wait_until_named(nodes, stopped, nodes.head)
        wait_for(
            lambda: f"Ray's head at {nodes.head}" in nodes.log("pools").read_text(), 10, "baton pools logs it"
        )
        for name, process in started.items():
            assert process.wait(120) == 1
            assert f"Ray's head at {nodes.head} has not responded" in nodes.log(name).read_text()
        print(f"both starts ended {time.monotonic() - stopped:.1f} s after the stop")
        streams.wait_for_more(2)
    finally:
        os.kill(gcs, signal.SIGCONT)
    wait_for(lambda: nodes.head not in nodes.baton_status(), 30, "the head responds again")
    streams.stop(nodes.model)
    assert {one["id"] for one in nodes.workers()} == before
    assert check_ray_head(nodes.head).grade == "ok"


def test_pools_end_although_the_head_hangs(nodes: RayNodes, pools: subprocess.Popen[bytes]) -> None:
    """Their workers stay: they are not Ray's."""
    before = {one["id"] for one in nodes.workers()}
    (gcs,) = nodes.pids("one", "gcs_server")
    os.kill(gcs, signal.SIGSTOP)
    pools.terminate()  # before it is known: the end is given up after 15 s
    assert pools.wait(60) == 1
    assert f"Ray's head at {nodes.head} has not responded" in nodes.log("pools").read_text().splitlines()[-1]
    assert {one["id"] for one in nodes.workers()} == before


@pytest.mark.usefixtures("pools")
def test_a_head_that_is_lost_is_named_and_costs_no_request(nodes: RayNodes) -> None:
    """Its process is killed, and with it ends all of Ray on its machine. Workers are not Ray's."""
    before = {one["id"] for one in nodes.workers()}
    (gcs,) = nodes.pids("one", "gcs_server")
    # One that the test before has stopped is not resumed: it would carry out the end of the pools that was asked for.
    streams = Streams(nodes)
    os.kill(gcs, signal.SIGKILL)
    killed = time.monotonic()
    _wait_until_named(nodes, killed, f"nothing listens at {nodes.head}")
    wait_for(lambda: not nodes.pids("one", "raylet"), 60, "Ray on its machine has ended")
    streams.wait_for_more(3)
    streams.stop(nodes.model)
    assert {one["id"] for one in nodes.workers()} == before


def _wait_until_named(nodes: RayNodes, since: float, found: str) -> None:
    """Until status and all readiness probes name the head; doctor's line then has `found` in it."""
    wait_for(lambda: nodes.head in nodes.baton_status(), 30, "baton status names the head")
    print(f"baton status says so after {time.monotonic() - since:.1f} s")
    for worker in nodes.workers():
        wait_for(partial(_warns, nodes, worker["metrics"], nodes.head), 30, f"{worker['id']} warns")
    at_router = nodes.http.removeprefix("http://")
    wait_for(partial(_warns, nodes, at_router, "Ray's head has not responded"), 30, "the router warns")
    assert nodes.head not in str(nodes.ready(at_router))  # this endpoint needs no key
    doctored = check_ray_head(nodes.head)
    assert doctored.grade == "missing" and found in doctored.found


def _warns(nodes: RayNodes, address: str, of: str) -> bool:
    """Whether the readiness probe there warns of it; the process is ready all the same."""
    answer = nodes.ready(address)
    assert answer["ready"]
    return of in " ".join(answer.get("warnings", []))


def _workers_of(client: Client, seed: int) -> tuple[str, str]:
    """The two of an answer."""
    answer = client.generate(prompt_ids(70, seed=seed), max_tokens=8, temperature=0, ignore_eos=True)
    assert answer.timings is not None
    return answer.timings.prefill_worker, answer.timings.decode_worker


def _busy(nodes: RayNodes) -> set[str]:
    return {one["id"] for one in nodes.workers() if one["status"]["running"]}
