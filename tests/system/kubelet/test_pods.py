"""The tests' kubelet and a pod's description, with small commands as containers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.kubernetes.pod import Pod, PodExits
from deploy.images import name_of
from tests.harness.waiting import wait_for
from tests.kubernetes import clients, samples
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers import pods
from tests.kubernetes.kubelet.cluster import PodCluster
from tests.kubernetes.kubelet.iproute import unpacked
from tests.kubernetes.kubelet.runtime import Plan, Running
from tests.kubernetes.kubelet.sandbox import Sandbox

pytestmark = pytest.mark.system
SECONDS = 60.0
IMAGE = name_of("router")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    with request.param(tmp_path_factory.mktemp("cluster") / "files") as running:
        yield running
        assert running.controllers.problems == []


def start(
    cluster: PodCluster, name: str, command: str, *, spec: Object | None = None, **container: Any
) -> None:
    """A pod whose container runs a line of shell."""
    made = samples.pod(name, image=IMAGE, command=["sh", "-c", command], **container)
    made["spec"] |= {"terminationGracePeriodSeconds": 5, **(spec or {})}
    cluster.server.create(made)


def said(cluster: PodCluster, name: str, container: str = "main") -> str:
    return cluster.kubelet.logs("default", name, container).decode()


def phase(cluster: PodCluster, name: str) -> str:
    return pods.phase(cluster.server.object("Pod", name))


def outcome(
    cluster: PodCluster, name: str, command: str, *, spec: Object | None = None, **container: Any
) -> str:
    """The output of a pod that runs once."""
    start(cluster, name, command, spec={"restartPolicy": "Never", **(spec or {})}, **container)
    wait_for(lambda: phase(cluster, name) in ("Succeeded", "Failed"), SECONDS, f"{name} has ended")
    assert phase(cluster, name) == "Succeeded", said(cluster, name)
    return said(cluster, name)


def test_redis_is_one_with_keys_that_are_only_read(cluster: PodCluster) -> None:
    """The users of the chart's Redis need it."""
    made = samples.pod("redis", image="docker.io/library/redis:7.4.2-alpine")
    server = (
        'echo "user u on nopass %R~a +get" > /tmp/acl && exec redis-server --port 6380 --aclfile /tmp/acl'
    )
    made["spec"]["containers"][0]["command"] = ["sh", "-c", server]
    cluster.server.create(made)
    wait_for(lambda: "Ready to accept" in said(cluster, "redis"), SECONDS, "redis is ready")


def test_environment_comes_from_everywhere(cluster: PodCluster) -> None:
    cluster.server.create(samples.config_map("words", A="from-map"))
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hidden"},
        "stringData": {"key": "from-secret"},
    }
    cluster.server.create(secret)
    env = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "S", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "key"}}},
        {"name": "MISSING", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "no", "optional": True}}},
        {
            "name": "MEMORY",
            "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
        },
        {"name": "ALL", "value": "$(NAME)-$(S)-$$(S)-$(UNKNOWN)"},
    ]
    told = outcome(
        cluster,
        "env",
        'echo "$A|$LABEL|$MEMORY|${MISSING-unset}|$ALL"; test "$IP" = "$(hostname -i | cut -d" " -f1)"; echo $?',
        env=env,
        envFrom=[{"configMapRef": {"name": "words"}}],
        resources={"limits": {"memory": "64Mi"}},
    )
    assert told.splitlines() == ["from-map|env|64|unset|env-from-secret-$(S)-$(UNKNOWN)", "0"]


def test_volumes_lie_where_they_are_mounted_with_owners_and_modes(cluster: PodCluster) -> None:
    cluster.server.create(samples.config_map("files", one="1", two="2"))
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.server.create(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "kept"}, "spec": claim}
    )
    projected = [
        {"configMap": {"name": "files", "items": [{"key": "two", "path": "deep/second"}]}},
        {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    ]
    spec: Object = {
        "securityContext": {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
        "volumes": [
            {"name": "map", "configMap": {"name": "files", "defaultMode": 0o440}},
            {"name": "mixed", "projected": {"sources": projected}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}},
        ],
    }
    mounts = [
        {"name": "map", "mountPath": "/etc/app/files", "readOnly": True},
        {"name": "mixed", "mountPath": "/mixed"},
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "kept", "mountPath": "/data"},
    ]
    command = """
        cat /etc/app/files/one /mixed/deep/second /mixed/name; echo
        echo x > /tmp/x && echo x > /dev/shm/x && echo kept > /data/x && echo writable
        (echo x > /etc/app/files/no) 2>/dev/null || echo read-only volume
        (echo x > /no) 2>/dev/null || echo read-only root
        id -u; stat -c %a /etc/app/files/one
    """
    told = outcome(
        cluster,
        "volumes",
        command,
        spec=spec,
        volumeMounts=mounts,
        securityContext={"readOnlyRootFilesystem": True},
    )
    assert told.splitlines() == [
        "12volumes",
        "writable",
        "read-only volume",
        "read-only root",
        "10001",
        "440",
    ]
    again = outcome(
        cluster,
        "again",
        "cat /data/x; ls /tmp | wc -l",
        spec={**spec, "volumes": [spec["volumes"][2], spec["volumes"][4]]},
        volumeMounts=[mounts[2], mounts[4]],
    )
    assert again.splitlines() == ["kept", "0"]


def test_init_containers_run_first_and_in_order(cluster: PodCluster) -> None:
    mount = [{"name": "shared", "mountPath": "/shared"}]

    def step(name: str, command: str) -> Object:
        return {"name": name, "image": IMAGE, "command": ["sh", "-c", command], "volumeMounts": mount}

    spec = {
        "initContainers": [step("a", "echo a >> /shared/x"), step("b", "echo b >> /shared/x")],
        "volumes": [{"name": "shared", "emptyDir": {}}],
    }
    assert outcome(cluster, "init", "cat /shared/x", spec=spec, volumeMounts=mount).split() == ["a", "b"]


def test_a_service_spreads_connections_over_ready_pods_and_headless_names_are_pods(
    cluster: PodCluster,
) -> None:
    server = cluster.server
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
    made = samples.stateful_set(
        "web",
        2,
        image=IMAGE,
        command=[
            "sh",
            "-c",
            "echo $(hostname) > /tmp/name; cd /tmp; exec python -m http.server 8080 --bind $IP",
        ],
        env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        ports=[{"name": "http", "containerPort": 8080}],
        readinessProbe=probe,
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
    )
    made["spec"]["podManagementPolicy"] = "Parallel"
    made["spec"]["template"]["spec"]["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    server.create(samples.service("web", 8080, "http", headless=True))
    front = samples.service("web", 80, "http")
    front["metadata"]["name"] = "front"
    server.create(front)
    server.create(made)
    wait_for(
        lambda: (server.object("StatefulSet", "web").get("status") or {}).get("readyReplicas") == 2,
        SECONDS,
        "ready",
    )
    script = (
        "import urllib.request as u, socket\n"
        "get = lambda a: u.urlopen(f'http://{a}/name', timeout=5).read().decode().strip()\n"
        "print(sorted({get('front') for _ in range(40)}))\n"
        "print(get('web-1.web:8080'), get('web-0.web.default.svc.cluster.local:8080'))\n"
        "print(len({i[4][0] for i in socket.getaddrinfo('web', 8080)}))\n"
    )
    told = outcome(cluster, "asker", f'python -c "{script}"')
    assert told.splitlines() == ["['web-0', 'web-1']", "web-1 web-0", "2"]


def test_a_pod_leaves_with_its_hook_then_sigterm(cluster: PodCluster, tmp_path: Path) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /shared/log; sleep 0.5"]}}}
    spec = {"volumes": [{"name": "shared", "hostPath": {"path": str(tmp_path)}}]}
    command = (
        "trap 'echo term >> /shared/log; exit 0' TERM; echo up >> /shared/log; while :; do sleep 0.1; done"
    )
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    start(cluster, "leaver", command, spec=spec, lifecycle=hook, volumeMounts=mounts)
    tmp_path.chmod(0o777)  # an image has a user of its own
    log = tmp_path / "log"
    wait_for(lambda: log.exists() and log.read_text() == "up\n", SECONDS, "it runs")
    cluster.server.delete("Pod", "leaver")
    wait_for(
        lambda: "leaver" not in {p["metadata"]["name"] for p in cluster.server.objects("Pod")},
        SECONDS,
        "gone",
    )
    assert log.read_text().split() == ["up", "hook", "term"]


def test_a_child_that_does_not_end_in_time_is_killed(cluster: PodCluster) -> None:
    start(
        cluster,
        "deaf",
        "trap '' TERM; echo up; while :; do sleep 0.1; done",
        spec={"terminationGracePeriodSeconds": 1},
    )
    wait_for(
        lambda: phase(cluster, "deaf") == "Running" and "up" in said(cluster, "deaf"), SECONDS, "it runs"
    )
    pid = cluster.kubelet.process("deaf", "default", "main")
    cluster.server.delete("Pod", "deaf")
    wait_for(
        lambda: "deaf" not in {p["metadata"]["name"] for p in cluster.server.objects("Pod")}, SECONDS, "gone"
    )
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("kind", ["exec", "tcp", "http"])
def test_liveness_restarts_and_readiness_follows(cluster: PodCluster, kind: str) -> None:
    """A server that stops answering on request: its process lives on, the probe does not see it."""
    asked: dict[str, Object] = {
        "exec": {"exec": {"command": ["sh", "-c", "test ! -e /tmp/sick"]}},
        "tcp": {"tcpSocket": {"port": 8080}},
        "http": {"httpGet": {"path": "/", "port": 8080}},
    }
    probe = {"periodSeconds": 1, "failureThreshold": 2, "timeoutSeconds": 10, **asked[kind]}
    serve = (
        "python -m http.server 8080 & p=$!; while [ ! -e /tmp/sick ]; do sleep 0.1; done; kill $p; sleep 60"
    )
    spec = {"volumes": [{"name": "tmp", "emptyDir": {}}], "terminationGracePeriodSeconds": 0}
    first = "[ -e /tmp/been ] && rm -f /tmp/sick; touch /tmp/been; "
    name = f"sick-{kind}"
    start(
        cluster,
        name,
        first + serve,
        spec=spec,
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
        startupProbe={**probe, "failureThreshold": 60},
        livenessProbe=probe,
        readinessProbe=probe,
    )
    wait_for(lambda: pods.is_ready(cluster.server.object("Pod", name)), SECONDS, "ready")
    pid = cluster.kubelet.process(name, "default", "main")
    (Path(f"/proc/{pid}/root") / "tmp/sick").touch()

    def restarted() -> bool:
        pod = cluster.server.object("Pod", name)
        return pod["status"]["containerStatuses"][0]["restartCount"] >= 1 and pods.is_ready(pod)

    wait_for(restarted, SECONDS, "restarted and ready")


def test_a_killed_container_comes_back_and_one_that_fails_for_good_does_not(cluster: PodCluster) -> None:
    start(cluster, "phoenix", "echo up; sleep 60")
    wait_for(lambda: "up" in said(cluster, "phoenix"), SECONDS, "it runs")
    os.kill(cluster.kubelet.process("phoenix", "default", "main"), signal.SIGKILL)

    def status() -> Object:
        return dict(cluster.server.object("Pod", "phoenix")["status"]["containerStatuses"][0])

    wait_for(lambda: status()["restartCount"] == 1 and "running" in status()["state"], SECONDS, "back")
    assert status()["lastState"]["terminated"]["exitCode"] != 0
    start(cluster, "failure", "exit 3", spec={"restartPolicy": "Never"})
    wait_for(lambda: phase(cluster, "failure") == "Failed", SECONDS, "failed")


def test_in_cluster_clients_find_the_server_and_are_held_to_their_roles(cluster: PodCluster) -> None:
    script = (
        "from kubernetes import client, config\n"
        "config.load_incluster_config()\n"
        "try: client.CoreV1Api().list_node()\n"
        "except client.ApiException as e: print(e.status)\n"
    )
    assert outcome(cluster, "inside", f'python -c "{script}"').strip() == "403"


def test_the_unpacked_ip_command_works_where_none_is_installed(tmp_path: Path) -> None:
    assert "127.0.0.1" in unpacked(tmp_path / "iproute").run("-4", "addr", "show", "lo")


def test_a_pod_runs_once_its_containers_have_started(
    cluster: PodCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is pending: the time at which a pod runs counts as one after the start of its process."""
    start_container, may_start = cluster.runtime.start, threading.Event()

    def late(plan: Plan, sandbox: Sandbox) -> Running:
        assert may_start.wait(SECONDS)
        return start_container(plan, sandbox)

    monkeypatch.setattr(cluster.runtime, "start", late)
    start(cluster, "late", "sleep 1000")
    try:
        wait_for(
            lambda: pods.is_true(cluster.server.object("Pod", "late"), "Initialized"),
            SECONDS,
            "the kubelet is at its containers",
        )
        assert phase(cluster, "late") == "Pending"
    finally:
        may_start.set()
    wait_for(lambda: phase(cluster, "late") == "Running", SECONDS, "it runs")
    (status,) = cluster.server.object("Pod", "late")["status"]["containerStatuses"]
    assert "running" in status["state"]


@pytest.mark.parametrize("policy", ["Never", "Always"])
def test_the_end_of_a_killed_container_can_be_proven_to_any_caller(
    policy: str, cluster: PodCluster, tmp_path: Path
) -> None:
    """The kubelet's status is the proof, whether the container is restarted or not."""
    name = f"victim-{policy.lower()}"
    start(cluster, name, "sleep 1000", spec={"restartPolicy": policy})
    wait_for(lambda: phase(cluster, name) == "Running", SECONDS, f"{name} runs")
    found = cluster.server.object("Pod", name)
    pod = Pod("default", name, found["metadata"]["uid"], "main", found["spec"]["nodeName"], time.time())
    with clients.connect(cluster.server.kubeconfig(tmp_path / "kubeconfig")) as api:
        exits = PodExits(api)
        status = cluster.server.object("Pod", name)["status"]
        assert not exits.has_exited(pod), (status, said(cluster, name))
        lived = time.time()
        wait_for(lambda: time.time() > lived + 1.0, SECONDS, "the API's times have a second's resolution")
        os.kill(cluster.kubelet.process(name, "default", "main"), signal.SIGKILL)
        wait_for(lambda: exits.has_exited(pod), SECONDS, "the proof")
        later = replace(pod, started=time.time() + 3600.0)
        assert not exits.has_exited(later), "a process that came after that end"
