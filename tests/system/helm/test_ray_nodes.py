"""Ray's nodes: probes where the operator would write its own, and how a node waits for the worker on it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness.waiting import wait_for
from tests.system.helm.rendering import Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
RAYLET = "/tmp/ray/session_latest/sockets/raylet"
HERE = "127.0.0.1"


def _container(renderer: Renderer, values: str, component: str, name: str) -> dict[str, Any]:
    (pod,) = [one for one in pods_of(renderer.render(VALUE_SETS[values])) if one.component == component]
    (found,) = [one for one in pod.spec["containers"] if one["name"] == name]
    return dict(found)


def _script(command: list[str], **told: str) -> str:
    """What runs in the container, with the test's places in place of the container's."""
    python, flag, text = command
    assert (python, flag) == ("python3", "-c")
    for place, other in told.items():
        text = text.replace(
            {"raylet": RAYLET, "proc": "/proc/"}.get(place, place.removeprefix("port")), other
        )
    return text


@contextmanager
def _running(script: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "POD_IP": HERE, **environment}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _exit_code(script: str) -> int:
    with _running(script) as process:
        return process.wait(timeout=60)


@contextmanager
def _answering(status: int) -> Iterator[int]:
    """A worker's probes port with one fixed answer."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/ready"
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer((HERE, 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _unused() -> int:
    with socket.create_server((HERE, 0)) as one:
        return int(one.getsockname()[1])


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        yield path


def test_the_operators_nodes_have_probes_of_ours(renderer: Renderer) -> None:
    """One that is missing the operator writes: by wget, which no image has."""
    for component, name in (("ray-head", "ray-head"), ("prefill", "worker"), ("decode", "worker")):
        container = _container(renderer, "kuberay", component, name)
        ports = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if "tcpSocket" in probe:
                assert probe["tcpSocket"]["port"] in ports
            elif "grpc" in probe:
                assert (component, kind) == ("ray-head", "livenessProbe")
                assert probe["grpc"]["port"] in {port["containerPort"] for port in container["ports"]}
                assert probe["timeoutSeconds"] >= 5  # of a busy head
            else:
                assert probe["exec"]["command"][0] == "python3"
                assert probe["timeoutSeconds"] >= 10  # an interpreter starts each time


@pytest.mark.parametrize(("values", "name"), [("kuberay", "ray-head"), ("multi-node", "head")])
def test_a_head_that_hangs_fails_its_liveness_probe(values: str, name: str, renderer: Renderer) -> None:
    """It still accepts connections, so a probe of the port alone would pass."""
    assert "grpc" in _container(renderer, values, "ray-head", name)["livenessProbe"]


@pytest.mark.parametrize("kind", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_node_without_a_raylet_fails_every_probe(kind: str, renderer: Renderer, tmp_path: Path) -> None:
    command = _container(renderer, "kuberay", "decode", "worker")[kind]["exec"]["command"]
    assert _exit_code(_script(command, raylet=str(tmp_path / "missing"))) != 0


@pytest.mark.parametrize("kind", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_node_that_waits_for_a_worker_is_up(kind: str, renderer: Renderer, raylet: str) -> None:
    command = _container(renderer, "kuberay", "decode", "worker")[kind]["exec"]["command"]
    assert _exit_code(_script(command, raylet=raylet, port9401=str(_unused()))) == 0


@pytest.mark.parametrize(("status", "ready"), [(200, True), (503, False)])
def test_a_node_with_a_worker_is_as_ready_as_that(
    status: int, ready: bool, renderer: Renderer, raylet: str
) -> None:
    command = _container(renderer, "kuberay", "decode", "worker")["readinessProbe"]["exec"]["command"]
    with _answering(status) as port:
        assert (_exit_code(_script(command, raylet=raylet, port9401=str(port))) == 0) is ready


def _pre_stop(renderer: Renderer, component: str) -> list[str]:
    command: list[str] = _container(renderer, "multi-node", component, "ray")["lifecycle"]["preStop"]["exec"][
        "command"
    ]
    return command


def test_a_wide_workers_node_stays_until_it_has_left(renderer: Renderer) -> None:
    command = _pre_stop(renderer, "decode")
    with ExitStack() as worker:
        port = worker.enter_context(_answering(200))
        with _running(_script(command, port9401=str(port))) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(timeout=3)
            worker.close()
            assert waiting.wait(timeout=30) == 0


def test_a_node_of_ranks_stays_until_they_have_left(renderer: Renderer, tmp_path: Path) -> None:
    for pid, title in ((7, b"ray::IDLE"), (8, b"ray::RankHost.run")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(title)
    leaving = tmp_path / "leaving"
    script = _script(_pre_stop(renderer, "decode-ranks"), proc=f"{tmp_path}/")
    with _running(script, BATON_LEAVING_FILE=str(leaving)) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=3)
        assert leaving.exists()  # which the ranks look for
        (tmp_path / "8" / "cmdline").unlink()
        assert waiting.wait(timeout=30) == 0


def test_a_node_waits_within_the_grace_period(renderer: Renderer) -> None:
    for component in ("prefill", "prefill-ranks", "decode", "decode-ranks"):
        assert "time.monotonic() + 145\n" in _pre_stop(renderer, component)[2]  # of 150 s


def test_nodes_beside_workers_of_one_pod_start_at_once(renderer: Renderer) -> None:
    """Such a worker does without Ray, which may go first."""
    assert "lifecycle" not in _container(renderer, "ray beside workers", "decode", "ray")


@pytest.mark.parametrize("values", ["cpu-demo", "several models", "no ray", "no ray, autoscaled"])
def test_workers_of_one_pod_bring_nothing_of_ray(values: str, renderer: Renderer) -> None:
    """No head, no node beside a worker, no port, no secret and no variable of it, in the default mode as in none."""
    rendered = renderer.render(VALUE_SETS[values])
    assert {one.component.split("-")[0] for one in pods_of(rendered)} >= {"router", "prefill", "decode"}
    named = [line for line in rendered.text.splitlines() if re.search(r"\bray\b|\bRAY_|ray-", line)]
    assert named == []
    workers = [one for one in pods_of(rendered) if one.component.startswith(("prefill", "decode"))]
    assert all([one["name"] for one in pod.spec["containers"]] == ["worker"] for pod in workers)


def test_redis_restarts_with_rays_user_and_without_fault_tolerance_never(renderer: Renderer) -> None:
    """As the upgrade notes say: where both pools become groups, Ray's head and its user of Redis go."""
    wide = {"gpus": 1, "nodes": 2, "tensorParallel": 2}
    pools = {"prefill": wide, "decode": wide}

    def redis(by: str, *, kept: bool) -> object:
        values = {**pools, "multiNode": {"by": by}, "ray": {"gcsFaultTolerance": {"enabled": kept}}}
        rendered = renderer.render(ValueSet(values=values, apis=("leaderworkerset.x-k8s.io/v1",)))
        return rendered.named("StatefulSet", "t-baton-redis")["spec"]["template"]

    assert redis("ray", kept=True) != redis("leaderWorkerSet", kept=True)
    assert (
        redis("ray", kept=False)
        == redis("leaderWorkerSet", kept=False)
        == redis("leaderWorkerSet", kept=True)
    )


FIRST = (
    ("multi-node", "decode", "ray"),
    ("multi-node", "decode-ranks", "ray"),
    ("leader worker set", "decode", "ray"),
)


def _first(renderer: Renderer, command: list[str]) -> list[str]:
    """What is the first process of a container, without the command that it runs."""
    python, bare, flag, script, *rest = command
    assert (python, bare, flag) == ("python3", "-IS", "-c") and rest[-1].startswith("--")
    return [sys.executable, "-m", "tests.system.own_processes", sys.executable, bare, flag, script]


@pytest.mark.parametrize(("values", "component", "name"), FIRST)
def test_a_node_that_is_not_connected_ends_by_sigterm(
    renderer: Renderer, values: str, component: str, name: str, tmp_path: Path
) -> None:
    """The kernel gives a container's first process only signals that it handles, and `ray start` handles none at first."""
    first = _first(renderer, _container(renderer, values, component, name)["command"])
    started = tmp_path / "started"
    with subprocess.Popen([*first, "sh", "-c", f"touch {started}; exec sleep 60"]) as process:
        try:
            wait_for(started.exists, 20, "it runs")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_a_node_ends_as_ray_does_and_keeps_no_zombies(renderer: Renderer, tmp_path: Path) -> None:
    first = _first(renderer, _container(renderer, "multi-node", "decode", "ray")["command"])
    # An orphan that ends before its first process does; then what is left of it is counted.
    script = "(sleep 0.1 &) ; sleep 1; grep -l '^State:.Z' /proc/[0-9]*/status; exit 7"
    done = subprocess.run([*first, "sh", "-c", script], capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (7, b"")
