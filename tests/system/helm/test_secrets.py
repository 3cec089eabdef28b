"""A pod holds the secrets that it needs and no others."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from baton.local.certs import make_certs
from cluster.redis.connect import connect
from tests.harness.redis_servers import find_server
from tests.harness.waiting import wait_for
from tests.system.helm.rendering import Pod, Renderer, ValueSet, pods_of
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


@pytest.mark.parametrize(
    ("files", "tls"), [((), {}), (("rdma-mtls.yaml",), {"t-baton-worker-tls": {"ca.crt"}})]
)
def test_the_autoscaler_has_neither_the_deployments_secret_nor_a_workers_key(
    files: tuple[str, ...], tls: dict[str, set[str]], renderer: Renderer
) -> None:
    """It reads the registry and sizes pools: it hashes no blocks, and connects to no worker."""
    sized = {role: {"replicas": None} for role in ("prefill", "decode")}  # else an example's own number
    scaled = {"autoscaling": {"enabled": True}, **sized}
    values = ValueSet(files, scaled, apis=VALUE_SETS["rdma-mtls"].apis)
    (pod,) = [one for one in pods_of(renderer.render(values)) if one.component == "autoscaler"]
    (container,) = pod.containers
    assert "BATON_SECRET" not in {one["name"] for one in container["env"]}
    assert _secrets(pod, container) == tls


RAY_NODES = (
    "ray beside workers",
    "ray's state nowhere",
    "multi-node",
    "own certificates",
    "redis by url",
    "own secrets",
)
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.mark.parametrize("name", RAY_NODES)
def test_a_ray_node_has_rays_token_and_nothing_else(name: str, renderer: Renderer) -> None:
    """A job submitted to Ray runs in this container: beside a worker, or below its ranks."""
    rendered = renderer.render(VALUE_SETS[name])
    nodes = [
        (pod, one)
        for pod in pods_of(rendered)
        if pod.owner.startswith("StatefulSet")
        for one in pod.spec["containers"]
        if one["name"] == "ray"
    ]
    assert len(nodes) >= 2
    for pod, node in nodes:
        told = {one["name"] for one in node["env"] if "secretKeyRef" in one.get("valueFrom", {})}
        assert told == {"RAY_AUTH_TOKEN"}
        assert "envFrom" not in node
        assert not any("$(REDIS" in one.get("value", "") for one in node["env"])
        assert _secrets(pod, node) == {}
        assert pod.spec["automountServiceAccountToken"] is False
        assert ACCOUNT not in {one["mountPath"] for one in node["volumeMounts"]}


@pytest.mark.parametrize("name", RAY_NODES)
def test_a_ray_node_shares_no_writable_folder_with_its_worker(name: str, renderer: Renderer) -> None:
    """Caches of compiled code and Python modules in a shared folder would run in the worker. A worker that spans pods
    attaches to its Ray node: they share Ray's sockets and its object store, and nothing else."""
    pods = [one for one in pods_of(renderer.render(VALUE_SETS[name])) if one.owner.startswith("StatefulSet")]
    several = 0
    for pod in pods:
        mounts = {one["name"]: one["volumeMounts"] for one in pod.spec["containers"]}
        if not {"worker", "ray"} <= set(mounts):
            continue
        several += 1
        worker, ray = (
            {(one["name"], one["mountPath"]) for one in mounts[container]} for container in ("worker", "ray")
        )
        spans = ("ray", "/tmp/ray") in worker
        assert worker & ray == ({("ray", "/tmp/ray"), ("shm", "/dev/shm")} if spans else set())
        assert {name for name, _ in worker} & {name for name, _ in ray} == {name for name, _ in worker & ray}
    assert several >= 1


@pytest.mark.parametrize(
    ("values", "asking"),
    [
        ({}, {"prefill", "decode"}),
        ({"topology": {"enabled": False}}, {"decode"}),
        ({"topology": {"enabled": False}, "peerExits": {"enabled": False}}, set()),
    ],
)
def test_workers_that_ask_the_api_alone_hold_its_token(
    values: dict[str, Any], asking: set[str], renderer: Renderer
) -> None:
    holding = set()
    for pod in pods_of(renderer.render(ValueSet(values=values))):
        for container in pod.containers:
            if any(one["mountPath"] == ACCOUNT for one in container.get("volumeMounts", [])):
                assert container["name"] == "worker"
                holding.add(pod.component)
                (volume,) = [one for one in pod.spec["volumes"] if one["name"] == "account"]
                sources = [next(iter(one)) for one in volume["projected"]["sources"]]
                assert sources == ["serviceAccountToken", "configMap", "downwardAPI"]
    assert holding == asking


@pytest.mark.parametrize("name", VALUE_SETS)
def test_no_command_line_holds_a_secret(name: str, renderer: Renderer) -> None:
    for pod in pods_of(renderer.render(VALUE_SETS[name])):
        for container in pod.containers:
            env = container.get("env", [])
            secret = {one["name"] for one in env if "secretKeyRef" in one.get("valueFrom", {})}
            words = [*container.get("command", []), *container.get("args", [])]
            told = secret & set(re.findall(r"\$\((\w+)\)", " ".join(words)))
            # Ray has no other way, and its own processes get it so as well.
            assert told <= ({"RAY_REDIS_SECRET"} if pod.component == "ray-head" else set()), pod.owner


def _as(port: int, password: str | None, user: str | None = None) -> redis.Redis:
    return redis.Redis(port=port, password=password, username=user)


def _answers(port: int, password: str | None) -> bool:
    try:
        return bool(_as(port, password, None if password is None else "router").ping())
    except redis.exceptions.ConnectionError as error:
        if isinstance(error, redis.exceptions.AuthenticationError):
            raise
        return False


def test_redis_starts_with_its_password_on_no_command_line(renderer: Renderer, tmp_path: Path) -> None:
    password = "q7PzS3cr3tW0rd"
    others = {"worker": "w0rk3rS3cr3t", "autoscaler": "sc4l3rS3cr3t", "ray": "r4yS3cr3t"}
    installed, environment = find_server()
    program = tmp_path / "redis-server"
    program.symlink_to(installed)  # its role follows from its name
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
    values = {
        "redis": {
            "port": port,
            "command": [str(program), "--loglevel", "verbose", "--daemonize", "no"],
        },
        "ray": {"joinWorkers": True},
    }
    (pod,) = [one for one in pods_of(renderer.render(ValueSet(values=values))) if one.component == "redis"]
    (container,) = pod.containers
    words = [*container["command"], *container["args"]]
    words = [{"$(POD_IP)": "127.0.0.1", "/data": str(tmp_path)}.get(word, word) for word in words]
    with subprocess.Popen(
        words,
        env={
            **environment,
            "REDIS_ROUTER_PASSWORD": password,
            "REDIS_WORKER_PASSWORD": others["worker"],
            "REDIS_AUTOSCALER_PASSWORD": others["autoscaler"],
            "RAY_REDIS_PASSWORD": others["ray"],
        },
        stdout=subprocess.DEVNULL,
    ) as server:
        try:
            wait_for(lambda: _answers(port, password), 30, "redis answers")
            # The server has the process of the shell, and gets the signals that end a pod.
            assert Path(f"/proc/{server.pid}/exe").resolve() == program.resolve()
            shown = Path(f"/proc/{server.pid}/cmdline").read_bytes()
            assert not any(one.encode() in shown for one in (password, *others.values()))
            with pytest.raises(redis.exceptions.AuthenticationError):
                _answers(port, None)
            users = {
                "{serving-t}:load": _as(port, password, "router"),
                "RAYserving-t@KV": _as(port, others["ray"], "ray"),
            }
            for own, user in users.items():
                assert user.hset(own, "a", "b") == 1
                for other in [key for key in (*users, "elsewhere") if key != own]:
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        user.hgetall(other)
                with pytest.raises(redis.exceptions.NoPermissionError):
                    _as(port, others["worker"], "worker").hset(own, "a", "c")  # it may read the load
                for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("ACL", "LIST")):
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        user.execute_command(*command)
        finally:
            server.terminate()
            assert server.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("ours", "rays"),
    [
        ('pass"word', "right"),
        ("back\\slash", "right"),
        ("two words", "right"),
        ("", "right"),
        ("r1ght", "a>b"),
    ],
)
def test_a_password_that_redis_cannot_take_is_refused(ours: str, rays: str, renderer: Renderer) -> None:
    """In its configuration it would end a word, or begin another."""
    (pod,) = [one for one in pods_of(renderer.render(VALUE_SETS["multi-node"])) if one.component == "redis"]
    (container,) = pod.containers
    environment = {**os.environ, "REDIS_ROUTER_PASSWORD": "right", "REDIS_WORKER_PASSWORD": ours}
    environment |= {"REDIS_AUTOSCALER_PASSWORD": "right", "RAY_REDIS_PASSWORD": rays}
    words = [*container["command"][:-1], "true"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "change redis.passwordSecrets or ray.gcsFaultTolerance.passwordSecret" in ended.stderr
    assert not ours or ours not in ended.stderr


TLS = {
    "enabled": True,
    "source": "secrets",
    "secrets": {"router": "router-tls", "worker": "worker-tls", "redis": "redis-tls"},
}
CA = "ssl_ca_certs=/etc/baton/tls/ca.crt"


def test_with_tls_redis_accepts_nothing_else(renderer: Renderer, tmp_path: Path) -> None:
    certs, data = tmp_path / "certs", tmp_path / "data"
    make_certs(certs, ["t-baton-redis"], 2)
    make_certs(tmp_path / "others", [], 2)
    data.mkdir()
    for name, file in {"tls.crt": "router.pem", "tls.key": "router.key", "ca.crt": "ca.pem"}.items():
        (certs / name).write_bytes((certs / file).read_bytes())
    server, environment = find_server()
    (tmp_path / "redis-server").symlink_to(server)  # its role follows from its name
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
    values = {"tls": TLS, "redis": {"port": port, "command": [str(tmp_path / "redis-server")]}}
    pods = {one.component: one for one in pods_of(renderer.render(ValueSet(values=values)))}
    (container,) = pods["redis"].containers
    here = {"$(POD_IP)": "127.0.0.1", "/data": str(data), "/etc/redis-tls": str(certs)}

    def replaced(word: str) -> str:
        for there, path in here.items():
            word = word.replace(there, path)
        return word

    words = [replaced(word) for word in (*container["command"], *container["args"])]
    env = {**environment, "REDIS_ROUTER_PASSWORD": "q7PzS3cr3t", "REDIS_WORKER_PASSWORD": "w0rk3rS3cr3t"}
    env |= {"REDIS_AUTOSCALER_PASSWORD": "sc4l3rS3cr3t", "RAY_REDIS_PASSWORD": "r4yS3cr3t"}
    (url,) = {one["value"] for one in pods["router"].containers[0]["env"] if one["name"] == "BATON_REDIS_URL"}
    assert url == f"rediss://router:$(REDIS_PASSWORD)@t-baton-redis:{port}/0?{CA}"
    url = url.replace("$(REDIS_PASSWORD)", "q7PzS3cr3t").replace("t-baton-redis", "127.0.0.1")
    right = url.replace("/etc/baton/tls/ca.crt", str(certs / "ca.pem"))
    alive = [replaced(word) for word in container["livenessProbe"]["exec"]["command"]]
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as process:
        try:
            with connect(right) as client:
                wait_for(client.ping, 30, "redis answers")
            for wrong in (
                right.partition("?")[0].replace("rediss", "redis"),
                right.replace(str(certs), str(tmp_path / "others")),
                right.replace("q7PzS3cr3t", "another"),
            ):
                with connect(wrong) as client, pytest.raises(redis.RedisError):
                    client.ping()
            assert subprocess.run(alive, check=False).returncode == 0
            (certs / "tls.crt").write_bytes((certs / "worker.pem").read_bytes())
            assert subprocess.run(alive, check=False).returncode == 1, "a renewed certificate restarts it"
        finally:
            process.terminate()
            process.wait(timeout=30)


@pytest.mark.parametrize(
    "name", ["rdma-mtls", "ray beside workers", "own certificates", "a company's issuer"]
)
def test_with_tls_all_pods_that_use_redis_have_its_authority(name: str, renderer: Renderer) -> None:
    rendered, found = renderer.render(VALUE_SETS[name]), set()
    for pod in pods_of(rendered):
        for container in pod.containers:
            values = {one["name"]: one.get("value", "") for one in container.get("env", [])}
            mounts = {one["mountPath"] for one in container.get("volumeMounts", [])}
            if "BATON_REDIS_URL" in values:
                found.add(pod.component)
                assert values["BATON_REDIS_URL"].startswith("rediss://") and CA in values["BATON_REDIS_URL"]
                assert "/etc/baton/tls" in mounts
            if "RAY_REDIS_ADDRESS" in values:
                found.add(pod.component)
                assert values["RAY_REDIS_ADDRESS"].startswith("rediss://")
                assert values["RAY_REDIS_CA_CERT"] == "/etc/baton/redis-ca/ca.crt"
                (volume,) = [one for one in pod.spec["volumes"] if one["name"] == "redis-ca"]
                assert [one["key"] for one in volume["secret"]["items"]] == ["ca.crt"], "and no key"
    heads = {"ray-head"} if name in RAY_NODES else set()
    assert found >= {"router", "prefill", "decode"} | heads


@pytest.mark.parametrize("name", VALUE_SETS)
def test_each_component_holds_the_password_of_its_own_user_only(name: str, renderer: Renderer) -> None:
    own = {"prefill": "worker", "decode": "worker", "deploy": "worker"}
    rendered, used = renderer.render(VALUE_SETS[name]), set()
    drawn = {
        key
        for secret in rendered.of("Secret")
        if secret["metadata"]["name"] == "t-baton"
        for key in secret["data"]
        if key.startswith("redis-")
    }
    for pod in pods_of(rendered):
        for container in pod.containers:
            env = {one["name"]: one for one in container.get("env", [])}
            if pod.component == "redis":
                references = [one.get("valueFrom", {}).get("secretKeyRef") for one in env.values()]
                used |= {one["key"] for one in references if one and one["name"] == "t-baton"}
            if pod.component == "redis" or "BATON_REDIS_URL" not in env:
                continue
            user = own.get(pod.component.partition("-")[0], pod.component)  # prefill-MODEL, decode-MODEL
            if "REDIS_PASSWORD" in env:
                reference = env["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]
                assert reference["key"].endswith((f"redis-{user}-password", user))
                assert f"//{user}:$(REDIS_PASSWORD)@" in env["BATON_REDIS_URL"]["value"]
            assert {one for one in env if "PASSWORD" in one} <= {"REDIS_PASSWORD"}
    assert drawn == {key for key in used if key.startswith("redis-")}, (
        "what Redis's users do not need is not drawn"
    )


def test_autoscaling_changes_nothing_of_redis(renderer: Renderer) -> None:
    """A change of its pod restarts it, and Ray's state is lost."""
    off, on = (
        renderer.render(ValueSet(values={"autoscaling": {"enabled": enabled}})) for enabled in (False, True)
    )
    for kind in ("StatefulSet", "Service"):
        assert off.named(kind, "t-baton-redis") == on.named(kind, "t-baton-redis")
    drawn = [set(one.named("Secret", "t-baton")["data"]) for one in (off, on)]
    assert drawn[0] == drawn[1] >= {f"redis-{user}-password" for user in ("router", "worker", "autoscaler")}


def test_each_component_may_have_an_external_redis_url_of_its_own(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["redis by a URL for each component"])
    found = {}
    for pod in pods_of(rendered):
        for container in pod.containers:
            for one in container.get("env", []):
                if one["name"] == "BATON_REDIS_URL":
                    found[pod.component] = one["valueFrom"]["secretKeyRef"]
    ours = "t-baton-external-redis"
    assert found == {
        "router": {"name": ours, "key": "router-url"},
        "prefill": {"name": "worker-redis", "key": "url"},
        "decode": {"name": "worker-redis", "key": "url"},
        "autoscaler": {"name": ours, "key": "autoscaler-url"},
    }
    ca = "ssl_ca_certs=/etc/baton/redis-tls/ca.crt"
    assert rendered.named("Secret", ours)["stringData"] == {
        "router-url": f"rediss://router:pass-word@redis.example:6380/0?{ca}",
        "autoscaler-url": f"rediss://autoscaler:pass-word@redis.example:6380/1?a=b&{ca}",
    }
