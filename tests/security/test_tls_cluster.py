"""A whole cluster with TLS everywhere."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc
import httpx
import pytest

from baton.client import Client
from baton.local.certs import make_certs
from baton.local.tls import LocalTls
from cluster.membership.reader import read_workers
from cluster.membership.registry import request_drain
from cluster.security.tls import ClientTls as Files
from cluster.security.tls import Peers
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.end_to_end.registries import registry
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import judge
from tests.harness.waiting import wait_for
from tests.security.identities import client_tls, identity
from tests.security.tls_worker import calls
from wire import decode_pb2, decode_pb2_grpc, prefill_pb2


async def knock(address: str, live: Path) -> dict[str, object]:
    """A worker's answers to clients that trust it and use its name, without a certificate that it accepts."""
    name = [("grpc.ssl_target_name_override", "worker.baton.internal")]
    answers: dict[str, object] = {}
    own: dict[str, tuple[Path, Path] | tuple[None, None]] = {
        "no certificate": (None, None),
        "a client": (live / "client.pem", live / "client.key"),
    }
    known = await calls(Peers(identity(live, "router")).channel(address))
    # It has no such methods; a stream to one may end as INTERNAL, where the refusal meets what is being sent.
    assert "UNIMPLEMENTED" in known.values() and "UNAVAILABLE" not in known.values(), "a router is let in"
    for client, (cert, key) in own.items():
        credentials = Files(live / "ca.pem", cert, key).credentials()
        answers[client] = (await calls(grpc.aio.secure_channel(address, credentials, options=name)))["Run"]
    answers["plain text"] = (await calls(grpc.aio.insecure_channel(address)))["Run"]
    return answers


async def each_method_accepts_its_role_only(state, live: Path) -> None:
    """Every method of both services. The hand-off's stream, where agents' metadata and addresses travel, opens for a
    worker only; it says nothing to a router, and nothing of a router's opens for a worker."""
    for role, messages in (("prefill", prefill_pb2), ("decode", decode_pb2)):
        service = messages.DESCRIPTOR.services_by_name[role.capitalize()]
        for client in ("router", "worker"):
            channel = Peers(identity(live, client)).channel(state[role][0]["address"])
            async with channel:
                for method in service.methods:
                    # One message, sent with the call: a write of its own may meet the refusal, and end as INTERNAL.
                    call = channel.unary_stream(f"/{service.full_name}/{method.name}", None, None)
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        assert not [message async for message in call(b"\xff", timeout=30)]
                    refused = caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                    allowed = (method.name == "Handoff") == (client == "worker")
                    assert refused == (not allowed), (role, method.name, client, caught.value.details())


@pytest.mark.long
@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_a_whole_cluster_with_tls_everywhere(transport, certs, checkpoint, tmp_path, monkeypatch):
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    monkeypatch.setenv("BATON_TRANSFER__TRANSPORT", transport)  # `auto` would not choose NIXL
    monkeypatch.setenv("BATON_DRAIN_MIGRATE_SECONDS", "0")
    flags = ["--certs", str(live), "--require-client-certs", *PROCESS, "--decode", "2"]
    with run_cluster(tmp_path / "cluster", checkpoint("llama"), *flags) as cluster:
        with Client(cluster.grpc, tls=client_tls(live)) as client:
            said = client.generate("a baton is handed over", max_tokens=8, temperature=0)
            assert said.timings is not None and said.timings.transport == transport
            assert said.timings.kv_bytes_shipped > 0
        context = client_tls(live).context()
        answer = httpx.post(
            f"{cluster.http}/v1/completions", json={"prompt": "a", "max_tokens": 2}, verify=context
        )
        assert answer.json()["usage"]["completion_tokens"] == 2
        for role in ("prefill", "decode"):
            address = cluster.state[role][0]["address"]
            assert set(asyncio.run(knock(address, live)).values()) == {"UNAVAILABLE"}
        asyncio.run(each_method_accepts_its_role_only(cluster.state, live))
        # `baton up` itself tells decode workers of prefill workers that died: by a router's right.
        with LocalTls(live, True).peers().blocking_channel(cluster.state["decode"][0]["address"]) as channel:
            told = decode_pb2.PeerExitedRequest(worker_id="unknown")
            decode_pb2_grpc.DecodeStub(channel).PeerExited(told, timeout=60)
        # Renewed while serving: the next hand-offs and requests go on.
        make_certs(live, [], 30)
        with Client(cluster.grpc, tls=client_tls(live)) as client:
            for _ in range(3):
                assert len(client.generate("again and again", max_tokens=4).choices[0].token_ids) == 4
            _leaves_while_it_streams(cluster, checkpoint("llama"), client)


def _leaves_while_it_streams(cluster, model, client):
    """A decode worker under mutual TLS: its stream goes on elsewhere, over connections made for it."""
    prompt = prompt_ids(60, seed=9)
    stream = client.stream(prompt, max_tokens=900, temperature=0, ignore_eos=True)
    next(stream)
    leaving = next(worker for worker in stream.worker_ids if worker.startswith("decode"))
    assert request_drain(*registry(cluster), leaving)
    list(stream)
    tokens = list(stream.completion().token_ids)
    assert len(tokens) == 900
    assert not judge(model, prompt, tokens).wrong
    wait_for(
        lambda: leaving not in {one.worker_id for one in read_workers(*registry(cluster))}, 30, "it has left"
    )
