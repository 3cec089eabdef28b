"""The whole life of a release with Helm 3 and 4: every step waits for the pods, which are ready at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.waiting import wait_for
from tests.kubernetes import clients
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.server import ApiServer, names
from tests.kubernetes.controllers.cluster import instant_cluster
from tests.system.conftest import _install
from tests.system.helm.refused import cluster
from tests.system.helm_life.helm import CHART, DEMO, NAMESPACE, RELEASE, Helm, HelmFailed, kubectl

pytestmark = pytest.mark.system

MakeHelm = Callable[[ApiServer], Helm]
VALUES = ("--values", str(DEMO))
ROUTER = "one-baton-router"


def left(server: ApiServer) -> list[tuple[str, str]]:
    """Everything but namespaces."""
    everything = server.objects_api.store.everything()
    return [(key.kind.name, key.name) for key, _ in everything if key.kind.name != "Namespace"]


def replicas(server: ApiServer, kind: str, name: str) -> tuple[int, int]:
    found = server.object(kind, name, NAMESPACE)
    return found["spec"]["replicas"], found["status"]["readyReplicas"]


def releases(server: ApiServer) -> list[str]:
    """Helm's records of the release, one per revision."""
    return [
        name for name in names(server.objects("Secret", NAMESPACE)) if name.startswith("sh.helm.release.")
    ]


def secret(server: ApiServer) -> Object:
    return dict(server.object("Secret", "one-baton", NAMESPACE)["data"])


def test_install_test_upgrade_rollback_uninstall(server: ApiServer, make_helm: MakeHelm) -> None:
    helm = make_helm(server)
    assert "STATUS: deployed" in helm.install(*VALUES)
    assert replicas(server, "StatefulSet", "one-baton-decode") == (2, 2)
    assert replicas(server, "Deployment", ROUTER) == (2, 2)
    assert len(names(server.objects("Pod", NAMESPACE))) == 6
    before = secret(server)

    tested = helm.test()
    assert tested.count("Phase:          Succeeded") >= 5
    assert "Failed" not in tested
    # Each was kept until the next run, or until it had succeeded: as the chart says.
    assert not server.objects("Job", NAMESPACE)

    helm.upgrade(*VALUES, "--set", "router.replicas=3,decode.maxBatchRequests=77")
    assert replicas(server, "Deployment", ROUTER) == (3, 3)
    assert (
        "max_batch_requests: 77"
        in server.object("ConfigMap", "one-baton-decode", NAMESPACE)["data"]["worker.yaml"]
    )
    assert secret(server) == before, "an upgrade must not make new secrets"

    helm.rollback(1)
    assert replicas(server, "Deployment", ROUTER) == (2, 2)
    assert "max_batch_requests: 77" not in str(
        server.object("ConfigMap", "one-baton-decode", NAMESPACE)["data"]
    )
    assert secret(server) == before

    helm.uninstall()
    wait_for(lambda: not left(server), 20.0, f"nothing is left of it: {left(server)}")


def test_changed_configuration_rolls_the_pods_it_concerns_and_no_others(
    server: ApiServer, make_helm: MakeHelm
) -> None:
    helm = make_helm(server)
    helm.install(*VALUES)
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in server.objects("Pod", NAMESPACE)}
    helm.upgrade(*VALUES, "--set", "decode.maxBatchRequests=77")
    after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in server.objects("Pod", NAMESPACE)}
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"one-baton-decode-0", "one-baton-decode-1"}


def test_pods_follow_a_changed_password_of_redis(server: ApiServer, tmp_path: Path) -> None:
    """Its hash is in no annotation: what counts is that the Secret in the cluster has another URL."""
    helm = Helm(_install(4), server.kubeconfig(tmp_path / "kubeconfig"), tmp_path)

    def change(step: str, everybody: str, router: str) -> set[str]:
        """Install or upgrade, without waiting for pods; the components whose pods it replaces."""
        before = templates()
        values = "redis.enabled=false,ray.mode=none,externalRedis"
        values += f".url=redis://:{everybody}@redis,externalRedis.router.url=redis://:{router}@redis"
        helm(step, RELEASE, str(CHART), "--create-namespace", "--no-hooks", *VALUES, "--set", values)
        return {name for name, template in templates().items() if before.get(name) != template}

    def templates() -> dict[str, Object]:
        kinds = ("StatefulSet", "Deployment")
        found = [one for kind in kinds for one in server.objects(kind, NAMESPACE)]
        return {one["metadata"]["name"].rpartition("-")[2]: one["spec"]["template"] for one in found}

    workers = {"prefill", "decode"}
    assert change("install", "a", "a") == workers | {"router"}
    assert change("upgrade", "b", "a") == workers
    assert change("upgrade", "b", "a") == set()
    assert change("upgrade", "b", "b") == {"router"}
    before = templates()
    helm("rollback", RELEASE, "1", "--no-hooks")
    assert all(before[name] != template for name, template in templates().items())
    assert change("upgrade", "c", "a") == workers


def test_upgrades_that_cannot_work_are_refused(
    server: ApiServer, make_helm: MakeHelm, tmp_path: Path
) -> None:
    """From before the link between routers and workers, and with other claims than those of the running Redis."""
    helm = make_helm(server)

    def with_claim(size: str) -> tuple[str, ...]:
        return (*VALUES, "--set", f"redis.persistence.enabled=true,redis.persistence.size={size}")

    helm.install(*with_claim("2048Mi"))
    for others in (
        VALUES,
        with_claim("3Gi"),
        (*with_claim("2Gi"), "--set", "redis.persistence.storageClass=x"),
    ):
        with pytest.raises(HelmFailed, match="kubectl delete statefulset one-baton-redis --namespace"):
            helm.upgrade(*others)
    helm.upgrade(*with_claim("2048Mi"))
    # As much, so the chart lets it pass; a real API server does too, that of the tests compares texts.
    with pytest.raises(HelmFailed, match="updates to volumeClaimTemplates are forbidden"):
        helm.upgrade(*with_claim("2Gi"))
    helm.uninstall()
    helm.install(*VALUES)
    config = server.object("ConfigMap", "one-baton-decode", NAMESPACE)["data"]["worker.yaml"]
    lines = [line for line in config.splitlines() if not line.startswith("link_port:")]
    assert len(lines) == len(config.splitlines()) - 1
    with clients.connect(server.kubeconfig(tmp_path / "older")) as api:
        older = {"data": {"worker.yaml": "\n".join(lines)}}
        clients.core(api).patch_namespaced_config_map("one-baton-decode", NAMESPACE, older)
    with pytest.raises(HelmFailed, match="from before the link"):
        helm.upgrade(*VALUES)
    helm.uninstall()
    helm.install(*VALUES)
    helm.upgrade(*VALUES)


@pytest.mark.parametrize(
    "name", ["nodes beside workers of no Ray", "one port of two of Ray's", "two listeners on one port"]
)
def test_an_upgrade_to_refused_values_changes_nothing(
    name: str, server: ApiServer, make_helm: MakeHelm, tmp_path: Path
) -> None:
    helm = make_helm(server)
    helm("install", RELEASE, str(CHART), "--create-namespace", "--no-hooks", *VALUES)
    values, wrong, change = cluster.REFUSED[name]
    file = tmp_path / "refused.yaml"
    file.write_text(json.dumps(values))
    before = releases(server)
    for kept in ((), ("--reset-then-reuse-values",)):
        with pytest.raises(HelmFailed) as refused:
            helm.upgrade(*VALUES, "--values", str(file), *kept)
        assert wrong in str(refused.value) and change in str(refused.value)
    assert releases(server) == before


def test_claims_of_redis_change_after_the_command_that_the_refusal_names(
    server: ApiServer, make_helm: MakeHelm, tmp_path: Path
) -> None:
    """The Redis's pod goes with its StatefulSet: one that another adopts is never given a claim."""
    helm = make_helm(server)
    kept = (*VALUES, "--set", "redis.persistence.enabled=true")
    redis = "one-baton-redis"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubectl")),
    }
    helm.install(*VALUES)
    for values in (kept, (*kept, "--set", "redis.persistence.size=16Gi"), VALUES):
        with pytest.raises(HelmFailed) as refused:
            helm.upgrade(*values)
        named = re.search(r"kubectl (delete statefulset .*) and upgrade again", str(refused.value))
        assert named is not None, refused.value
        command = [str(kubectl()), *named[1].split()]
        subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True)
        assert f"{redis}-0" not in names(server.objects("Pod", NAMESPACE))
        helm.upgrade(*values)
        (data,) = server.object("Pod", f"{redis}-0", NAMESPACE)["spec"]["volumes"]
        claimed = data.get("persistentVolumeClaim")
        assert claimed == (None if values is VALUES else {"claimName": f"data-{redis}-0"})
    (claim,) = server.objects("PersistentVolumeClaim", NAMESPACE)
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi", "one that exists stays as it is"


@pytest.mark.parametrize("persistence", [False, True])
def test_of_what_the_chart_made_only_redis_claim_stays(
    persistence: bool, server: ApiServer, make_helm: MakeHelm
) -> None:
    """Kubernetes keeps the claims of a StatefulSet: the page names the command that deletes it."""
    helm = make_helm(server)
    kept = [("PersistentVolumeClaim", f"data-{RELEASE}-baton-redis-0")] if persistence else []
    helm.install(*VALUES, "--set", f"redis.persistence.enabled={str(persistence).lower()}")
    helm.uninstall()
    wait_for(lambda: left(server) == kept, 20.0, f"only its claim is left: {left(server)}")
    page = (CHART.parents[2] / "docs" / "kubernetes.md").read_text()
    removal = page.partition("To remove it")[2].partition("\n## ")[0]
    command = "kubectl delete pvc --ignore-not-found data-baton-redis-0"  # of the page's release, `baton`
    assert command in removal and "redis.persistence" in removal


def test_an_upgrade_keeps_the_autoscalers_replicas(
    server: ApiServer, make_helm: MakeHelm, tmp_path: Path
) -> None:
    helm = make_helm(server)
    flags = (*VALUES, "--set", "autoscaling.enabled=true,decode.replicas=null,prefill.replicas=null")
    helm.install(*flags)
    with clients.connect(server.kubeconfig(tmp_path / "scaler")) as api:
        apps = clients.apps(api)
        apps.patch_namespaced_stateful_set_scale("one-baton-decode", NAMESPACE, {"spec": {"replicas": 3}})
    wait_for(lambda: replicas(server, "StatefulSet", "one-baton-decode") == (3, 3), 20.0, "scaled")
    helm.upgrade(*flags, "--set", "decode.maxBatchRequests=77")
    assert replicas(server, "StatefulSet", "one-baton-decode") == (3, 3)
    helm.rollback(1)
    assert replicas(server, "StatefulSet", "one-baton-decode") == (3, 3)


def scale(server: ApiServer, folder: Path, wanted: int) -> None:
    """As autoscalers do."""
    body = {"spec": {"replicas": wanted}}
    with clients.connect(server.kubeconfig(folder / "scaler")) as api:
        apps = clients.apps(api)
        apps.patch_namespaced_stateful_set_scale("one-baton-decode", NAMESPACE, body)
        apps.patch_namespaced_deployment_scale(ROUTER, NAMESPACE, body)
    wait_for(lambda: sizes(server) == (wanted, wanted), 20.0, "scaled")


def sizes(server: ApiServer) -> tuple[int, int]:
    """Decode workers and routers that are wanted and ready."""
    pools = (("StatefulSet", "one-baton-decode"), ("Deployment", ROUTER))
    (decode, ready), (router, ready_routers) = (replicas(server, *pool) for pool in pools)
    return (decode, router) if (decode, router) == (ready, ready_routers) else (-1, -1)


def test_autoscalers_begin_with_the_replicas_that_run(
    server: ApiServer, make_helm: MakeHelm, tmp_path: Path
) -> None:
    """Kubernetes would set 1 where a number is no longer given, and end the other pods."""
    helm = make_helm(server)
    on = "autoscaling.enabled=true,decode.replicas=null,prefill.replicas=null"
    scaled = (*VALUES, "--set", f"{on},router.autoscaling.enabled=true,router.replicas=null")
    helm.install(*VALUES, "--set", "decode.replicas=3,router.replicas=3")
    before = {pod["metadata"]["name"] for pod in server.objects("Pod", NAMESPACE)}
    helm.upgrade(*scaled)
    assert sizes(server) == (3, 3)
    scale(server, tmp_path, 4)
    helm.upgrade(*scaled)
    assert sizes(server) == (4, 4), "nor does the upgrade after it"
    assert {one for one in before if "decode" in one} < set(names(server.objects("Pod", NAMESPACE)))
    fixed = (*VALUES, "--set", "decode.replicas=2,router.replicas=2")
    if helm.binary != _install(3):  # applies on the server, where the autoscalers' number is theirs
        with pytest.raises(HelmFailed, match=r"conflict .* \.spec\.replicas"):
            helm.upgrade(*fixed)
        helm.upgrade(*fixed, "--force-conflicts")
    else:
        helm.upgrade(*fixed)
    assert sizes(server) == (2, 2)


def test_an_install_whose_pods_do_not_get_ready_fails(make_helm: MakeHelm) -> None:
    """Or the waiting above would prove nothing."""

    def outcome(pod: Object) -> tuple[str, bool]:
        return "Running", "decode" not in pod["metadata"]["name"]

    with instant_cluster(outcome) as server:
        helm = make_helm(server)
        with pytest.raises(HelmFailed):
            helm.install(*VALUES, seconds=4)
