"""Impossible values are refused while rendering, with a sentence that names the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.system.helm.refused import cluster, models, workers
from tests.system.helm.refused.form import Refusals
from tests.system.helm.rendering import CHART, Renderer, ValueSet
from tests.system.helm.value_sets import CERTS, GROUPS

pytestmark = pytest.mark.system

REFUSED: Refusals = {**workers.REFUSED, **cluster.REFUSED, **cluster.IN_THE_OPEN, **models.REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_settings_are_refused_with_a_sentence(name: str, renderer: Renderer) -> None:
    values, wrong, change = REFUSED[name]
    rendered = renderer.render(ValueSet(values=values))
    assert rendered.code != 0
    assert wrong in rendered.error
    assert change in rendered.error


NEED_CERT_MANAGER: list[dict[str, Any]] = [
    {"tls": {"enabled": True}, "decode": {"probe": "grpc"}},
    {"tls": {"enabled": True, "clientCaSecret": "ca"}},
]


@pytest.mark.parametrize("kube", ["1.32.0", "1.37.0", "1.40.0"])
def test_no_kubernetes_probes_a_port_that_asks_for_certificates(kube: str, renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values=NEED_CERT_MANAGER[0], apis=CERTS, kube=kube))
    assert rendered.code != 0
    assert "decode.probe = grpc with tls.enabled" in rendered.error
    assert "set decode.probe to http" in rendered.error


def test_clients_that_need_certificates_are_tested_with_one(renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values=NEED_CERT_MANAGER[1], apis=CERTS))
    assert "tls.clientCaSecret makes clients show a certificate and helm test has none" in rendered.error
    assert "set tests.tlsSecret, or turn tests.enabled off" in rendered.error


@pytest.mark.parametrize(
    "values",
    [
        {"router": {"replica": 3}},
        {"prefil": {}},
        {"decode": {"pod": {"nodeselector": {}}}},
        {"prefill": {"gpus": "two"}},
        {"prefill": {"replicas": -1}},
        {"model": {"source": "s3://bucket"}},
        {"model": {"source": "gs://bucket/model"}},
        {"model": {"dtype": "float16"}},
        {"decode": {"resources": {"request": {"cpu": 1}}}},
        {"decode": {"resources": {"limits": {"memory": "lots"}}}},
        {"redis": {"resources": {"requests": {"cpu": "1 core"}}}},
        {"ray": {"mode": "kube"}},
        {"router": None},
        {"prefill": {"pod": None}},
        {"redis": {"resources": None}},
        {"fullnameOverride": "My_Baton"},
        {"fullnameOverride": "2nd"},
        {"transfer": {"slotBytes": 5000}},
        {"redis": {"maxMemory": "512Mi"}},
        {"prefill": {"shmSize": "8GB"}},
        {"networkPolicy": {"apiServerPorts": []}},
        {"apiKeys": {"key": "keys/all.yaml"}},
        {"router": {"autoscaling": {"scaleDownStabilizationSeconds": 3601}}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_not_a_value(values: dict[str, Any], renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values=values))
    assert rendered.code != 0
    assert "values don't meet the specifications of the schema" in rendered.error


@pytest.mark.parametrize("release", ["baton.v2", "2nd-baton"])
def test_a_release_whose_name_no_service_may_have_is_refused(release: str, renderer: Renderer) -> None:
    """Names of releases may have dots, and a digit first."""
    refused = renderer.run("template", release, str(CHART))
    assert refused.returncode != 0
    assert f"{release}, made from the release's name, can't begin names of Services" in refused.stderr
    assert "set fullnameOverride, or install under another name" in refused.stderr
    assert renderer.run("template", release, str(CHART), "--set", "fullnameOverride=baton").returncode == 0


@pytest.mark.parametrize("release", ["on", "null", "123"])
def test_a_release_whose_name_yaml_reads_as_another_type_is_named_by_it(
    release: str, renderer: Renderer
) -> None:
    """Kubernetes refuses labels that are no texts, and names none of the values that they came from."""
    flags = (
        "--namespace",
        "456",
        "--set",
        "fullnameOverride=baton,doctor.enabled=true,observability.monitors.enabled=true",
    )
    done = renderer.run("template", release, str(CHART), *flags)
    assert done.returncode == 0, done.stderr
    manifests = [one for one in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if one]
    assert len(manifests) > 20
    for one in manifests:
        assert one["metadata"].get("namespace", "456") == "456"
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == release
    for key, value in _scalars(manifests):
        if key in ("app.kubernetes.io/instance", "namespace"):
            assert value in (release, "456"), (key, value)


def _scalars(found: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping and no list, with the key that it, or its list, has."""
    if isinstance(found, dict):
        for name, one in found.items():
            yield from _scalars(one, name)
    elif isinstance(found, list):
        for one in found:
            yield from _scalars(one, key)
    else:
        yield key, found


def test_what_redis_may_hold_is_compared_in_bytes(renderer: Renderer) -> None:
    """Of units that differ in Redis's notation and in Kubernetes'."""
    fit: list[dict[str, Any]] = [
        {"maxMemory": "1g"},
        {"maxMemory": "1023MB"},
        {"maxMemory": "512mb", "resources": {"limits": {"memory": 536870913}}},
        {"maxMemory": "5gb", "resources": {"limits": {"memory": None}}},
        {"maxMemory": "5gb", "resources": {"limits": {"memory": "1Ei"}}},
    ]
    for rendered in renderer.render_all([ValueSet(values={"redis": values}) for values in fit]):
        assert rendered.code == 0, rendered.error


def test_ports_that_share_no_pod_may_be_equal(renderer: Renderer) -> None:
    fit: list[dict[str, Any]] = [
        {"prefill": {"port": 6382}},
        {"prefill": {"port": 6382}, "ray": {"mode": "none"}},
        {"prefill": {"port": 50053}, "router": {"httpPort": 6381}},
        {"ray": {"ports": {"nodeManager": 0, "objectManager": 0, "firstWorker": 0}}},
    ]
    for rendered in renderer.render_all([ValueSet(values=values) for values in fit]):
        assert rendered.code == 0, rendered.error


AT_THE_LIMIT: dict[str, ValueSet] = {
    "numbers": ValueSet(
        values={
            "autoscaling": {
                "enabled": True,
                "gpuBudget": 16,
                "prefill": {"minReplicas": 8},
                "decode": {"minReplicas": 8},
            },
            "router": {
                "autoscaling": {"enabled": True, "minReplicas": 8},
                "drainDelaySeconds": 23,
                "drainSeconds": 66,
            },
            "prefill": {"startupFailures": 120, "drainSeconds": 149},
            "model": {"adapters": {"slots": 1, "source": "file:///a", "load": {"x": "x"}}},
            "transfer": {"nixlPorts": {"first": 24999}},
            "ray": {"ports": {"firstWorker": 10199}},
            "tests": {"loadSeconds": 299},
            "redis": {"maxMemory": "1023mb"},
            "tls": {"enabled": True, "certManager": {"duration": "721h"}},
        },
        apis=CERTS,
    ),
    "a name with ranks": ValueSet(
        values={
            "fullnameOverride": "b" * (52 - len("-prefill-ranks")),
            "prefill": {"nodes": 2, "tensorParallel": 2},
        }
    ),
    "a name of a LeaderWorkerSet": ValueSet(
        values={
            "fullnameOverride": "b" * (48 - len("-decode-set")),
            "decode": {"nodes": 2, "tensorParallel": 2},
            "multiNode": {"by": "leaderWorkerSet"},
        },
        apis=GROUPS,
    ),
    "a name with a model": ValueSet(
        values={
            "fullnameOverride": "b" * (52 - len("-prefill-") - 20),
            "models": [{"name": "m" * 20, "model": {"source": "file:///m"}}],
        }
    ),
}


@pytest.mark.parametrize("name", AT_THE_LIMIT)
def test_values_at_the_limit_are_not_refused(name: str, renderer: Renderer) -> None:
    rendered = renderer.render(AT_THE_LIMIT[name])
    assert rendered.code == 0, rendered.error


# Of the release's name, above.
OF_NAMES = "%s, made from the release's name"
# Looked up in the cluster that is upgraded: tests/system/helm_life/test_instant.py
OF_UPGRADES = ("%s is of a release from before the link", "redis.persistence is not that of")


def test_every_check_of_the_chart_is_seen_here(renderer: Renderer) -> None:
    checks = "".join(file.read_text() for file in sorted((CHART / "templates").glob("_*.tpl")))
    messages = re.findall(r'fail \(?(?:printf )?"([^"]+)"', checks)
    assert len(messages) >= 30
    messages = [message for message in messages if not message.startswith((*OF_UPGRADES, OF_NAMES))]
    sets = [ValueSet(values=values) for values, _, _ in REFUSED.values()]
    sets += [ValueSet(values=values, apis=CERTS) for values in NEED_CERT_MANAGER]
    seen = [one.error for one in renderer.render_all(sets)]
    for message in messages:
        pattern = re.escape(message).replace("%s", ".*").replace("%d", r"-?\d+")
        assert any(re.search(pattern, error) for error in seen), message
