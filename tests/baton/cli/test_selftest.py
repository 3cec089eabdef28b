"""The checks of `helm test` against a router with stub workers: which pass, and the texts of failures."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.cli.selftest import (
    RouterEndpoints,
    check_generation,
    check_handoff,
    check_health,
    check_load,
    check_prefix_hit,
)
from cluster.errors import InternalError, UnavailableError
from tests.harness.router import run_router, stub_workers


def test_checks_report_what_is_present_and_what_is_missing(
    redis_url: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    namespace = f"test-{secrets.token_hex(4)}"
    config = {"model": str(checkpoint("llama")), "redis_url": redis_url, "namespace": namespace}
    with run_router(tmp_path, config) as router:
        endpoints = RouterEndpoints(router.http, (router.grpc,))
        with pytest.raises(UnavailableError, match="no decode worker is available"):
            check_health(endpoints, 0.5)
        with stub_workers(redis_url, namespace):
            assert "is ready and serves" in check_health(endpoints, 30.0)
            assert check_generation(endpoints).startswith("8 tokens in")
            assert check_load(endpoints, 1.0, 5.0).endswith("none failed")
            with pytest.raises(InternalError, match="no hand-off over carrier-pigeon within"):
                check_handoff(endpoints, 0.5, "carrier-pigeon")
            shown = CliRunner().invoke(
                app, ["selftest", "--url", router.http, "--target", router.grpc, "health"]
            )
            assert shown.exit_code == 0 and "is ready" in shown.output


def test_a_router_that_does_not_answer_is_reported_in_time() -> None:
    with pytest.raises(UnavailableError, match="was not ready within 0 s"):
        check_health(RouterEndpoints("http://127.0.0.1:9", ("127.0.0.1:9",)), 0.0)


class Answers:
    """The endpoints of a router, and its client: each answer is the next of those given, and the last one stays."""

    targets, api_key, tls = ("h:1",), "", None

    def __init__(self, *answers: Any):
        self._answers = list(answers)

    def client(self) -> Answers:
        return self

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def models(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(max_model_len=64)]

    def tokenize(self, text: str) -> list[int]:
        return list(range(len(text)))

    def generate(self, prompt: list[int], **_: object) -> Any:
        assert 0 < len(prompt) <= 16, "a quarter of the context at most"
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def cached(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(usage=SimpleNamespace(cached_tokens=tokens, prompt_tokens=16))


def test_a_prefix_that_is_computed_again_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.selftest.PAUSE_SECONDS", 0.0)
    hit: Any = Answers(cached(0), cached(0), cached(8))
    assert check_prefix_hit(hit, 20.0) == "8 of 16 prompt tokens were cached"
    missed: Any = Answers(cached(0))
    with pytest.raises(InternalError, match="no prefix hit within 0 s"):
        check_prefix_hit(missed, 0.0)


def test_an_answer_without_tokens_is_none() -> None:
    silent: Any = Answers(SimpleNamespace(token_ids=[]))
    with pytest.raises(InternalError, match="the answer has no tokens"):
        check_generation(silent)


@pytest.mark.parametrize(("requests", "failed"), [(0, 0), (5, 1)])
def test_a_load_run_without_a_request_proves_nothing(
    requests: int, failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_all(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(requests=requests, failed=failed)

    monkeypatch.setattr("loadgen.load.run_all", run_all)
    monkeypatch.setattr("loadgen.table.print_report", lambda *_: None)
    endpoints: Any = Answers()
    with pytest.raises(InternalError, match=f"{failed} of {requests} requests failed"):
        check_load(endpoints, 1.0, 1.0)
