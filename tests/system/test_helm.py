"""The chart with a real Helm: lints, renders, refuses what can't work."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "baton"
pytestmark = pytest.mark.system

VALUE_SETS: dict[str, list[str]] = {
    "defaults": [],
    "cpu": ["prefill.gpus=0", "decode.gpus=0", "model.dtype=float32"],
    "two pools": ["prefill.replicas=4", "decode.replicas=2", "decode.tensorParallel=2", "decode.gpus=2"],
    "external redis": ["redis.enabled=false", "redis.externalUrl=rediss://redis.example:6379/0"],
    "own secret": ["existingSecret=mine", "ray.existingTokenSecret=token"],
}


def run(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60, check=False)


def settings(values: list[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def render(helm: Path, values: list[str]) -> list[dict]:
    done = run(helm, "template", "test", str(CHART), *settings(values))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def test_lint_is_clean(helm):
    done = run(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())
def test_selectors_match_their_pods_and_nothing_runs_as_root(values, helm):
    documents = render(helm, values)
    workloads = [d for d in documents if d["kind"] in ("Deployment", "StatefulSet")]
    assert len(workloads) >= 4
    for workload in workloads:
        pod = workload["spec"]["template"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())
def test_services_point_at_pods_and_ports_that_exist(values, helm):
    documents = render(helm, values)
    pods = [d["spec"]["template"] for d in documents if d["kind"] in ("Deployment", "StatefulSet")]
    for service in [d for d in documents if d["kind"] == "Service"]:
        selector = service["spec"]["selector"]
        chosen = [p for p in pods if selector.items() <= p["metadata"]["labels"].items()]
        assert len(chosen) == 1, service["metadata"]["name"]
        names = {port["name"] for c in chosen[0]["spec"]["containers"] for port in c.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_the_rendered_configurations_are_valid(helm):
    import json

    from cluster.config import RouterConfig, WorkerConfig

    documents = render(helm, VALUE_SETS["two pools"])
    (config,) = [d for d in documents if d["kind"] == "ConfigMap"]
    RouterConfig.model_validate(yaml.safe_load(config["data"]["router.yaml"]))
    pools = json.loads(config["data"]["pools.json"])
    workers = [WorkerConfig.model_validate(one) for role in ("prefill", "decode") for one in pools[role]]
    assert len(workers) == 6


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (["prefill.gpus=2"], "one GPU per rank"),
        (["decode.drainSeconds=100"], "kills the worker while it drains"),
        (["redis.enabled=false"], "name a Redis"),
        (["redis.externalUrl=redis://x"], "choose one"),
        (["prefill.replicas=0", "router.localPrefill=never"], "nobody could prefill"),
        (["router.replica=3"], "replica"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(values, sentence, helm):
    done = run(helm, "template", "test", str(CHART), *settings(values))
    assert done.returncode != 0
    assert sentence in done.stderr
