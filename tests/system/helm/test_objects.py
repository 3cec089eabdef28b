"""Relations between the objects of one release, for every value set."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
import yaml

from tests.system.helm.rendering import Pod, Rendered, Renderer, ValueSet, pods_of, selects
from tests.system.helm.value_sets import GROUPS, KUBERAY, VALUE_SETS

pytestmark = pytest.mark.system
LABEL = re.compile(r"^(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")


@pytest.fixture(params=list(VALUE_SETS.values()), ids=list(VALUE_SETS))
def rendered(request: pytest.FixtureRequest, renderer: Renderer) -> Rendered:
    return renderer.render(request.param)


def test_selectors_choose_their_own_pods_and_no_others(rendered: Rendered) -> None:
    pods = pods_of(rendered)
    workloads = rendered.of("Deployment", "StatefulSet")
    assert workloads
    for workload in workloads:
        chosen = [one for one in pods if selects(workload["spec"]["selector"], one.labels)]
        assert [one.manifest for one in chosen] == [workload]


def test_services_reach_pods_at_ports_that_they_open(rendered: Rendered) -> None:
    pods = pods_of(rendered)
    for service in rendered.of("Service"):
        name = service["metadata"]["name"]
        chosen = [one for one in pods if selects({"matchLabels": service["spec"]["selector"]}, one.labels)]
        assert len(chosen) == 1, name
        for port in service["spec"].get("ports", []):
            assert chosen[0].ports[port["targetPort"]] == port["port"], name
    for workload in rendered.of("StatefulSet"):
        rendered.named("Service", workload["spec"]["serviceName"])


def test_nothing_runs_as_root_or_writes_to_its_root(rendered: Rendered) -> None:
    for pod in pods_of(rendered):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers:
            if container["image"].startswith("example/"):
                continue  # brought by a hook
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, container["name"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert set(context["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]


def test_mounts_have_volumes_and_volumes_have_mounts(rendered: Rendered) -> None:
    for pod in pods_of(rendered):
        volumes = [volume["name"] for volume in pod.spec.get("volumes", [])]
        claims = [one["metadata"]["name"] for one in pod.manifest["spec"].get("volumeClaimTemplates", [])]
        mounted = [mount for one in pod.containers for mount in one.get("volumeMounts", [])]
        assert {mount["name"] for mount in mounted} == {*volumes, *claims}, pod.owner
        assert len(set(volumes)) == len(volumes)


def test_objects_that_pods_refer_to_exist_or_are_given(rendered: Rendered) -> None:
    """ConfigMaps, Secrets and accounts that bear the release's name are made by the chart (or by cert-manager)."""
    made = {(one["kind"], one["metadata"]["name"]): one for one in rendered.manifests}
    certificates = {one["spec"]["secretName"] for one in rendered.of("Certificate")}
    for pod in pods_of(rendered):
        for kind, name, key in _references(pod):
            if not name.startswith("t-baton") or (kind == "Secret" and name in certificates):
                continue
            assert (kind, name) in made, f"{pod.owner} refers to {kind} {name}"
            content = made[kind, name]
            keys = {*(content.get("data") or {}), *content.get("stringData", {})}
            assert not key or key in keys, f"{pod.owner} refers to {key} of {kind} {name}"


def _references(pod: Pod) -> list[tuple[str, str, str]]:
    found = []
    for volume in pod.spec.get("volumes", []):
        if "configMap" in volume:
            found.append(("ConfigMap", volume["configMap"]["name"], ""))
        if "secret" in volume:
            found.append(("Secret", volume["secret"]["secretName"], ""))
    for container in pod.containers:
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {}).get("secretKeyRef")
            if source:
                found.append(("Secret", source["name"], source["key"]))
    if "serviceAccountName" in pod.spec and pod.spec["serviceAccountName"] != "default":
        found.append(("ServiceAccount", pod.spec["serviceAccountName"], ""))
    return found


def test_no_secret_is_readable_in_a_config_map(rendered: Rendered) -> None:
    secrets = {
        text
        for one in rendered.of("Secret")
        for text in [
            *(base64.b64decode(value).decode() for value in (one.get("data") or {}).values()),
            *one.get("stringData", {}).values(),
        ]
    }
    assert secrets
    words = {part for text in secrets for part in re.findall(r"[^\s:/@]{8,}", text)} | {"pass-word"}
    elsewhere = [one for one in rendered.manifests if one["kind"] != "Secret"]
    told = {part for part in words if len(part) >= 16 or part == "pass-word"}
    for one in elsewhere:
        text = json.dumps(one)
        for word in told:
            assert word not in text or word.startswith(("sha", "00000000")), one["metadata"]["name"]


def test_a_node_can_be_drained(rendered: Rendered) -> None:
    """Every budget lets at least one pod go, and no two budgets hold the same pod (then none may be evicted)."""
    pods = pods_of(rendered)
    budgets = rendered.of("PodDisruptionBudget")
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] >= 1 and "minAvailable" not in budget["spec"]
        assert any(selects(budget["spec"]["selector"], pod.labels) for pod in pods)
    for pod in pods:
        assert len([one for one in budgets if selects(one["spec"]["selector"], pod.labels)]) <= 1


def test_names_and_labels_fit(rendered: Rendered) -> None:
    seen = set()
    for one in rendered.manifests:
        name = one["metadata"]["name"]
        assert len(name) <= 63
        assert (one["kind"], name) not in seen
        seen.add((one["kind"], name))
        for value in one["metadata"].get("labels", {}).values():
            assert LABEL.match(value), value


def test_worker_containers_start_drain_and_are_probed(rendered: Rendered) -> None:
    for workload in rendered.of("StatefulSet"):
        (pod,) = [one for one in pods_of(rendered) if one.manifest is workload]
        if pod.component not in ("prefill", "decode"):
            continue
        worker = _by_name(pod)["worker"]
        assert worker["command"][:2] == ["baton", pod.component]
        assert worker["lifecycle"]["preStop"]["exec"]["command"][:3] == ["baton", "drain", "--self"]
        ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
        config = _worker_config(rendered, pod)
        assert ports == {
            "grpc": config["port"],
            "link": config["link_port"],
            "metrics": config["metrics_port"],
        }
        assert config["drain_seconds"] < pod.spec["terminationGracePeriodSeconds"]
        startup = worker["startupProbe"]
        assert startup["httpGet"] == {"path": "/ready", "port": "metrics"}
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 300
        assert worker["livenessProbe"]["httpGet"] == {"path": "/live", "port": "metrics"}


def test_a_standing_engine_is_restarted_when_its_time_is_over_and_not_twice_as_late(
    renderer: Renderer,
) -> None:
    """The worker itself waits for livenessSeconds before /live says no: the probe adds its own few tries only."""
    rendered = renderer.render(ValueSet(values={"decode": {"livenessSeconds": 300}}))
    (pod,) = [one for one in pods_of(rendered) if one.component == "decode"]
    assert _worker_config(rendered, pod)["step_stall_seconds"] == 300
    liveness = _by_name(pod)["worker"]["livenessProbe"]
    assert liveness["failureThreshold"] > 1, "one answer that a busy machine loses must not end a worker"
    assert liveness["periodSeconds"] * liveness["failureThreshold"] <= 30


def test_a_hand_off_is_tested_where_there_can_be_one_and_over_its_transport(renderer: Renderer) -> None:
    def tested(name: str = "", **values: Any) -> list[str] | None:
        rendered = renderer.render(VALUE_SETS[name] if name else ValueSet(values=values))
        jobs = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in rendered.of("Job")}
        assert len(jobs) >= 4
        pod = jobs.get("t-baton-test-handoff")
        return pod and [one for one in pod["containers"][0]["args"] if one.startswith("--transport")]

    assert tested() == ["--transport=nixl"]
    assert tested(transfer={"transport": "grpc"}) == ["--transport=grpc"]
    assert tested(transfer={"requireTransport": "grpc"}) == ["--transport=grpc"]
    assert tested("rdma-mtls") == ["--transport=nixl"]
    assert tested(tests={"handoffTransport": ""}) == ["--transport="]
    assert tested("prefill to nothing") is None
    assert tested(prefill={"replicas": 0}) is None
    assert tested("autoscaling") == ["--transport=nixl"]


def test_workers_elsewhere_find_the_charts_redis(renderer: Renderer) -> None:
    """The deployment's own address of it is what Ray's nodes get, and those may be in another namespace."""
    values = {"ray": {"mode": "external", "external": {"dashboardUrl": "http://ray.elsewhere:8265"}}}
    rendered = renderer.render(ValueSet(values=values))
    (job,) = [one for one in rendered.of("Job") if one["metadata"]["name"] == "t-baton-ray-apply"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (address,) = [one["value"] for one in container["env"] if one["name"] == "BATON_REDIS_URL"]
    assert address == "redis://worker:$(REDIS_PASSWORD)@t-baton-redis.serving.svc:6379/0"
    rendered.named("Service", "t-baton-redis")


def _by_name(pod: Pod) -> dict[str, Any]:
    return {one["name"]: one for one in pod.containers}


def _worker_config(rendered: Rendered, pod: Pod) -> dict[str, Any]:
    config = rendered.named("ConfigMap", f"t-baton-{pod.component}")
    read: dict[str, Any] = yaml.safe_load(config["data"]["worker.yaml"])
    return read


def test_a_changed_configuration_rolls_the_pods_it_concerns_and_no_others(renderer: Renderer) -> None:
    def sums(values: dict[str, Any]) -> dict[str, str]:
        pods = pods_of(renderer.render(ValueSet(values=values)))
        return {pod.component: pod.annotations["checksum/config"] for pod in pods}

    before = sums({})
    assert sums({}) == before
    after = sums({"decode": {"maxBatchTokens": 256}})
    assert {component for component in before if before[component] != after[component]} == {"decode"}
    after = sums({"model": {"pageSize": 32}})
    changed = {component for component in before if before[component] != after[component]}
    assert changed == {"router", "prefill", "decode"}


@pytest.mark.parametrize("mode", ["none", "kuberay"])
def test_pods_follow_a_changed_url_of_redis(mode: str, renderer: Renderer) -> None:
    """It is in a Secret that they read when they start: some would stay at the Redis of before."""

    def sums(**redis: Any) -> dict[str, str]:
        values = {
            "redis": {"enabled": False},
            "externalRedis": {"url": "redis://all.example", **redis},
            "ray": {"mode": mode, "gcsFaultTolerance": {"enabled": False}},
            "autoscaling": {"enabled": True},
            "tests": {"enabled": False},
        }
        pods = pods_of(renderer.render(ValueSet(values=values, apis=KUBERAY)))
        return {pod.component: pod.annotations["checksum/config"] for pod in pods}

    def changed(**redis: Any) -> set[str]:
        after = sums(**redis)
        return {component for component in before if before[component] != after[component]}

    before = sums()
    autoscaler = {"autoscaler"} if mode == "none" else set()
    assert changed() == set()
    assert changed(url="redis://all.example/1") == {"router", "prefill", "decode"} | autoscaler
    assert changed(url="redis://other.example") == {"router", "prefill", "decode"} | autoscaler
    assert changed(worker={"url": "redis://worker.example"}) == {"prefill", "decode"}
    assert changed(router={"url": "redis://router.example"}) == {"router"}
    assert changed(autoscaler={"url": "redis://autoscaler.example"}) == autoscaler


@pytest.mark.parametrize(
    "url",
    [
        "rediss://router:PASSWORD@all.example:6380/0?a=b",
        "redis://:PASSWORD@all.example",
        "rediss+sentinel://user:PASSWORD@a.example:1,b.example:2/main?a=b&sentinel_password=PASSWORD",
    ],
)
def test_no_annotation_tells_a_password_of_redis(url: str, renderer: Renderer) -> None:
    """Whoever may read pods could test guesses at its hash."""

    def annotations(password: str) -> list[dict[str, str]]:
        redis = {"url": url.replace("PASSWORD", password)}
        values = {
            "redis": {"enabled": False},
            "externalRedis": {**redis, "router": redis},
            "ray": {"mode": "none"},
            "autoscaling": {"enabled": True},
        }
        rendered = renderer.render(ValueSet(values=values))
        found = [one["metadata"].get("annotations", {}) for one in rendered.manifests]
        return found + [pod.annotations for pod in pods_of(rendered)]

    assert annotations("one") == annotations("an:oth/er@all?x")


def test_gpus_rdma_and_pinning_are_asked_for(renderer: Renderer) -> None:
    pods = {pod.component: pod for pod in pods_of(renderer.render(VALUE_SETS["ray beside workers"]))}
    for role in ("prefill", "decode"):
        worker = _by_name(pods[role])["worker"]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == 2
        assert worker["resources"]["limits"]["rdma/hca_shared_devices_a"] == 2
        assert worker["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert "nvidia.com/gpu" not in _by_name(pods[role])["ray"]["resources"]["limits"]
    demo = {pod.component: pod for pod in pods_of(renderer.render(VALUE_SETS["cpu-demo"]))}
    assert "nvidia.com/gpu" not in _by_name(demo["decode"])["worker"]["resources"]["limits"]


def test_ranks_of_a_wide_worker_get_pods_of_their_own(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["multi-node"])
    ranks = rendered.named("StatefulSet", "t-baton-decode-ranks")
    workers = rendered.named("StatefulSet", "t-baton-decode")
    assert (workers["spec"]["replicas"], ranks["spec"]["replicas"]) == (2, 2)
    (pod,) = [one for one in pods_of(rendered) if one.manifest is ranks]
    (ray,) = pod.containers
    assert ray["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert '--resources={"decode-ranks": 1}' in ray["args"]


def test_further_ranks_have_the_environment_of_their_worker_but_no_secrets(renderer: Renderer) -> None:
    """Settings of NCCL are for all ranks of a worker; a job that is submitted to Ray could read a secret there."""
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "token"}}}
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    given = [{"name": "NCCL_SOCKET_IFNAME", "value": "eth1"}, secret, node]
    values = {"decode": {"pod": {"extraEnv": given}}}
    for more in ({}, {"multiNode": {"by": "leaderWorkerSet"}}):
        wanted = ValueSet(("multi-node.yaml",), {**values, **more}, apis=GROUPS)
        pods = {pod.component: pod for pod in pods_of(renderer.render(wanted))}
        (ranks,) = pods["decode-ranks"].containers
        assert [one for one in given if one in ranks["env"]] == [given[0], node]
        assert [one for one in given if one in _by_name(pods["decode"])["worker"]["env"]] == given
        assert not [one for one in given if one in _by_name(pods["decode"])["ray"]["env"]]
        assert not [one for one in given if one in pods["prefill-ranks"].containers[0]["env"]]
