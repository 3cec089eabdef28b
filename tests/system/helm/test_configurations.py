"""The files that the chart writes for Baton's processes are configurations that these accept."""

from __future__ import annotations

from pydoc import locate
from typing import Any

import pytest
import yaml

from baton.autoscaler.config import AutoscalingConfig, ServeAutoscalingConfig
from baton.cli.autoscale import AutoscaleConfig
from baton.local.options import RECOMPUTE_LIMIT_TOKENS
from baton.ray_pools.policy_adapter import PoolsPolicy
from baton.ray_pools.serve_app import AppArguments
from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig
from tests.system.helm.rendering import Rendered, Renderer, ValueSet
from tests.system.helm.value_sets import KUBERAY, VALUE_SETS

pytestmark = pytest.mark.system


def _file(rendered: Rendered, name: str, key: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(rendered.named("ConfigMap", name)["data"][key])
    return read


@pytest.mark.parametrize("name", VALUE_SETS)
def test_routers_and_workers_accept_theirs(name: str, renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS[name])
    router = RouterConfig.model_validate(_file(rendered, "t-baton-router", "router.yaml"))
    assert router.namespace == "serving-t"
    if any(one["metadata"]["name"] == "t-baton-serve" for one in rendered.of("ConfigMap")):
        described = _file(rendered, "t-baton-serve", "serve.yaml")["applications"][0]["args"]
        pools = AppArguments.model_validate(described)
        workers = [WorkerConfig.model_validate(pool.config) for pool in (pools.prefill, pools.decode)]
    else:
        workers = [
            WorkerConfig.model_validate(_file(rendered, f"t-baton-{role}", "worker.yaml"))
            for role in ("prefill", "decode")
        ]
    assert [worker.role for worker in workers] == ["prefill", "decode"]
    for worker in workers:
        assert worker.engine.page_size == router.page_size
        assert worker.engine.model == router.model
        assert worker.namespace == router.namespace


# Settings that containers of an earlier image refuse, with the defaults that every image has.
NEWER: dict[str, dict[str, Any]] = {
    "router.yaml": {"processes": 1},
    "worker.yaml": {
        "peer_exits": "none",
        "engine": {
            "quantization": "auto",
            "kv_dtype": "auto",
            "memory_utilization": 0.9,
            "expert_parallel": False,
            "nodes": 1,
            "recompute_limit_tokens": 0,
        },
    },
}


@pytest.mark.parametrize(
    ("component", "key", "model"),
    [
        ("router", "router.yaml", RouterConfig),
        ("prefill", "worker.yaml", WorkerConfig),
        ("decode", "worker.yaml", WorkerConfig),
    ],
)
def test_a_file_has_newer_settings_only_where_they_are_set(
    component: str, key: str, model: type[RouterConfig | WorkerConfig], renderer: Renderer
) -> None:
    """A container of the earlier image that restarts during a rolling update reads the new file."""
    values = {"decode": {"recomputeLimitTokens": 0}, "peerExits": {"enabled": False}}
    written = _file(renderer.render(ValueSet(values=values)), f"t-baton-{component}", key)
    known = model.model_validate(written).model_dump()
    for name, default in NEWER[key].items():
        for setting, value in (default if isinstance(default, dict) else {name: default}).items():
            inside, read = (written[name], known[name]) if isinstance(default, dict) else (written, known)
            assert setting not in inside, setting
            assert read[setting] == value, setting


def test_newer_settings_that_are_set_reach_the_files(renderer: Renderer) -> None:
    pool = {"gpus": 0, "memoryUtilization": 0.8, "expertParallel": True}
    values = {
        "model": {"quantization": "int8", "kvDtype": "int8"},
        "router": {"processes": 2},
        "prefill": {"gpus": 0},
        "decode": pool,
    }
    rendered = renderer.render(ValueSet(("cpu-demo.yaml",), values))
    worker = WorkerConfig.model_validate(_file(rendered, "t-baton-decode", "worker.yaml"))
    assert (worker.engine.quantization, worker.engine.memory_utilization) == ("int8", 0.8)
    assert worker.engine.expert_parallel and worker.engine.kv_dtype == "int8"
    assert _file(rendered, "t-baton-router", "router.yaml")["processes"] == 2


def test_the_operator_gets_the_same_application(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["kuberay"])
    (service,) = rendered.of("RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "baton.ray_pools.serve_app:build"
    pools = AppArguments.model_validate(application["args"])
    groups = {one["groupName"]: one for one in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    for role, pool in (("prefill", pools.prefill), ("decode", pools.decode)):
        assert pool.resources == {role: 1}
        assert pool.replicas == groups[role]["replicas"] == groups[role]["maxReplicas"]
        assert f'\\"{role}\\": 1' in groups[role]["rayStartParams"]["resources"]
        assert pool.config == _file(rendered, f"t-baton-{role}", "worker.yaml")


def test_ray_sizes_the_pools_where_it_places_them(renderer: Renderer) -> None:
    """One policy in every mode, by the same values."""
    by_operator = renderer.render(VALUE_SETS["autoscaling by the operator's Ray"])
    (service,) = by_operator.of("RayService")
    elsewhere = renderer.render(VALUE_SETS["autoscaling on an external Ray"])
    told = [
        service["spec"]["serveConfigV2"],
        elsewhere.named("ConfigMap", "t-baton-serve")["data"]["serve.yaml"],
    ]
    policies = []
    for text in told:
        (application,) = yaml.safe_load(text)["applications"]
        pools, policy = AppArguments.model_validate(application["args"]), application["autoscaling_policy"]
        assert locate(policy["policy_function"].replace(":", ".")) is PoolsPolicy
        policies.append(ServeAutoscalingConfig.model_validate(policy["policy_kwargs"]["config"]))
        assert pools.autoscaling == policies[-1]
    assert [policy.scale_down_seconds for policy in policies] == [1800.0, 600.0]
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    for group in cluster["workerGroupSpecs"]:
        limits = policies[0].pool(group["groupName"])
        assert (group["minReplicas"], group["maxReplicas"]) == (limits.min_replicas, limits.max_replicas)
    assert not [one for one in elsewhere.of("Deployment") if "autoscaler" in one["metadata"]["name"]]


@pytest.mark.parametrize("mode", ["embedded", "kuberay", "external"])
def test_workers_that_may_load_so_long_are_awaited_so_long(mode: str, renderer: Renderer) -> None:
    """Else the policy would give back, as late, what is still loading."""
    external = {"dashboardUrl": "http://ray.ray:8265"}
    values = {
        "model": {"loadSeconds": 1800},
        "ray": {"mode": mode, "external": external if mode == "external" else {}},
        "autoscaling": {"enabled": True, "decode": {"startupSeconds": 90}},
    }
    rendered = renderer.render(ValueSet(values=values, apis=KUBERAY))
    policies: list[AutoscalingConfig] = []
    if mode == "embedded":
        told = _file(rendered, "t-baton-autoscaler", "autoscale.yaml")
        policies.append(AutoscaleConfig.model_validate(told))
    else:
        (application,) = _served(rendered)["applications"]
        policies.append(ServeAutoscalingConfig.model_validate(application["args"]["autoscaling"]))
        config = application["autoscaling_policy"]["policy_kwargs"]["config"]
        policies.append(ServeAutoscalingConfig.model_validate(config))
    for policy in policies:
        assert policy.prefill.startup_seconds == 1800
        assert policy.decode.startup_seconds == 90


def _served(rendered: Rendered) -> dict[str, Any]:
    """Serve's configuration, by the operator or by the deployment."""
    services = rendered.of("RayService")
    if not services:
        return _file(rendered, "t-baton-serve", "serve.yaml")
    read: dict[str, Any] = yaml.safe_load(services[0]["spec"]["serveConfigV2"])
    return read


def test_the_autoscaler_accepts_its_own(renderer: Renderer) -> None:
    config = _file(renderer.render(VALUE_SETS["autoscaling"]), "t-baton-autoscaler", "autoscale.yaml")
    of_the_process = {
        name: config.pop(name)
        for name in ("namespace", "metrics_port", "kubernetes_namespace", "stateful_sets")
    }
    assert of_the_process["stateful_sets"] == {"prefill": "t-baton-prefill", "decode": "t-baton-decode"}
    policy = AutoscalingConfig.model_validate(config)
    assert (policy.gpu_budget, policy.decode.max_replicas) == (16, 8)


def test_the_autoscaler_may_do_what_it_does_and_nothing_more(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["autoscaling"])
    rules = rendered.named("Role", "t-baton-autoscaler")["rules"]
    assert rules == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": ["t-baton-prefill", "t-baton-decode"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    (cluster,) = rendered.of("ClusterRole")
    assert cluster["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    for role in ("prefill", "decode"):
        assert "replicas" not in rendered.named("StatefulSet", f"t-baton-{role}")["spec"]


def test_settings_by_their_own_names_reach_the_files(renderer: Renderer) -> None:
    values = {
        "router": {"config": {"max_concurrent_requests": 7}},
        "decode": {"config": {"max_queued_requests": 5, "engine": {"chunked_prefill": False}}},
    }
    rendered = renderer.render(ValueSet(values=values))
    router = RouterConfig.model_validate(_file(rendered, "t-baton-router", "router.yaml"))
    worker = WorkerConfig.model_validate(_file(rendered, "t-baton-decode", "worker.yaml"))
    assert router.max_concurrent_requests == 7
    assert (worker.max_queued_requests, worker.engine.chunked_prefill) == (5, False)
    assert worker.engine.max_batch_tokens == 512


@pytest.mark.parametrize(
    ("prefill", "given", "limit"),
    [
        (None, None, RECOMPUTE_LIMIT_TOKENS),
        (2, None, RECOMPUTE_LIMIT_TOKENS),
        (0, None, 0),
        (0, 9, 9),
        (None, 0, 0),
    ],
)
def test_long_preempted_requests_go_back_where_there_are_prefill_workers(
    prefill: int | None, given: int | None, limit: int, renderer: Renderer
) -> None:
    values = {"prefill": {"replicas": prefill}, "decode": {"recomputeLimitTokens": given}}
    rendered = renderer.render(ValueSet(values=values))
    limits = [
        WorkerConfig.model_validate(
            _file(rendered, f"t-baton-{role}", "worker.yaml")
        ).engine.recompute_limit_tokens
        for role in ("prefill", "decode")
    ]
    assert limits == [0, limit]


def test_the_limit_of_recomputing_is_no_free_setting_of_decode_workers(renderer: Renderer) -> None:
    values = {"decode": {"config": {"engine": {"recompute_limit_tokens": 9}}}}
    rendered = renderer.render(ValueSet(values=values))
    assert rendered.code != 0 and "use decode.recomputeLimitTokens" in rendered.error
