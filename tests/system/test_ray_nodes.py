"""Ray over two nodes: workers on both, one over both, a node lost under load, and a head that hangs.

The tests of this file use one cluster and go on from each other, in their order.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import Client
from tests.conftest import Checkpoint
from tests.end_to_end.ray_processes import NEW, Streams
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import judge
from tests.harness.waiting import wait_for
from tests.system.ray_nodes import RayNodes, run_ray_nodes

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def nodes(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    began = time.monotonic()
    with run_ray_nodes(checkpoint("llama"), tmp_path_factory.mktemp("ray-nodes")) as running:
        print(f"Ray on two nodes after {time.monotonic() - began:.1f} s")
        yield running


def test_ranks_on_two_nodes_generate_the_references_tokens(nodes: RayNodes) -> None:
    wide = nodes.start_wide("wide")
    wait_for(lambda: wide.poll() is not None or nodes.workers(), 120, f"it registers: {nodes.log('wide')}")
    assert nodes.pids("two", "ray::RankHost")
    with Client(nodes.grpc) as client:
        for seed in range(3):
            prompt = prompt_ids(70, seed=seed)
            answer = client.generate(prompt, max_tokens=64, temperature=0, ignore_eos=True)
            assert answer.timings is not None and answer.timings.decode_worker == "wide"
            assert not judge(nodes.model, prompt, list(answer.token_ids)).wrong


def test_pools_have_workers_on_both_nodes(nodes: RayNodes) -> None:
    pools = nodes.start_pools()
    wait_for(lambda: pools.poll() is not None or len(nodes.workers()) == 4, 120, "three workers of the pools")
    assert len(nodes.on("one")) == 3 and len(nodes.on("two")) == 1
