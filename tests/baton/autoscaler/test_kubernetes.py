"""The autoscaler against Kubernetes' API and a real Redis: its patches, and the conditions under which it makes none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.autoscaler.autoscaler import Autoscaler, FurtherModel
from baton.autoscaler.leader import Leadership
from baton.autoscaler.platforms.base import PlatformPool
from baton.autoscaler.platforms.kubernetes import StatefulSets, connect, own_namespace
from baton.cli.autoscale import AutoscaleConfig
from cluster.config.worker import Role
from cluster.errors import SetupError, UnavailableError
from tests.baton.autoscaler.kubernetes_rig import (
    CONFIG,
    NAMES,
    RUNS,
    Rig,
    starting_pod,
    unschedulable_pod,
)
from tests.baton.autoscaler.registered import RegisteredWorker, decode_status, prefill_status
from tests.harness.waiting import wait_for
from tests.kubernetes.api.server import ApiServer


class Sets:
    """A platform with a target for each role."""

    def __init__(self) -> None:
        self.targets: dict[Role, int] = {"prefill": 1, "decode": 1}

    def read(self, role: Role) -> PlatformPool:
        return PlatformPool(self.targets[role])

    def scale(self, role: Role, replicas: int, seen: PlatformPool) -> None:
        self.targets[role] = replicas

    def close(self) -> None:
        pass


def test_each_model_grows_by_its_own_load_and_objectives_within_one_budget(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="baton.autoscaler")
    first, second = Sets(), Sets()
    config, now = CONFIG.model_copy(update={"gpu_budget": 6}), 1000.0
    further = FurtherModel("second", config.model_copy(update={"ttft_objective_seconds": 1.0}), second)
    scaler = Autoscaler(
        *(config, redis_url, namespace, first, CollectorRegistry(), lambda: now),
        model="first",
        further=[further],
    )
    quiet = RegisteredWorker(redis_url, namespace, "prefill", "p0")  # one that names no model
    busy = RegisteredWorker(redis_url, namespace, "prefill", "p1", model="second")
    decoders = [RegisteredWorker(redis_url, namespace, "decode", f"d{i}", ("", "second")[i]) for i in (0, 1)]
    gone = RegisteredWorker(redis_url, namespace, "prefill", "p2", model="removed")
    for _ in range(12):
        now += config.interval_seconds
        quiet.publish(**prefill_status(now - 1000.0, 0.05))
        gone.publish(**prefill_status(now - 1000.0, 9.0))
        busy.publish(**prefill_status(now - 1000.0, 9.0))
        for one in decoders:
            one.publish(**decode_status(now - 1000.0, 4.0))
        scaler.step()
    assert first.targets == {"prefill": 1, "decode": 1}
    assert second.targets == {"prefill": 3, "decode": 1}, "as the budget allows"
    assert any("model=second pool=prefill from=1 to=2" in line for line in caplog.messages)
    assert scaler.metrics._asked._value.get() == 6
    assert scaler.metrics._current.labels("first", "prefill")._value.get() == 1, "without the removed model's"


def test_no_two_pools_are_one_stateful_set() -> None:
    small = {"name": "small", "stateful_sets": {"prefill": "small-prefill"}}
    with pytest.raises(ValueError, match="stateful_sets: baton-decode is two pools'"):
        AutoscaleConfig.model_validate({"served_model_name": "large", "models": [small], "gpu_budget": 4})


def test_what_an_entry_leaves_out_is_as_for_the_first_model() -> None:
    """A replica of eight GPUs counted as one of the budget."""
    small = {
        "name": "small",
        "stateful_sets": {"prefill": "p", "decode": "d"},
        "prefill": {"max_replicas": 3},
    }
    first: dict[str, Any] = {
        "prefill": {"gpus_per_replica": 2},
        "decode": {"gpus_per_replica": 4, "min_replicas": 2},
    }
    given: dict[str, Any] = {
        "served_model_name": "large",
        "models": [small],
        **first,
        "ttft_objective_seconds": 7.0,
    }
    config = AutoscaleConfig.model_validate({**given, "gpu_budget": 20})
    made = config.of_model(config.models[0])
    assert (made.prefill.gpus_per_replica, made.prefill.max_replicas, made.prefill.min_replicas) == (2, 3, 1)
    assert (made.decode, made.ttft_objective_seconds) == (config.decode, 7.0)
    with pytest.raises(ValueError, match="gpu_budget is 19, and the smallest pools of all models need 20"):
        AutoscaleConfig.model_validate({**given, "gpu_budget": 19})


def test_load_grows_the_stateful_set_and_logs_the_reason(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="baton.autoscaler")
    for _ in range(8):
        rig.step(requests_per_second=3.0)
    assert rig.replicas("prefill") >= 2
    assert rig.replicas("decode") == 1
    line = next(one for one in caplog.messages if "pool=prefill from=1 to=2" in one)
    assert re.search(r"ready=1 needed=\d+\.\d+ reason=prefill_load tokens_per_second=[\d.]+", line)
    assert rig.metric("desired_replicas", model="", pool="prefill") == rig.replicas("prefill")
    assert rig.metric("current_replicas", model="", pool="prefill") == 1
    assert rig.metric("decisions_total", model="", pool="prefill", reason="prefill_load") >= 1
    assert rig.metric("changes_total", model="", pool="prefill", direction="up") >= 1
    assert rig.metric("leader") == 1


def test_a_steady_cluster_is_not_changed(rig: Rig) -> None:
    before = [
        rig.server.object("StatefulSet", name)["metadata"]["resourceVersion"] for name in NAMES.values()
    ]
    for _ in range(30):
        rig.step()
    after = [rig.server.object("StatefulSet", name)["metadata"]["resourceVersion"] for name in NAMES.values()]
    assert after == before
    assert rig.metric("decisions_total", model="", pool="decode", reason="steady") > 10


def test_a_size_set_by_hand_is_changed_slowly(rig: Rig) -> None:
    rig.step()
    for role in NAMES:
        rig.set_by_hand(role, 3)
    for _ in range(20):
        rig.step()
    assert (rig.replicas("prefill"), rig.replicas("decode")) == (3, 3)


def test_replicas_that_fit_nowhere_are_given_back(rig: Rig) -> None:
    for _ in range(8):
        rig.step(requests_per_second=3.0)
    asked = rig.replicas("prefill")
    assert asked >= 2
    for ordinal in range(1, asked):
        rig.server.create(unschedulable_pod(f"b-prefill-{ordinal}"))
    assert rig.platform.read("prefill").unschedulable == asked - 1
    for _ in range(12):
        rig.step(requests_per_second=3.0)
    assert rig.replicas("prefill") == 1
    assert rig.metric("decisions_total", model="", pool="prefill", reason="unschedulable") >= 1


def test_replicas_that_load_are_waited_for(rig: Rig) -> None:
    asked, pods = 1, 1
    for _ in range(70):  # more than ten minutes: start-up is said to take 30 s
        rig.step(requests_per_second=3.0)
        assert rig.replicas("prefill") >= asked, "nothing that loads is given back"
        asked = rig.replicas("prefill")
        for ordinal in range(pods, asked):
            rig.server.create(starting_pod(f"b-prefill-{ordinal}"))
        pods = asked
    assert asked >= 2
    assert rig.metric("decisions_total", model="", pool="prefill", reason="unschedulable") == 0


WAITS = {"waiting": {"reason": "ContainerCreating"}}


@pytest.mark.parametrize(
    ("changes", "starting"),
    [
        ({}, 1),
        ({"phase": "Pending", "containerStatuses": [("worker", WAITS, 0)]}, 1),
        ({"phase": "Pending", "initContainerStatuses": [("fetch", RUNS, 0)]}, 1),
        ({"containerStatuses": [("worker", RUNS, 1)]}, 0),
        ({"containerStatuses": [("worker", {"waiting": {"reason": "CrashLoopBackOff"}}, 0)]}, 0),
        (
            {
                "phase": "Pending",
                "containerStatuses": [("worker", {"waiting": {"reason": "ErrImagePull"}}, 0)],
            },
            0,
        ),
        ({"phase": "Failed"}, 0),
        ({"Ready": "True"}, 0),
        ({"PodScheduled": "False"}, 0),
    ],
)
def test_a_pod_that_starts_is_distinguished_from_one_that_fails(
    changes: dict[str, Any], starting: int, rig: Rig
) -> None:
    rig.server.create(starting_pod("b-prefill-1", **changes))
    assert rig.platform.read("prefill").starting == starting
    assert rig.platform.read("decode").starting == 0


def test_one_acts_and_the_other_takes_over(
    rig: Rig, server: ApiServer, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    assert rig.scaler.leadership.hold()
    other = StatefulSets(connect(server.kubeconfig(tmp_path / "other")), "default", NAMES)
    second = Autoscaler(CONFIG, redis_url, namespace, other, CollectorRegistry(), clock=lambda: rig.now)

    def step_of_second() -> None:
        rig.now += CONFIG.interval_seconds
        rig.prefill.publish(**prefill_status(rig.now - 1000.0, 3.0))
        rig.decode.publish(**decode_status(rig.now - 1000.0, 4.0))
        second.step()

    for _ in range(8):
        step_of_second()
    assert rig.replicas("prefill") == 1, "only the leader acts"
    rig.scaler.leadership.close()
    for _ in range(4):
        step_of_second()
    assert rig.replicas("prefill") >= 2
    second.leadership.close()
    other.close()


@pytest.mark.parametrize(
    ("error", "paused"),
    [
        (redis.ReadOnlyError("You can't write against a read only replica."), True),
        (redis.ResponseError("Error running script: -READONLY You can't write against a replica."), True),
        (redis.TimeoutError("one lost answer"), False),
    ],
)
def test_a_replicas_view_is_not_acted_on(
    error: redis.RedisError, paused: bool, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover to a replica the workers can be read, as they were."""

    def refuse(*_: object) -> None:
        raise error

    assert rig.step() is not None
    monkeypatch.setattr(rig.scaler.leadership._client, "eval", refuse)
    assert (rig.step() is None) is paused
    assert rig.metric("leader") == 1, "the lease is still sure"
    monkeypatch.undo()
    assert rig.step() is not None


def test_a_lease_ends_here_before_it_ends_there(redis_url: str, namespace: str) -> None:
    now = 0.0
    first = Leadership(redis_url, namespace, 30.0, clock=lambda: now)
    second = Leadership(redis_url, namespace, 30.0, clock=lambda: now)
    assert first.hold()
    assert first.sure(29.0)
    assert not second.hold()
    now = 29.0
    assert not first.sure(5.0)
    assert first.hold()
    assert first.sure(29.0)
    first.close()
    assert second.hold()
    second.close()


def test_a_change_made_meanwhile_is_not_overwritten(rig: Rig) -> None:
    seen = rig.platform.read("decode")
    rig.set_by_hand("decode", 5)
    with pytest.raises(UnavailableError, match="409"):
        rig.platform.scale("decode", 2, seen)
    assert rig.replicas("decode") == 5


def test_a_forbidden_call_is_named_and_does_not_stop_the_loop(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.server.access.deny("get", "statefulsets/scale", "apps")
    with pytest.raises(SetupError, match="may not get statefulsets/scale b-prefill"):
        rig.platform.read("prefill")
    assert rig.step() is None
    assert "may not get statefulsets/scale b-prefill" in caplog.text
    assert rig.metric("errors_total", part="platform") == 1


def test_without_redis_nothing_is_touched(server: ApiServer, tmp_path: Path) -> None:
    platform = StatefulSets(connect(server.kubeconfig(tmp_path / "kubeconfig")), "default", NAMES)
    registry = CollectorRegistry()
    scaler = Autoscaler(CONFIG, f"unix://{tmp_path}/none.sock", "n", platform, registry)
    assert scaler.step() is None
    assert registry.get_sample_value("baton_autoscaling_errors_total", {"part": "redis"}) == 1
    scaler.leadership.close()
    platform.close()


@pytest.mark.long
def test_the_command_scales_and_shows_its_metrics(
    server: ApiServer, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    workers = [RegisteredWorker(redis_url, namespace, role, role) for role in ("prefill", "decode")]
    ready = tmp_path / "ready.json"
    settings = {
        "interval_seconds": 0.3,
        "confirm_seconds": 0.2,
        "prefill": {"max_replicas": 3, "startup_seconds": 30},
        "stateful_sets": NAMES,
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "baton", "autoscale", "--config", str(tmp_path / "config.yaml")]
    command += ["--redis-url", redis_url, "--namespace", namespace, "--kubernetes-namespace", "default"]
    command += ["--kubeconfig", str(server.kubeconfig(tmp_path / "kubeconfig")), "--ready-file", str(ready)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        began = time.monotonic()

        def grown() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            now = time.monotonic() - began
            workers[0].publish(**prefill_status(now, 4.0))
            workers[1].publish(**decode_status(now, 4.0))
            return int(server.object("StatefulSet", NAMES["prefill"])["spec"]["replicas"]) == 3

        wait_for(grown, 60.0, "three prefill replicas")
        address = json.loads(ready.read_text())["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert 'baton_autoscaling_desired_replicas{model="",pool="prefill"}' in text
        process.send_signal(signal.SIGTERM)
        assert process.wait(20.0) == 0
        assert "reason=prefill_load" in (tmp_path / "log").read_text()
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(10.0)
        for worker in workers:
            worker.registration.stop()


def test_a_namespace_that_cannot_be_read_is_not_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would scale another namespace's pools, if they have the same names."""
    of_pod = "baton.autoscaler.platforms.kubernetes._SERVICE_ACCOUNT_NAMESPACE"
    file = tmp_path / "namespace"
    monkeypatch.setattr(of_pod, file)
    assert own_namespace() == "default", "outside of pods"
    file.write_text("llm\n")
    assert own_namespace() == "llm"
    monkeypatch.setattr(of_pod, tmp_path)
    with pytest.raises(SetupError, match="the pod's namespace is unknown") as caught:
        own_namespace()
    assert caught.value.field == "kubernetes_namespace"


@pytest.mark.parametrize("content", ["clusters: [1", "[]", "clusters: 3", None])
def test_a_file_that_is_no_kubeconfig_is_said_in_one_sentence(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    with pytest.raises(SetupError, match=f"--kubeconfig {file} cannot be used: ") as raised:
        connect(file)
    assert raised.value.field == "kubeconfig"
