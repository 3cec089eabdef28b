"""Two real routers before stub workers: each of them shows the requests of both."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.harness.router import KeyFile, Router, run_router, stub_workers, wait_ready
from tests.harness.waiting import wait_for

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 5}
SECONDS = 30.0


@pytest.fixture(scope="module")
def routers(checkpoint: Any, redis_server: Any, tmp_path_factory: Any) -> Iterator[list[Router]]:
    namespace = f"test-{secrets.token_hex(4)}"
    config = {
        "model": str(checkpoint("llama")),
        "served_model_name": "tiny",
        "redis_url": redis_server.url,
        "namespace": namespace,
    }
    directory = tmp_path_factory.mktemp("routers")
    with (
        stub_workers(redis_server.url, namespace),
        run_router(directory / "0", {**config, "router_id": "zero"}) as zero,
        run_router(directory / "1", {**config, "router_id": "one"}) as one,
    ):
        for router in (zero, one):
            wait_ready(router.http)
        yield [zero, one]


def live(router: Router) -> dict[str, Any]:
    answer = httpx.get(f"{router.http}/v1/cluster/live")
    assert answer.status_code == 200
    view: dict[str, Any] = answer.json()
    return view


@pytest.mark.long
def test_either_router_shows_the_work_of_both(routers: list[Router]) -> None:
    wait_for(lambda: len(live(routers[0])["routers"]) == 2, SECONDS, "they see each other")
    wait_for(lambda: live(routers[0])["history"]["ttft_p50"], SECONDS, "the first slot")

    def work() -> bool:
        assert httpx.post(f"{routers[1].http}/v1/completions", json=BODY).status_code == 200
        now = live(routers[0])["now"]
        return bool(now["requests_per_second"] and now["output_tokens_per_second"] and now["itl"]["p99"])

    wait_for(work, SECONDS, "the other router's requests are seen here")
    view = live(routers[0])
    assert view["router"] == "zero"
    assert [router["id"] for router in view["routers"]] == ["one", "zero"]
    other, own = view["routers"]
    assert other["requests_per_second"] > 0 == own["requests_per_second"]
    assert {worker["role"] for worker in view["workers"]} == {"prefill", "decode"}
    (flow,) = view["flows"]
    assert (flow["from"], flow["to"]) == ("stub-prefill-0", "stub-decode-0")
    assert flow["bytes_per_second"] > 0 and view["now"]["kv_bytes_per_second"] > 0
    assert 0 < view["now"]["ttft"]["p50"] <= view["now"]["ttft"]["p99"]
    lengths = {len(column) for name, column in view["history"].items() if name != "interval_seconds"}
    assert len(lengths) == 1


def test_no_addresses_no_secrets(routers: list[Router]) -> None:
    view = live(routers[0])
    assert not {"address", "metrics", "epoch", "pid"} & set(view["workers"][0])


@pytest.mark.long
def test_a_router_that_leaves_is_gone(
    routers: list[Router], checkpoint: Any, redis_server: Any, tmp_path: Any
) -> None:
    config = {"model": str(checkpoint("llama")), "redis_url": redis_server.url, "router_id": "brief"}
    config["namespace"] = f"test-{secrets.token_hex(4)}"
    with run_router(tmp_path / "stays", {**config, "router_id": "stays"}) as stays:
        with run_router(tmp_path / "brief", config):
            wait_for(lambda: len(live(stays)["routers"]) == 2, SECONDS, "both are there")
        wait_for(lambda: len(live(stays)["routers"]) == 1, SECONDS, "one has left")


def test_the_view_needs_an_admins_key_and_the_page_none(
    checkpoint: Any, redis_url: str, namespace: str, tmp_path: Any
) -> None:
    keys = KeyFile(tmp_path / "keys.yaml")
    user, admin = keys.add("acme"), keys.add("ops", admin=True)
    config = {"model": str(checkpoint("llama")), "redis_url": redis_url, "namespace": namespace}
    with run_router(tmp_path, {**config, "api_keys_file": str(keys.path)}) as router:
        for key, status in (("", 401), (user, 403), (admin, 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = httpx.get(f"{router.http}/v1/cluster/live", headers=headers)
            assert answer.status_code == status
        assert httpx.get(f"{router.http}/ui").status_code == 200
        assert httpx.get(f"{router.http}/ui/app.js").status_code == 200
        assert httpx.get(f"{router.http}/ui/nothing.js").status_code == 401
