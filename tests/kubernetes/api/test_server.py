"""The API server, asked by the official Python client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from kubernetes import client

from tests.kubernetes import clients, samples
from tests.kubernetes.api.errors import ApiError
from tests.kubernetes.api.server import ApiServer, names


def apply(
    server: ApiServer, document: dict[str, Any], manager: str, *, force: bool = False
) -> httpx.Response:
    """Server-side apply of a namespaced object of apps/v1."""
    url = f"{server.url}/apis/apps/v1/namespaces/default/{document['kind'].lower()}s/{document['metadata']['name']}"
    query = {"fieldManager": manager, "force": str(force).lower()}
    headers = {"content-type": "application/apply-patch+yaml"}
    return httpx.patch(url, params=query, headers=headers, content=json.dumps(document), trust_env=False)


def test_objects_are_created_read_listed_patched_and_deleted(server: ApiServer, api: Any) -> None:
    core = clients.core(api)
    core.create_namespaced_config_map("default", samples.config_map("a", x="1"))
    core.create_namespaced_config_map(
        "default", {**samples.config_map("b"), "metadata": {"name": "b", "labels": {"l": "1"}}}
    )
    assert core.read_namespaced_config_map("a", "default").data == {"x": "1"}
    listed = core.list_namespaced_config_map("default", label_selector="l in (1,2)")
    assert [one.metadata.name for one in listed.items] == ["b"]
    core.patch_namespaced_config_map("a", "default", {"data": {"x": None, "y": "2"}})
    assert server.object("ConfigMap", "a")["data"] == {"y": "2"}
    core.delete_namespaced_config_map("a", "default")
    assert names(server.objects("ConfigMap")) == ["b"]
    with pytest.raises(client.ApiException) as refused:
        core.read_namespaced_config_map("a", "default")
    assert refused.value.status == 404


def test_a_stale_update_is_a_conflict(server: ApiServer, api: Any) -> None:
    core = clients.core(api)
    first = core.create_namespaced_config_map("default", samples.config_map("a", x="1"))
    core.patch_namespaced_config_map("a", "default", {"data": {"x": "2"}})
    first.data = {"x": "3"}
    with pytest.raises(client.ApiException) as refused:
        core.replace_namespaced_config_map("a", "default", first)
    assert refused.value.status == 409


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"image": None}, "image"),
        ({"imag": "x"}, "imag"),
        ({"volumeMounts": [{"name": "no", "mountPath": "/a"}]}, "there is no volume 'no'"),
        ({"ports": [{"name": "much-too-long-name", "containerPort": 1}]}, "15 characters"),
        ({"readinessProbe": {}}, "exactly one handler"),
        ({"ports": [{"containerPort": "http"}]}, "containerPort"),
    ],
)
def test_objects_that_kubernetes_would_refuse_are_refused(
    change: dict[str, Any], word: str, server: ApiServer
) -> None:
    with pytest.raises(ApiError) as refused:
        server.create(samples.deployment("web", **change))
    assert word in refused.value.message
    assert refused.value.code in (400, 422)


def test_a_selector_must_select_its_own_pods(server: ApiServer) -> None:
    wrong = samples.deployment("web")
    wrong["spec"]["selector"]["matchLabels"] = {"app": "other"}
    with pytest.raises(ApiError, match="does not select"):
        server.create(wrong)


def test_a_watch_begins_with_the_present_objects_and_marks_their_end(server: ApiServer, api: Any) -> None:
    server.create(samples.config_map("a"))
    core = clients.core(api)
    seen = []
    stream = clients.events(
        core.list_namespaced_config_map,
        "default",
        send_initial_events=True,
        resource_version_match="NotOlderThan",
        allow_watch_bookmarks=True,
        timeout_seconds=20,
    )
    for event in stream:
        meta = event["raw_object"]["metadata"]
        seen.append((event["type"], meta.get("name", ""), (meta.get("annotations") or {})))
        if event["type"] == "BOOKMARK" and len(seen) == 2:
            server.create(samples.config_map("b"))
        if seen[-1][1] == "b":
            break
    assert seen == [
        ("ADDED", "a", {}),
        ("BOOKMARK", "", {"k8s.io/initial-events-end": "true"}),
        ("ADDED", "b", {}),
    ]


def test_a_watch_of_labels_reports_objects_that_stop_matching(server: ApiServer, api: Any) -> None:
    core = clients.core(api)
    labelled = {**samples.config_map("a"), "metadata": {"name": "a", "labels": {"on": "1"}}}
    revision = server.create(labelled)["metadata"]["resourceVersion"]
    core.patch_namespaced_config_map("a", "default", {"data": {"x": "1"}})
    core.patch_namespaced_config_map("a", "default", {"metadata": {"labels": {"on": "0"}}})
    stream = clients.events(
        core.list_namespaced_config_map,
        "default",
        label_selector="on=1",
        resource_version=revision,
        timeout_seconds=1,
    )
    assert [event["type"] for event in stream] == ["MODIFIED", "DELETED"]


def test_apply_keeps_what_others_own_and_drops_what_is_no_longer_applied(server: ApiServer, api: Any) -> None:
    first = samples.deployment("web", 2, env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}])
    apply(server, first, "helm")
    clients.apps(api).patch_namespaced_deployment(
        "web", "default", {"metadata": {"annotations": {"mine": "1"}}}
    )
    second = samples.deployment("web", 2, env=[{"name": "A", "value": "1"}])
    after = apply(server, second, "helm").json()
    container = after["spec"]["template"]["spec"]["containers"][0]
    assert container["env"] == [{"name": "A", "value": "1"}]
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert after["metadata"]["annotations"] == {"mine": "1"}
    assert after["metadata"]["generation"] == 2
    again = apply(server, second, "helm").json()
    assert again["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]


def test_replicas_that_were_scaled_conflict_with_replicas_that_are_applied(
    server: ApiServer, api: Any
) -> None:
    apps = clients.apps(api)
    apply(server, samples.stateful_set("db", 1), "helm")
    scale = apps.patch_namespaced_stateful_set_scale("db", "default", {"spec": {"replicas": 3}})
    assert scale.spec.replicas == 3
    refused = apply(server, samples.stateful_set("db", 1), "helm")
    assert refused.status_code == 409
    assert ".spec.replicas" in refused.json()["message"]
    without = samples.stateful_set("db")
    del without["spec"]["replicas"]
    assert apply(server, without, "helm").json()["spec"]["replicas"] == 3
    assert apply(server, samples.stateful_set("db", 1), "helm", force=True).json()["spec"]["replicas"] == 1


def test_the_identity_of_a_stateful_set_cannot_change(server: ApiServer, api: Any) -> None:
    server.create(samples.stateful_set("db"))
    with pytest.raises(client.ApiException) as refused:
        clients.apps(api).patch_namespaced_stateful_set("db", "default", {"spec": {"serviceName": "other"}})
    assert refused.value.status == 422


def test_a_service_accounts_token_is_held_to_its_roles(server: ApiServer, tmp_path: Path) -> None:
    rbac = "rbac.authorization.k8s.io/v1"
    server.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "scaler"}})
    rule = {
        "apiGroups": ["apps"],
        "resources": ["statefulsets/scale"],
        "resourceNames": ["db"],
        "verbs": ["patch"],
    }
    server.create({"apiVersion": rbac, "kind": "Role", "metadata": {"name": "scaler"}, "rules": [rule]})
    binding = {
        "subjects": [{"kind": "ServiceAccount", "name": "scaler"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "scaler"},
    }
    server.create({"apiVersion": rbac, "kind": "RoleBinding", "metadata": {"name": "scaler"}, **binding})
    for name in ("db", "other"):
        server.create(samples.stateful_set(name))
    token = server.access.token("default", "scaler")
    with clients.connect(server.kubeconfig(tmp_path / "sa", token)) as api:
        apps = clients.apps(api)
        body = {"spec": {"replicas": 2}}
        assert apps.patch_namespaced_stateful_set_scale("db", "default", body).spec.replicas == 2
        with pytest.raises(client.ApiException) as refused:
            apps.patch_namespaced_stateful_set_scale("other", "default", body)
        assert refused.value.status == 403
        with pytest.raises(client.ApiException) as refused:
            apps.read_namespaced_stateful_set("db", "default")
        assert refused.value.status == 403


def test_a_users_missing_permission_shows_in_an_access_review(server: ApiServer, api: Any) -> None:
    server.access.deny("create", "roles", "rbac.authorization.k8s.io")
    review = clients.authorization(api)

    def allowed(resource: str) -> bool:
        attributes = {
            "verb": "create",
            "group": "rbac.authorization.k8s.io",
            "resource": resource,
            "namespace": "default",
        }
        answer = review.create_self_subject_access_review({"spec": {"resourceAttributes": attributes}})
        return bool(answer.status.allowed)

    assert (allowed("roles"), allowed("rolebindings")) == (False, True)


def test_nodes_report_what_they_can_allocate(server: ApiServer, api: Any) -> None:
    server.add_node("gpu-1", {"topology.kubernetes.io/zone": "a"}, {"nvidia.com/gpu": "8"})
    (node,) = clients.core(api).list_node().items
    assert node.status.allocatable["nvidia.com/gpu"] == "8"
    assert node.metadata.labels["topology.kubernetes.io/zone"] == "a"


def test_a_definition_adds_a_kind_with_a_schema(server: ApiServer, api: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "spec": {"type": "object", "required": ["size"], "properties": {"size": {"type": "integer"}}}
        },
    }
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    spec = {
        "group": "example.com",
        "scope": "Namespaced",
        "names": {"plural": "things", "kind": "Thing"},
        "versions": [version],
    }
    meta = {"name": "things.example.com"}
    server.create(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": meta,
            "spec": spec,
        }
    )
    custom = client.CustomObjectsApi(api)
    thing = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "a"}, "spec": {"size": 1}}
    custom.create_namespaced_custom_object("example.com", "v1", "default", "things", thing)
    assert names(server.objects("Thing")) == ["a"]
    for wrong in ({"size": "1"}, {"size": 1, "colour": "red"}, {}):
        with pytest.raises(client.ApiException) as refused:
            custom.create_namespaced_custom_object(
                "example.com", "v1", "default", "things", {**thing, "metadata": {"name": "b"}, "spec": wrong}
            )
        assert refused.value.status in (400, 422)
