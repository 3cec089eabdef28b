"""Impossible values are refused while rendering, with a sentence that names the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.system.helm.refused import cluster, models, workers
from tests.system.helm.refused.form import Refusals
from tests.system.helm.rendering import CHART, Renderer, ValueSet
from tests.system.helm.value_sets import CERTS

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
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_not_a_value(values: dict[str, Any], renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values=values))
    assert rendered.code != 0
    assert "values don't meet the specifications of the schema" in rendered.error


# Looked up in the cluster that is upgraded: tests/system/helm_life/test_instant.py
OF_UPGRADES = "%s is of a release from before the link"


def test_every_check_of_the_chart_is_seen_here(renderer: Renderer) -> None:
    checks = "".join(file.read_text() for file in sorted((CHART / "templates").glob("_*.tpl")))
    messages = re.findall(r'fail \(?(?:printf )?"([^"]+)"', checks)
    assert len(messages) >= 30
    messages = [message for message in messages if not message.startswith(OF_UPGRADES)]
    sets = [ValueSet(values=values) for values, _, _ in REFUSED.values()]
    sets += [ValueSet(values=values, apis=CERTS) for values in NEED_CERT_MANAGER]
    seen = [one.error for one in renderer.render_all(sets)]
    for message in messages:
        pattern = re.escape(message).replace("%s", ".*").replace("%d", r"-?\d+")
        assert any(re.search(pattern, error) for error in seen), message
