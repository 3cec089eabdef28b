"""The limit of memory of a container: what it ends, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.images import name_of
from tests.harness.waiting import wait_for
from tests.kubernetes import samples
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers import pods
from tests.kubernetes.kubelet.cluster import container_cluster

pytestmark = pytest.mark.system
SECONDS = 60.0
LIMIT = "128Mi"
HOG = "python -c 'held = bytearray(300 << 20)'"


def test_the_limit_ends_what_is_over_it_and_is_told(tmp_path: Path) -> None:
    """A child that is killed ends no container; the first process does, and the status says of what it ended."""
    with container_cluster(tmp_path / "cluster") as cluster:
        names = {"child": f"{HOG}; echo code $?", "first": f"exec {HOG}", "unlimited": f"exec {HOG}"}
        for name, command in names.items():
            made = samples.pod(name, image=name_of("router"), command=["sh", "-c", command])
            if name != "unlimited":
                made["spec"]["containers"][0]["resources"] = {"limits": {"memory": LIMIT}}
            made["spec"]["restartPolicy"] = "Never"
            cluster.server.create(made)

        def ended(name: str) -> Object:
            wait_for(lambda: pods.is_over(cluster.server.object("Pod", name)), SECONDS, f"{name} has ended")
            status = cluster.server.object("Pod", name)["status"]["containerStatuses"][0]
            return {key: status["state"]["terminated"][key] for key in ("exitCode", "reason")}

        assert ended("first") == {"exitCode": 137, "reason": "OOMKilled"}
        assert ended("unlimited") == {"exitCode": 0, "reason": "Completed"}
        assert ended("child") == {"exitCode": 0, "reason": "Completed"}
        assert b"code 137" in cluster.kubelet.logs("default", "child", "main")
        assert cluster.controllers.problems == []
