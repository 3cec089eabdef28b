"""Answers of the API server that are not the objects that were asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.baton.autoscaler.kubernetes_rig import Rig

ANSWERS: dict[str, Any] = {
    "no object": [],
    "a text": "yes",
    "another kind": {"kind": "Status", "apiVersion": "v1"},
    "no status": {"spec": {"replicas": 1}},
    "a text of replicas": {"spec": {"replicas": "many"}, "status": {"selector": "a=b", "replicas": 1}},
    "fewer than none": {"spec": {"replicas": -1}, "status": {"selector": "a=b", "replicas": 1}},
    "no number": {"spec": {"replicas": [1]}, "status": {"selector": "a=b", "replicas": 1}},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_no_such_object_ends_one_round(rig: Rig, name: str, monkeypatch: Any) -> None:
    """A proxy in front of the API may answer anything with 200."""
    asked: Any = rig.platform._api
    real = asked.rest_client.request

    def answered(method: str, url: str, *rest: Any, **more: Any) -> Any:
        response = real(method, url, *rest, **more)
        response.read()
        if url.endswith("/scale"):
            response.data = json.dumps(ANSWERS[name]).encode()
        return response

    monkeypatch.setattr(asked.rest_client, "request", answered)
    assert rig.step() is None
    assert rig.metric("errors_total", part="platform") == 1.0
    monkeypatch.setattr(asked.rest_client, "request", real)
    assert rig.step() is not None


def test_pods_without_metadata_end_one_round(rig: Rig, monkeypatch: Any) -> None:
    core: Any = rig.platform._core
    monkeypatch.setattr(
        core, "list_namespaced_pod", lambda *a, **k: SimpleNamespace(items=[SimpleNamespace()])
    )
    assert rig.step() is None
