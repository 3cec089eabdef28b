"""Pages about the cluster, requested with every kind of key, by every spelling of their names, over HTTP and gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig
from router.frontends.http.adapters import LOAD, UNLOAD
from router.frontends.http.gate import ADMIN, OPEN
from router.frontends.http.ui.pages import PATHS
from tests.harness.router import KeyFile, Router
from tests.harness.waiting import wait_for
from wire import decode_pb2, inference_pb2, prefill_pb2

ENDED: dict[str, dict[str, Any]] = {
    "revoked": {"revoked": True},
    "expired": {"expires_at": "2001-01-01T00:00:00Z"},
}
KEYED = (
    "/v1/models",
    "/openapi.json",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1",
    "/",
    "/no/such/path",
)
# Other ways of writing a path that a router, or what stands before it, might take for the same one.
WRITTEN = (
    "{0}/",
    "/{0}",
    "{0}//",
    "/.{0}",
    "/ui/..{0}",
    "/ui/../{0}",
    "/ui%2f..{0}",
    "{0}%00",
    "{0}%0a",
    "{0}?x",
    "{0};x",
    "{0}.json",
)


@pytest.fixture(scope="module")
def named(router: Router, keys: KeyFile) -> dict[str, str]:
    """A key of each kind, read by the router. "none" is empty, "wrong" never was one."""
    named = {"none": "", "wrong": "baton-0000000000000000-never"}
    for name, change in ENDED.items():
        named[name] = keys.add("acme")
        keys.entries[-1] |= change
    named |= {"tenant": keys.add("acme"), "admin": keys.add("ops", admin=True)}
    keys.write()
    wait_for(lambda: ask(router, "/metrics", named["admin"]).status_code == 200, 30, "keys are known")
    return named


CALLS = (LOAD, UNLOAD)  # without a body


def ask(router: Router, path: str, key: str, method: str = "GET") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # As it is written: the library would tidy dots and slashes away.
    url = httpx.URL(router.http).copy_with(raw_path=path.encode())
    return httpx.request(method, url, headers=headers, timeout=30)


@pytest.mark.parametrize("kind", ["none", "wrong", "revoked", "expired"])
def test_without_a_good_key_every_page_is_401(kind: str, named: dict[str, str], router: Router) -> None:
    said = set()
    for path in (*sorted(ADMIN), *KEYED):
        for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
            answer = ask(router, path, named[kind], method)
            assert answer.status_code == 401, (method, path)
            said.add(answer.text)
    assert len(said) == 2, "one text for all, and HEAD's none"


@pytest.mark.parametrize("kind", ["none", "tenant"])
def test_no_spelling_of_a_path_opens_an_administrators_page(
    kind: str, named: dict[str, str], router: Router
) -> None:
    inside = ("baton_requests", '"workers"', '"history"')
    for path in sorted(ADMIN):
        encoded, method = path[:-1] + f"%{ord(path[-1]):x}", "POST" if path in CALLS else "GET"
        for written in (path, encoded, path.upper(), *(form.format(path) for form in WRITTEN)):
            answer = ask(router, written, named[kind], method)
            assert answer.status_code in (401, 403, 404), written
            assert not any(word in answer.text for word in inside), written
        assert ask(router, path, named["admin"], method).status_code == (400 if path in CALLS else 200)


def test_only_probes_and_the_pages_files_are_open(named: dict[str, str], router: Router) -> None:
    for path in sorted(OPEN | PATHS):
        assert ask(router, path, "").status_code == 200, path
    shown = "".join(ask(router, path, "").text for path in sorted(OPEN))
    assert "127.0.0.1" not in shown and "worker" not in shown, "probes say yes or no"


@pytest.mark.parametrize("kind", ["none", "wrong", "revoked", "expired"])
def test_every_rpc_needs_a_valid_key(kind: str, named: dict[str, str], router: Router) -> None:
    """The methods of our service by its descriptor, so that a new one is tested too."""
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    methods = [f"/{service.full_name}/{method.name}" for method in service.methods]
    assert len(methods) >= 3
    metadata = (("authorization", f"Bearer {named[kind]}"),) if named[kind] else ()
    said = set()
    with grpc.insecure_channel(router.grpc) as channel:
        for method in (
            *methods,
            "/baton.v1.Decode/Run",
            "/baton.v1.Decode/Handoff",
            "/baton.v1.Inference/Debug",
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.unary_stream(method, None, None)(b"", metadata=metadata, timeout=30))
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, method
            said.add(error.details())
    assert len(said) == 1


def test_the_public_endpoint_has_no_service_of_the_workers(named: dict[str, str], router: Router) -> None:
    """Also with a valid key: no hand-off can be begun, read or ended from outside."""
    services = (
        decode_pb2.DESCRIPTOR.services_by_name["Decode"],
        prefill_pb2.DESCRIPTOR.services_by_name["Prefill"],
    )
    metadata = (("authorization", f"Bearer {named['admin']}"),)
    with grpc.insecure_channel(router.grpc) as channel:
        for service in services:
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.unary_stream(path, None, None)(b"", metadata=metadata, timeout=30))
                error: Any = caught.value
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_faults_need_a_setting_that_is_off_by_default() -> None:
    for config in (RouterConfig, WorkerConfig):
        assert config.model_fields["fault_orders"].default is None
