"""A cluster with secrets we know, asked rightly and wrongly; then everything it shows or writes is searched for them."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import redis

from baton.client import Client
from cluster.errors import BatonError
from cluster.redis.embedded import EmbeddedRedis
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.test_handover import PROCESS
from tests.security.routers import KeyFile

PASSWORD = f"pass-{secrets.token_hex(8)}"
PROMPT = f"confidential-{secrets.token_hex(8)} and some more words to fill a block or two of cache"
ANSWER_TOKENS = 20


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("guarded"))
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("requirepass", PASSWORD)
    yield server.url.replace("unix://", f"unix://:{PASSWORD}@")
    server.stop()


def test_nothing_shows_a_secret_a_prompt_or_an_answer(guarded, checkpoint, tmp_path, monkeypatch):
    keys = KeyFile(tmp_path / "keys.yaml")
    key, admin = keys.add("acme", requests_per_minute=20), keys.add("ops", admin=True)
    flags = ["--api-keys-file", str(keys.path), *PROCESS]
    monkeypatch.setenv("BATON_REDIS_URL", guarded)
    with run_cluster(tmp_path / "cluster", checkpoint("llama"), *flags) as cluster:
        text = _use(cluster, key)
        hidden = _hidden(cluster, [key, admin], keys, text)
        shown = {
            **_endpoints(cluster, admin),
            "command lines": _command_lines(cluster.process.pid),
            "state": json.dumps(cluster.state),
            **_stored(guarded),
        }
        logs = Path(cluster.state["logs"])
        files = {
            str(file): file.read_text(errors="replace")
            for file in (*logs.glob("*"), *tmp_path.rglob("*.log"))
        }
    assert len(files) >= 4 and "attempt" not in hidden
    for where, content in {**shown, **files}.items():
        for name, secret in hidden.items():
            assert secret not in content, f"{name} is shown in {where}"


def _use(cluster: Any, key: str) -> str:
    """Rightly, wrongly, and so that something fails. The answer's text."""
    with Client(cluster.grpc, api_key=key) as client:
        text = client.generate(PROMPT, max_tokens=ANSWER_TOKENS, temperature=0, explain=True).text
        with pytest.raises(BatonError):
            client.generate(PROMPT, max_tokens=10**9)
        client.stream(PROMPT, max_tokens=100).close()
    with Client(cluster.grpc, api_key=key + "x") as client, pytest.raises(BatonError):
        client.generate(PROMPT)
    url = f"{cluster.http}/v1/completions"
    for given in (key, key + "x"):
        headers = {"authorization": f"Bearer {given}"}
        for body in (
            {"prompt": PROMPT, "max_tokens": 2},
            {"prompt": PROMPT, "n": "x"},
            {"prompt": [PROMPT, 3]},
        ):
            httpx.post(f"{url}?api_key={given}", json=body, headers=headers, timeout=30)
    return text


def _hidden(cluster: Any, given: list[str], keys: KeyFile, text: str) -> dict[str, str]:
    """What must be nowhere, by name. The deployment's secret is in the router's configuration file."""
    command = psutil.Process(cluster.state["router"][0]["pid"]).cmdline()
    config = Path(command[command.index("--config") + 1])
    assert config.stat().st_mode & 0o077 == 0, "only its user may read it"
    secret = json.loads(config.read_text())["secret"]
    assert len(secret) >= 32 and len(text) > 5
    return {
        "the deployment's secret": secret,
        "Redis's password": PASSWORD,
        **{f"key {number}": one.rpartition("-")[2] for number, one in enumerate(given)},
        **{f"digest {number}": entry["key_sha256"] for number, entry in enumerate(keys.entries)},
        "the prompt": PROMPT.split()[0],
        "the answer": text,
    }


def _endpoints(cluster: Any, admin: str) -> dict[str, str]:
    """Everything that is served, as an administrator sees it; workers' metrics as anybody does."""
    headers = {"authorization": f"Bearer {admin}"}
    paths = ("/v1/cluster", "/metrics", "/openapi.json", "/v1/models", "/health", "/ready", "/nonsense")
    shown = {path: httpx.get(cluster.http + path, headers=headers).text for path in paths}
    for role in ("prefill", "decode"):
        for worker in cluster.state[role]:
            address = worker["metrics"]
            shown[f"metrics of {worker['id']}"] = httpx.get(f"http://{address}/metrics").text
            with grpc.insecure_channel(worker["address"]) as channel, contextlib.suppress(grpc.RpcError):
                channel.unary_unary("/baton.v1.Decode/Nothing")(b"", timeout=60)
    return shown


def _command_lines(pid: int) -> str:
    parent = psutil.Process(pid)
    everybody = [parent, *parent.children(recursive=True)]
    assert len(everybody) >= 4
    return "\n".join(" ".join(process.cmdline()) for process in everybody)


def _stored(url: str) -> dict[str, str]:
    """All that Redis holds: loads, leases and hashes; never what was said, nor how to reach a NIXL agent."""
    shown = {}
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(count=1000):
            raw = client.dump(key) or b""
            value = client.hgetall(key) if client.type(key) == b"hash" else raw
            shown[f"Redis {key!r}"] = f"{key!r} {value!r} {base64.b64encode(raw).decode()}"
    assert shown
    everything = "".join(shown.values())
    assert "agent" not in everything, "agents' metadata travels on the hand-off's stream only"
    return shown
