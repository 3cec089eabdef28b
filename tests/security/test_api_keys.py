"""Requests without a valid key are refused without a reason, and a change of the key file takes effect at once."""

from __future__ import annotations

import datetime
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import Client
from cluster.config.router import FurtherModel, RouterConfig
from cluster.errors import ConfigError, UnauthenticatedError
from cluster.security.key_file import ApiKeys, read_keys
from cluster.security.keys import KeyRing, new_key
from tests.harness.waiting import wait_for
from tests.security.conftest import NAME

NOW = 1_700_000_000.0
NOT_VALID = r"^the API key is not valid$"  # whatever the reason is
BODY: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": 3}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_found_by_its_id_and_refused_in_every_other_form():
    key, entry = new_key("acme", weight=2.0)
    ring = KeyRing([entry, new_key("other")[1]])
    caller = ring.check(f"Bearer {key}", NOW)
    assert (caller.tenant, caller.key_id, caller.weight, caller.admin) == ("acme", entry.id, 2.0, False)
    assert ring.check(f"bearer  {key}", NOW) == caller
    for value in ("", key, f"Basic {key}"):
        with pytest.raises(UnauthenticatedError, match=r"^an API key is needed"):
            ring.check(value, NOW)
    wrong = ["Bearer", "Bearer ", f"Bearer {key}x", f"Bearer {key[:-1]}"]
    wrong += [f"Bearer x{key}", "Bearer baton", "Bearer baton--", f"Bearer baton-{entry.id}-", "Bearer \xff"]
    wrong += [f"Bearer baton-{entry.id}-{entry.key_sha256}", f"Bearer {entry.key_sha256}"]
    for value in wrong:
        with pytest.raises(UnauthenticatedError, match=NOT_VALID):
            ring.check(value, NOW)
    assert key not in repr(entry) and entry.key_sha256 not in repr(entry)


def test_expiry_and_revocation_end_a_key():
    end = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    key, entry = new_key("acme", expires_at=end)
    assert KeyRing([entry]).check(f"Bearer {key}", NOW - 1).tenant == "acme"
    with pytest.raises(UnauthenticatedError, match=NOT_VALID):
        KeyRing([entry]).check(f"Bearer {key}", NOW)
    revoked = entry.model_copy(update={"revoked": True, "expires_at": None})
    with pytest.raises(UnauthenticatedError, match=NOT_VALID):
        KeyRing([revoked]).check(f"Bearer {key}", NOW)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "5",
        "keys: 7",
        "- {}",
        "- 3",
        "- {id: x, tenant: a, key_sha256: b}",
        f'- {{id: {"0" * 16}, tenant: "\\0model:a", key_sha256: {"0" * 64}}}',
        "\x00",
        "- &a [*a]",
        "a: b: c",
        "- expires_at: 2026-02-30",
        pytest.param("[" * 20_000, id="brackets"),
    ],
)
def test_a_malformed_file_is_a_config_error(text, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_keys(file)


def test_a_file_error_shows_nothing_of_the_file(tmp_path):
    key, _ = new_key("acme")
    file = tmp_path / "keys.yaml"
    for text in (f"- {key}\n  x: [", f"- {{id: {key}, tenant: a}}", f'"{key}'):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_keys(file)
        assert key not in caught.value.message


def test_json_and_yaml_are_equivalent(tmp_path):
    _, entry = new_key("acme", expires_at=datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC))
    rows = [entry.model_dump(mode="json")]
    (tmp_path / "a.json").write_text(json.dumps({"keys": rows}))
    (tmp_path / "b.yaml").write_text(
        f"- id: '{entry.id}'\n  tenant: acme\n  key_sha256: {entry.key_sha256}\n  expires_at: 2030-01-01T00:00:00Z\n"
    )
    rings = [read_keys(tmp_path / name)._entries for name in ("a.json", "b.yaml")]
    assert rings[0] == rings[1]


def test_a_broken_file_keeps_the_keys_it_had(tmp_path):
    key, entry = new_key("acme")
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([entry.model_dump(mode="json")]))
    keys = ApiKeys(file, clock=lambda: NOW)
    for change in (lambda: file.write_text("- broken: ["), file.unlink):
        change()
        keys.refresh()
        assert keys.check(f"Bearer {key}").tenant == "acme"
    file.write_text("[]")
    keys.refresh()
    with pytest.raises(UnauthenticatedError):
        keys.check(f"Bearer {key}")


@pytest.mark.parametrize(
    "named", [{"models": ["m", "two"]}, {"model_limits": {"two": {"max_concurrent_requests": 1}}}]
)
def test_an_alias_in_the_file_is_refused_as_it_would_change_nothing(tmp_path, named):
    file = tmp_path / "keys.json"
    entries = [new_key("acme")[1], new_key("b", **named)[1]]
    file.write_text(json.dumps([entry.model_dump(mode="json") for entry in entries]))
    second = FurtherModel(name="second", model=Path("/b"), aliases=("two",))
    config = RouterConfig(model=Path("/m"), model_aliases=("one",), models=(second,))
    aliases = config.models_by_alias()
    assert aliases == {"one": "m", "two": "second"}
    where = f"entry 2: {next(iter(named))}"
    with pytest.raises(ConfigError, match=f"{where}: 'two' is another name of model 'second'"):
        ApiKeys(file, aliases=aliases)
    assert ApiKeys(file).on, "a router without that alias"


def test_limits_under_a_name_that_is_no_model_s_are_warned_of(tmp_path, caplog):
    """Such as an adapter's, whose requests count for its model: the entry was read, and limited nothing."""
    file, one = tmp_path / "keys.json", {"max_concurrent_requests": 1}
    named = {"model_limits": {"m": one, "second": one, "tuned": one}, "models": ["m", "other"]}
    file.write_text(json.dumps([new_key("acme", **named)[1].model_dump(mode="json")]))
    models = RouterConfig(
        model=Path("/m"), models=(FurtherModel(name="second", model=Path("/b")),)
    ).model_names
    assert ApiKeys(file, models=models).on
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "model_limits of 1 names have no effect" in said and "'tuned' (entry 1)" in said
    caplog.clear()
    assert ApiKeys(file, models=(*models, "tuned")).on and ApiKeys(file).on
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


def test_http_asks_for_a_key_in_openais_form(router, keys):
    key = keys.add("acme")
    url = f"{router.http}/v1/completions"
    wait_for(lambda: httpx.post(url, json=BODY, headers=bearer(key)).status_code == 200, 60, "key known")
    for headers in ({}, bearer("x"), bearer(key + "x"), {"authorization": key}):
        answer = httpx.post(url, json=BODY, headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    twice = [("authorization", f"Bearer {key}"), ("authorization", "Bearer x")]
    assert httpx.post(url, json=BODY, headers=twice).status_code == 401
    for path in ("/v1/models", "/openapi.json", "/no/such/path", "/metrics/", "/v1/cluster"):
        assert httpx.get(router.http + path).status_code == 401, path


def test_openais_client_understands(router, keys):
    key = keys.add("acme")
    wrong = openai.OpenAI(base_url=f"{router.http}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with openai.OpenAI(base_url=f"{router.http}/v1", api_key=key, max_retries=8) as client:
        wait_for(lambda: client.models.list().data, 60, "key known")
        assert client.completions.create(**BODY).usage.completion_tokens == 3


def test_a_refusal_does_not_wait_for_the_body(router):
    with socket.create_connection(router.address, timeout=60) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n{")
        sock.settimeout(5)
        assert sock.recv(4096).startswith(b"HTTP/1.1 401")


def test_health_is_open_and_the_clusters_inside_is_the_admins(router, keys):
    tenant, admin = keys.add("acme"), keys.add("ops", admin=True)
    for path in ("/health", "/ready"):
        assert httpx.get(router.http + path).status_code == 200
    for path in ("/metrics", "/v1/cluster"):
        url = router.http + path
        wait_for(lambda url=url: httpx.get(url, headers=bearer(admin)).status_code == 200, 60, "key known")
        answer = httpx.get(url, headers=bearer(tenant))
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "insufficient_permissions"
        shown = httpx.get(url, headers=bearer(admin)).text
        assert admin not in shown and all(entry["key_sha256"] not in shown for entry in keys.entries)


def test_grpc_asks_for_a_key(router, keys):
    key = keys.add("acme")

    def works() -> bool:
        with Client(router.grpc, api_key=key) as client:
            return len(client.generate("abc", max_tokens=3).choices[0].token_ids) == 3 and bool(
                client.models()
            )

    wait_for(works, 60, "key known")
    for wrong in ("", "x", key + "x"):
        with Client(router.grpc, api_key=wrong) as client:
            for call in (lambda c=client: c.generate("abc"), client.models, lambda c=client: c.tokenize("a")):
                with pytest.raises(UnauthenticatedError):
                    call()
    with grpc.insecure_channel(router.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == 1
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.RpcError) as caught:
            list(reflection.ServerReflectionInfo(ask, timeout=60))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/no.such/Method", None, None)(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_revoked_or_expired_key_ends_without_a_restart(router, keys):
    url = f"{router.http}/v1/models"
    for change in ({"revoked": True}, {"expires_at": "2001-01-01T00:00:00Z"}):
        key = keys.add("acme")
        wait_for(lambda key=key: httpx.get(url, headers=bearer(key)).status_code == 200, 60, "key known")
        keys.entries[-1] |= change
        keys.write()
        wait_for(lambda key=key: httpx.get(url, headers=bearer(key)).status_code == 401, 60, "key refused")


@pytest.mark.parametrize("change", [{"revoked": True}, {"expires_at": "2001-01-01T00:00:00Z"}, None], ids=str)
def test_grpc_refuses_a_key_that_has_ended_too(change, router, keys):
    """Revoked, expired, or taken out of the file; with the same words as one that never was."""
    key = keys.add("acme")
    with Client(router.grpc, api_key=key) as client:
        wait_for(client.models, 60, "key known")
        if change is None:
            keys.entries.pop()
        else:
            keys.entries[-1] |= change
        keys.write()

        def refused() -> str:
            try:
                client.models()
            except UnauthenticatedError as error:
                return error.message
            return ""

        said = wait_for(refused, 60, "key refused")
        with pytest.raises(UnauthenticatedError):
            client.generate("abc", max_tokens=1)
    with (
        Client(router.grpc, api_key=f"baton-{'0' * 16}-never") as client,
        pytest.raises(UnauthenticatedError) as other,
    ):
        client.models()
    assert said == other.value.message


def test_no_key_is_in_the_log(router, keys):
    key = keys.add("acme")
    httpx.get(f"{router.http}/v1/models", headers=bearer(key))
    httpx.get(f"{router.http}/v1/models?key={key}", headers=bearer(key + "x"))
    text = router.log.read_text()
    assert "API keys" in text
    assert key not in text and key.split("-", 2)[2] not in text
    assert all(entry["key_sha256"] not in text for entry in keys.entries)
