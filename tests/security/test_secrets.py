"""A cluster with known secrets under valid and invalid requests; then all its output is searched for them."""

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
from router.frontends.http.gate import OPEN
from router.frontends.http.ui.pages import PATHS
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.harness.router import KeyFile
from tests.harness.waiting import wait_for
from tests.observability.collector import Collector, run_collector

PASSWORD = f"pass-{secrets.token_hex(8)}"
PROMPT = f"confidential-{secrets.token_hex(8)} and some more words to fill a block or two of cache"
ANSWER_TOKENS = 20
OPEN_PATHS = sorted(OPEN | PATHS)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("guarded"))
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("requirepass", PASSWORD)
    yield server.url.replace("unix://", f"unix://:{PASSWORD}@")
    server.stop()


@pytest.mark.long
def test_nothing_shows_a_secret_a_prompt_or_an_answer(guarded, checkpoint, tmp_path, monkeypatch):
    keys = KeyFile(tmp_path / "keys.yaml")
    key, admin = keys.add("acme", requests_per_minute=20), keys.add("ops", admin=True)
    monkeypatch.setenv("BATON_REDIS_URL", guarded)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    with (
        run_collector() as collector,
        run_cluster(
            tmp_path / "cluster",
            checkpoint("llama"),
            *("--api-keys-file", str(keys.path), "--otlp-endpoint", collector.url, *PROCESS),
            forked=False,
        ) as cluster,
    ):
        text = _use(cluster, key, admin)
        hidden = _hidden(cluster, [key, admin], keys, text)
        shown = {
            **_endpoints(cluster, admin),
            "command lines": _command_lines(cluster.process.pid),
            "state": json.dumps(cluster.state),
            **_stored(guarded),
            "traces": _traces(collector),
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


def _use(cluster: Any, key: str, admin: str) -> str:
    """Rightly, wrongly, and so that something fails. The answer's text."""
    with Client(cluster.grpc, api_key=key) as client:
        text = client.generate(PROMPT, max_tokens=ANSWER_TOKENS, temperature=0).text
    with Client(cluster.grpc, api_key=admin) as client:
        client.generate(PROMPT, max_tokens=ANSWER_TOKENS, temperature=0, explain=True)
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
    sampled = {"authorization": f"Bearer {key}", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    httpx.post(url, json={"prompt": PROMPT + " once more", "max_tokens": 3}, headers=sampled, timeout=30)
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
        **{f"key {number}": one.split("-", 2)[2] for number, one in enumerate(given)},
        **{f"digest {number}": entry["key_sha256"] for number, entry in enumerate(keys.entries)},
        "the prompt": PROMPT.split()[0],
        "the answer": text,
    }


def _endpoints(cluster: Any, admin: str) -> dict[str, str]:
    """Everything that is served, as an administrator sees it; workers' metrics as any client does."""
    headers = {"authorization": f"Bearer {admin}"}
    paths = (
        "/v1/cluster",
        "/v1/cluster/live",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/nonsense",
        *OPEN_PATHS,
    )
    shown = {path: httpx.get(cluster.http + path, headers=headers).text for path in paths}
    for role in ("prefill", "decode"):
        for worker in cluster.state[role]:
            address = worker["metrics"]
            for path in ("/metrics", "/ready", "/live", "/nonsense"):
                shown[f"{path} of {worker['id']}"] = httpx.get(f"http://{address}{path}").text
            with grpc.insecure_channel(worker["address"]) as channel, contextlib.suppress(grpc.RpcError):
                channel.unary_unary("/baton.v1.Decode/Nothing", None, None)(b"", timeout=60)
    return shown


def _traces(collector: Collector) -> str:
    """Every span that any process has sent; those of the requests above, of both workers too."""
    services = {"baton-router", "baton-prefill", "baton-decode"}
    wait_for(lambda: services <= {span.service for span in list(collector.spans)}, 30, "traces have come")
    with collector.lock:
        return b"".join(collector.bodies).decode("utf-8", errors="replace")


def _command_lines(pid: int) -> str:
    parent = psutil.Process(pid)
    processes = [parent, *parent.children(recursive=True)]
    assert len(processes) >= 4
    return "\n".join(" ".join(process.cmdline()) for process in processes)


def _stored(url: str) -> dict[str, str]:
    """All that Redis holds: loads, leases and hashes; never texts, nor the address of a NIXL agent."""
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
