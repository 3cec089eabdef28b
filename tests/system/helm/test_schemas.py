"""Every manifest against Kubernetes' own schemas (strict) of three versions, or its operator's."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.system.helm.rendering import Manifest, Renderer, templates_of
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
VERSIONS = ("1.29", "1.32", "1.37")
CRDS = Path(__file__).parent / "crds"
# Groups that come with Kubernetes; every other one is an operator's.
BUILT_IN = {"", "apps", "batch", "policy", "autoscaling", "networking.k8s.io", "rbac.authorization.k8s.io"}


def _group(manifest: Manifest) -> str:
    group, _, version = manifest["apiVersion"].rpartition("/")
    return group if version else ""


@lru_cache
def _custom(group: str, kind: str) -> jsonschema.Draft202012Validator:
    for file in CRDS.glob(f"{group}_*.yaml"):
        found = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)["spec"]
        if found["names"]["kind"] == kind:
            (version,) = [one for one in found["versions"] if one["storage"]]
            return jsonschema.Draft202012Validator(_strict(version["schema"]["openAPIV3Schema"]))
    raise AssertionError(f"no schema for {group} {kind} in {CRDS}")


def _strict(schema: Any, *, top: bool = True) -> Any:
    """A structural schema that also refuses what the API server would silently drop."""
    if isinstance(schema, list):
        return [_strict(one, top=False) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value, top=False) for key, value in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema
    if closed and not top and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return made


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """The library reads a megabyte of definitions for every manifest otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", lru_cache(maxsize=None)(utils.schema_contents))
        yield


@pytest.fixture(scope="module")
def valid() -> set[str]:
    """Manifests found valid: most value sets share most of theirs."""
    return set()


@pytest.mark.parametrize("name", VALUE_SETS)
def test_manifests_are_valid(name: str, renderer: Renderer, valid: set[str]) -> None:
    rendered = renderer.render(VALUE_SETS[name])
    assert rendered.manifests
    for manifest in rendered.manifests:
        if (text := json.dumps(manifest, sort_keys=True)) in valid:
            continue
        group = _group(manifest)
        versions = [one for one in VERSIONS if _number(one) >= _number(VALUE_SETS[name].since)]
        if group in BUILT_IN:
            _validate(manifest, versions)
        else:
            _custom(group, manifest["kind"]).validate(manifest)
        if manifest["kind"] == "LeaderWorkerSet":
            for template in templates_of(manifest):
                metadata = {"name": "one", **template["metadata"]}
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
                _validate(pod, versions)
        valid.add(text)


def _validate(manifest: Manifest, versions: Sequence[str]) -> None:
    for version in versions:
        kubernetes_validate.validate(manifest, version, strict=True)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize(
    ("name", "kind", "place", "field"),
    [
        ("leader worker set", "LeaderWorkerSet", ("leaderWorkerTemplate",), "sizes"),
        ("routes of a Gateway", "HTTPRoute", ("rules", 0, "timeouts"), "idle"),
        ("routes of a Gateway", "GRPCRoute", ("rules", 0), "timeouts"),
    ],
)
def test_the_schemas_of_operators_are_strict(
    name: str, kind: str, place: tuple[str | int, ...], field: str, renderer: Renderer
) -> None:
    manifest = copy.deepcopy(renderer.render(VALUE_SETS[name]).of(kind)[0])
    inner: Any = manifest["spec"]
    for part in place:
        inner = inner[part]
    inner[field] = {}
    with pytest.raises(jsonschema.ValidationError, match=field):
        _custom(_group(manifest), kind).validate(manifest)


def test_a_misspelt_field_of_a_custom_resource_is_refused(renderer: Renderer) -> None:
    """Or the test above would prove nothing."""
    (service,) = renderer.render(VALUE_SETS["kuberay"]).of("RayService")
    service = yaml.safe_load(yaml.safe_dump(service))
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParameters"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParameters"):
        _custom("ray.io", "RayService").validate(service)


def test_a_misspelt_field_of_kubernetes_is_refused(renderer: Renderer) -> None:
    manifest = renderer.render(VALUE_SETS["defaults"]).named("Deployment", "t-baton-router")
    manifest = yaml.safe_load(yaml.safe_dump(manifest))
    manifest["spec"]["replica"] = 2
    for version in VERSIONS:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(manifest, version, strict=True)
