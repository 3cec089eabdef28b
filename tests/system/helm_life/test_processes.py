"""The chart on pods that are real processes: it is installed, tested, upgraded under load, damaged, and removed.

One release for the whole file, in this order. Ray's head and its nodes beside the workers are there until the upgrade.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import Client
from tests.docs.pages import ON_PODS, blocks
from tests.kubernetes.controllers import pods
from tests.kubernetes.kubelet.cluster import process_cluster
from tests.kubernetes.kubelet.image import ROOT
from tests.system.helm_life.helm import NAMESPACE
from tests.system.helm_life.release import MIN_IN_FLIGHT, MODEL, Release, confinement, installed

pytestmark = [pytest.mark.system, pytest.mark.timeout(300), pytest.mark.usefixtures("explain")]

# Redis has no user for Ray, and so does not restart where Ray goes.
WITH_RAY = ("--set", "ray.joinWorkers=true,ray.gcsFaultTolerance.enabled=false")
# Everything rolls but Redis. Ray goes, which the workers do not need: it gives a node 30 s to start, whatever else a small
# machine has to do.
CHANGES = "image.tag=next,ray.joinWorkers=false"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with installed(tmp_path_factory.mktemp("cluster"), process_cluster, *WITH_RAY) as running:
        yield running


def test_install_waits_until_real_processes_serve(release: Release) -> None:
    assert len(release.pods()) == 7
    assert all(pods.is_ready(pod) for pod in release.pods())
    assert sorted(worker["role"] for worker in release.workers()) == ["decode", "decode", "prefill"]
    with Client(release.grpc) as client:
        assert client.generate("def read_lines(path):", max_tokens=8, temperature=0).text


def test_processes_run_as_the_chart_declares(release: Release) -> None:
    """Not as root, with nothing to write to but volumes, and no way to more rights."""
    for container in ("worker", "ray"):
        said = confinement(release.cluster.kubelet.process("one-baton-decode-0", NAMESPACE, container))
        assert set(said["Uid"].split()) == {"10001"}
        assert said["NoNewPrivs"] == "1"
        assert int(said["CapBnd"], 16) == 0
        assert "ro" in said["root"].split(",")


def test_helm_test_generates_tokens_through_them(release: Release) -> None:
    said = release.helm.test(seconds=120)
    assert said.count("Phase:          Succeeded") >= 5
    assert "Failed" not in said


def test_blocks_of_the_page_reach_its_pods(release: Release, tmp_path: Path) -> None:
    """As they are written, with the Service's address for the forwarded one."""
    (block,) = [one for one in blocks() if one.marker == ON_PODS]
    baton = tmp_path / "baton"
    baton.write_text(f'#!/bin/sh\nexec {sys.executable} -m baton "$@"\n')
    baton.chmod(0o755)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text.replace("127.0.0.1", release.service_address)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"object":"list"' in done.stdout and '"text":' in done.stdout and "decode" in done.stdout


async def test_an_upgrade_under_load_loses_nothing(release: Release) -> None:
    old = frozenset(pod["metadata"]["uid"] for pod in release.pods())
    outcome, in_flight = await release.upgrade_under_load("--set", CHANGES)
    print(f"{in_flight} requests in {release.seconds['upgrade']:.0f} s, {outcome.reconnects} reconnects")
    assert outcome.failures == []
    assert in_flight >= MIN_IN_FLIGHT
    assert outcome.wrong(MODEL) == []
    assert release.components(old) == {"router", "prefill", "decode"}
    assert release.components() == {"router", "prefill", "decode", "redis"}


async def test_a_killed_decode_pod_recovers_and_its_streams_go_on(release: Release) -> None:
    name = "one-baton-decode-0"

    def kill() -> None:
        os.kill(release.cluster.kubelet.process(name, NAMESPACE, "worker"), signal.SIGKILL)

    outcome = await release.recovery_under_load(name, kill)
    assert outcome.failures == []
    assert outcome.wrong(MODEL) == []


def test_uninstall_leaves_nothing(release: Release) -> None:
    release.uninstall()
