"""`baton doctor` against an API server with the nodes, resources and permissions of different clusters."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes.client
import orjson
import pytest
import yaml
from typer.testing import CliRunner, Result

from baton.cli.main import app
from baton.doctor.checks import judge
from baton.doctor.facts import Facts, Node, Permission, Taint
from baton.doctor.reading import Reader, connect, default_namespace
from baton.doctor.values import values_for
from cluster.errors import ConfigError, UnavailableError
from tests.baton.doctor.clusters import H100, LARGE, crd, equip
from tests.kubernetes.api.server import ApiServer


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def look(server: ApiServer, tmp_path: Path, namespace: str = "default") -> Facts:
    with connect(server.kubeconfig(tmp_path / "kubeconfig"), "") as api:
        return Reader(api, namespace, 10.0).read()


def grades(facts: Facts) -> dict[str, str]:
    return {check.name: check.grade for check in judge(facts)}


def test_a_cluster_with_everything(server: ApiServer, tmp_path: Path) -> None:
    equip(server)
    facts = look(server, tmp_path)
    found = grades(facts)
    assert found.pop("RDMA") == "warning"  # one node with a GPU has none
    assert set(found.values()) == {"ok"}, judge(facts)
    values = values_for(facts)
    for role in ("prefill", "decode"):
        assert values[role] == {
            "gpus": 1,
            "tensorParallel": 1,
            "gpuResource": "nvidia.com/gpu",
            "rdma": {"resourceName": "rdma/hca_shared_devices_a"},
            "pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
        }
    assert "ray" not in values  # each worker has one pod, and does without Ray
    assert values["tls"] == {"enabled": True, "source": "certManager"}
    assert values["observability"] == {"monitors": {"enabled": True}, "rules": {"enabled": True}}
    assert "topology" not in values


def test_a_bare_cluster_gets_values_for_cpus(server: ApiServer, tmp_path: Path) -> None:
    server.add_node("only")
    facts = look(server, tmp_path)
    found = grades(facts)
    assert (found["GPUs"], found["KubeRay"], found["cert-manager"]) == ("warning", "info", "info")
    assert "missing" not in found.values()
    values = values_for(facts)
    assert values["prefill"]["gpus"] == values["decode"]["gpus"] == 0
    assert "ray" not in values and "tls" not in values and "observability" not in values


def test_an_empty_cluster_and_a_refused_user_are_missing_something(server: ApiServer, tmp_path: Path) -> None:
    server.access.deny("create", "statefulsets", "apps")
    facts = look(server, tmp_path)
    found = {check.name: check for check in judge(facts)}
    assert found["nodes"].grade == "missing"
    assert found["permissions"].grade == "missing"
    assert "create statefulsets.apps" in found["permissions"].found


def test_objects_without_read_access_are_unknown_and_not_missing(server: ApiServer, tmp_path: Path) -> None:
    equip(server)
    server.access.deny("list", "nodes")
    server.access.deny("list", "customresourcedefinitions", "apiextensions.k8s.io")
    found = {check.name: check for check in judge(look(server, tmp_path))}
    for name in ("nodes", "GPUs", "KubeRay"):
        assert found[name].grade == "warning"
        assert found[name].found == "unknown: 403 Forbidden"


def test_the_command_prints_a_table_json_and_values(server: ApiServer, tmp_path: Path) -> None:
    equip(server)
    table = run(server, tmp_path)
    assert table.exit_code == 0, table
    for word in (
        "gpu-0",
        "NVIDIA-H100-80GB-HBM3",
        "KubeRay",
        "rdma/hca_shared_devices_a",
        "source: certManager",
    ):
        assert word in table.stdout
    answer = json.loads(run(server, tmp_path, "--json").stdout)
    assert answer["ok"] is True
    assert answer["gpus"][0] == {
        "product": "NVIDIA-H100-80GB-HBM3",
        "resource": "nvidia.com/gpu",
        "allocatable": 16,
    }
    printed = run(server, tmp_path, "--values").stdout
    assert yaml.safe_load(printed) == answer["values"]
    assert "&" not in printed and "*" not in printed  # what both pools share is written twice
    server.access.deny("create", "secrets")
    assert run(server, tmp_path, "--json").exit_code == 2


def run(server: ApiServer, tmp_path: Path, *flags: str) -> Result:
    config = str(server.kubeconfig(tmp_path / "kubeconfig"))
    return CliRunner().invoke(app, ["doctor", "--kubeconfig", config, *flags], env={"COLUMNS": "160"})


def test_the_namespace_is_the_one_that_helm_would_install_in(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = server.kubeconfig(tmp_path / "kubeconfig")
    assert default_namespace(file, "") == "default"
    config = yaml.safe_load(file.read_text())
    other = {"name": "other", "context": {**config["contexts"][0]["context"], "namespace": "elsewhere"}}
    config["contexts"][0]["context"]["namespace"] = "serving"
    file.write_text(yaml.safe_dump({**config, "contexts": [*config["contexts"], other]}))
    assert (default_namespace(file, ""), default_namespace(file, "other")) == ("serving", "elsewhere")
    server.access.deny("create", "statefulsets", "apps")
    said = CliRunner().invoke(app, ["doctor", "--kubeconfig", str(file), "--json"]).stdout
    (permissions,) = [one for one in json.loads(said)["checks"] if one["name"] == "permissions"]
    assert permissions["found"].endswith(" in serving")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "namespace").write_text("the-pods\n")
    monkeypatch.setattr("baton.doctor.reading.POD_NAMESPACE", tmp_path / "namespace")
    assert default_namespace(None, "") == "the-pods"


def test_rights_are_not_checked_without_a_redis(tmp_path: Path) -> None:
    flags = ["doctor", "--kubeconfig", str(tmp_path / "none"), "--redis-component", "worker"]
    with pytest.raises(ConfigError, match="--redis-component needs --redis-url"):
        CliRunner().invoke(app, flags, catch_exceptions=False)


def test_an_external_redis_is_checked_where_no_cluster_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kubeconfig nothing was checked at all."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    flags = ["doctor", "--redis-url", "redis://127.0.0.1:1", "--json"]
    found = CliRunner().invoke(app, flags, catch_exceptions=False)
    checks = {one["name"]: one for one in orjson.loads(found.stdout)["checks"]}
    assert found.exit_code == 2 and checks["kubernetes"]["found"] == "not checked"
    assert "missing" in {one["grade"] for one in checks.values()}
    table = CliRunner().invoke(app, flags[:-1], catch_exceptions=False)
    assert table.exit_code == 2 and "not checked" in table.stdout
    for named in ("--context x", f"--kubeconfig {tmp_path}/none", "--values"):
        with pytest.raises(ConfigError, match="no way to a cluster"):
            CliRunner().invoke(app, [*flags, *named.split()], catch_exceptions=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no way to a cluster"):
        CliRunner().invoke(app, flags, catch_exceptions=False)


def kubeconfig(address: str) -> dict[str, Any]:
    return {
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def test_a_missing_cluster_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as missing, connect(tmp_path / "none", ""):
        raise AssertionError("there is no such file")
    assert missing.value.field == "kubeconfig"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        unreachable = f"http://127.0.0.1:{sock.getsockname()[1]}"
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump(kubeconfig(unreachable)))
        with connect(file, "") as api, pytest.raises(UnavailableError, match="does not answer"):
            Reader(api, "default", 2.0).read()


class Page(BaseHTTPRequestHandler):
    """Answers every request alike, as a proxy does that wants a password first."""

    content = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def page(content: bytes, tmp_path: Path) -> Iterator[Path]:
    """A server of it, as a kubeconfig names it."""
    listener = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (Page,), {"content": content}))
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(kubeconfig(f"http://127.0.0.1:{listener.server_port}")))
    try:
        yield file
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


@pytest.mark.parametrize("content", [b"<html>please log in</html>", b"{}", b"[]", b"null"])
def test_what_is_no_kubernetes_api_is_said_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    with (
        page(content, tmp_path) as file,
        connect(file, "") as api,
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:.* is no Kubernetes API") as raised,
    ):
        Reader(api, "default", 5.0).read()
    assert raised.value.field == "kubeconfig"


def test_objects_of_another_form_are_unknown(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are judged all the same."""
    equip(server)
    without_status = {"metadata": {"name": "odd"}, "spec": {}}
    with connect(server.kubeconfig(tmp_path / "kubeconfig"), "") as api:
        listed = kubernetes.client.V1NodeList(items=[kubernetes.client.V1Node.from_dict(without_status)])
        monkeypatch.setattr("kubernetes.client.CoreV1Api.list_node", lambda *_, **__: listed)
        facts = Reader(api, "default", 10.0).read()
    found = {check.name: check for check in judge(facts)}
    assert found["nodes"].found == "unknown: an answer of another form (AttributeError)"
    assert found["KubeRay"].grade == "ok"


def gpu_node(name: str, allocatable: dict[str, str], *taints: Taint, **more: Any) -> Node:
    return Node(
        name,
        **{"ready": True, "schedulable": True, "labels": {}, **more},
        allocatable=allocatable,
        taints=taints,
    )


def test_taints_of_all_gpu_nodes_are_tolerated() -> None:
    gpu, own = Taint("nvidia.com/gpu", "", "NoSchedule"), Taint("team", "ml", "NoSchedule")
    soft = Taint("spot", "", "PreferNoSchedule")
    nodes = [
        gpu_node("a", {"nvidia.com/gpu": "4"}, gpu, own, soft),
        gpu_node("b", {"nvidia.com/gpu": "4"}, gpu),
        gpu_node("cordoned", {"nvidia.com/gpu": "8"}, schedulable=False),
    ]
    values = values_for(Facts("v1.34.0", "default", nodes))
    assert values["prefill"]["pod"] == {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    }


def test_mig_slices_are_asked_for_by_their_name() -> None:
    node = gpu_node("a", {"nvidia.com/gpu": "0", "nvidia.com/mig-3g.40gb": "2"})
    assert (
        values_for(Facts("v1.34.0", "default", [node]))["decode"]["gpuResource"] == "nvidia.com/mig-3g.40gb"
    )


def test_an_old_version_and_an_old_operator_are_named() -> None:
    facts = Facts("v1.26.3", "default", crds={"rayservices.ray.io": ["v1alpha1"]})
    found = {check.name: check for check in judge(facts)}
    assert found["Kubernetes"].grade == "missing" and "1.29" in found["Kubernetes"].advice
    assert found["KubeRay"].grade == "info" and "no v1" in found["KubeRay"].found
    assert "ray" not in values_for(facts)


def test_without_cluster_roles_topology_is_off() -> None:
    node = gpu_node("a", {}, labels=H100)
    group = "rbac.authorization.k8s.io"
    denied = [Permission(group, "clusterroles", feature="topology.enabled", allowed=False)]
    assert values_for(Facts("v1.34.0", "n", [node], permissions=denied))["topology"] == {"enabled": False}
    assert "topology" not in values_for(Facts("v1.34.0", "n", [node]))


def test_devices_without_kernels_are_named_and_not_planned_for(server: ApiServer, tmp_path: Path) -> None:
    server.add_node("one", {}, {**LARGE, "amd.com/gpu": "8"})
    facts = look(server, tmp_path)
    (gpus,) = [check for check in judge(facts) if check.name == "GPUs"]
    assert gpus.grade == "warning" and "amd.com/gpu" in gpus.advice and "ROCm" in gpus.advice
    assert values_for(facts)["decode"]["gpus"] == 0


def test_operators_that_values_can_use_are_named(server: ApiServer, tmp_path: Path) -> None:
    server.create(crd("leaderworkersets", "leaderworkerset.x-k8s.io"))
    server.create(crd("httproutes", "gateway.networking.k8s.io"))
    found = {check.name: check for check in judge(look(server, tmp_path))}
    assert found["LeaderWorkerSet"].grade == "ok"
    assert found["Gateway API"].found == "no v1 of grpcroutes.gateway.networking.k8s.io"


def test_a_pod_does_not_ask_for_its_own_rights(server: ApiServer, tmp_path: Path) -> None:
    """Those of the account that installs matter, and a Job has another one."""
    server.add_node("one", {}, LARGE)
    with connect(server.kubeconfig(tmp_path / "kubeconfig"), "") as api:
        facts = Reader(api, "default", 10.0).read(permissions=False)
    assert not facts.permissions and grades(facts)["permissions"] == "info"
