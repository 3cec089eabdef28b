"""A pod holds the secrets that it needs and no others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.helm.rendering import Pod, Renderer, pods_of
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system


def _secrets(pod: Pod, container: dict[str, Any]) -> dict[str, set[str]]:
    """Secrets mounted into a container: name → keys; `*` where all of them are."""
    volumes = {one["name"]: one["secret"] for one in pod.spec.get("volumes", []) if "secret" in one}
    mounted = [volumes[one["name"]] for one in container.get("volumeMounts", []) if one["name"] in volumes]
    return {one["secretName"]: {item["key"] for item in one.get("items", [{"key": "*"}])} for one in mounted}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("defaults", {}),
        ("rdma-mtls", {"t-baton-router-tls": {"ca.crt"}}),
        ("a company's issuer", {"t-baton-router-tls": {"ca.crt"}}),
        # Clients must show a certificate: one of the test's own.
        ("own certificates", {"test-tls": {"ca.crt", "tls.crt", "tls.key"}}),
    ],
)
def test_helm_test_has_no_key_of_the_router(
    name: str, expected: dict[str, set[str]], renderer: Renderer
) -> None:
    pods = [one for one in pods_of(renderer.render(VALUE_SETS[name])) if one.component == "test"]
    assert len(pods) >= 4
    for pod in pods:
        (container,) = pod.containers
        assert _secrets(pod, container) == expected
