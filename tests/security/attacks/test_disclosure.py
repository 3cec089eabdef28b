"""An error that a client reads names no worker, no address and no part of the code, whatever its source; and no endpoint
or adapter tells a tenant what another one has sent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import errors
from cluster.config.router import RouterConfig
from router.dispatch.attempt_events import Source
from router.dispatch.retry_policy import RetryPolicy
from router.text.tokenizer import ModelText
from tests.end_to_end.conftest import run_cluster
from tests.harness.adapters import make_adapter
from tests.harness.embedding_files import with_embeddings
from tests.harness.router import KeyFile
from tests.router.dispatch.failing_attempts import Failing, run
from tests.security.attacks.endpoints import ENDPOINTS
from tests.security.attacks.together import FLAGS, MODEL

INSIDE = "decode-7 at 10.0.0.3:5001 in /srv/engine.py"
INTERNAL: list[type[errors.BatonError]] = [
    errors.PeerLostError,
    errors.TransportError,
    errors.StaleEpochError,
    errors.DigestMismatchError,
    errors.BlocksExhaustedError,
    errors.DrainingError,
    errors.InternalError,
]


@pytest.mark.parametrize("kind", INTERNAL)
def test_a_request_that_gives_up_reports_only_the_kind_of_error(kind: type[errors.BatonError]) -> None:
    for costly in (True, False):
        policy = RetryPolicy(1, 0.0)
        with pytest.raises(errors.BatonError, match=kind.__name__) as told:
            policy.pause_seconds(kind(INSIDE), 1.0, progress=False, costly=costly)
        assert "decode-7" not in str(told.value)


async def test_internal_details_of_workers_are_not_disclosed(
    checkpoint: Callable[[str], Path], monkeypatch: Any
) -> None:
    text = ModelText(checkpoint("llama"))
    world = Failing(text, 9 * [(Source.DECODE, errors.InternalError(INSIDE), 0)])
    world.services.config = RouterConfig(model=Path("/none"), max_attempts=2)
    with pytest.raises(errors.AttemptsExhaustedError) as told:
        await run(world, monkeypatch)
    text.close()
    assert told.value.message == "gave up after 2 attempts: InternalError"


def test_an_exception_of_the_engine_shows_its_class_only() -> None:
    error = errors.engine_request_error(KeyError("/srv/engine.py"))
    assert error.public_text == "the request failed in the engine: KeyError"


def test_errors_of_the_request_are_shown() -> None:
    error = errors.EngineRequestError("min_tokens forbids every token")
    assert error.public_text == error.message


def cached_tokens(answer: Any) -> int:
    """Of a usage in the form of any endpoint."""
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"] or 0)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


@pytest.mark.long
def test_a_prompt_is_cached_for_its_tenant_and_its_adapter_only(tmp_path: Path) -> None:
    """Whatever endpoint sends it, under the model's name or an adapter's. One worker is enough: what it has cached belongs
    to a tenant and an adapter by the salt of the router."""
    keys = KeyFile(tmp_path / "keys.yaml")
    mine, probing = keys.add("mine"), keys.add("probing")
    flags = [*FLAGS, "--prefill", "0", "--local-prefill", "always", "--api-keys-file", str(keys.path)]
    for seed, name in enumerate(("one", "two")):
        flags += ["--lora", f"{name}={make_adapter(tmp_path / name, MODEL, seed=seed)}"]
    with_embeddings(MODEL, tmp_path / "model", "lasttoken")  # which alone takes cached prefixes
    with run_cluster(tmp_path / "cluster", tmp_path / "model", *flags) as cluster:

        def cached(key: str, endpoint: str, text: str, model: str) -> int:
            one, headers = ENDPOINTS[endpoint], {"authorization": f"Bearer {key}"}
            answer = httpx.post(
                f"{cluster.http}{one.path}", content=one.body(text, model=model), headers=headers, timeout=60
            )
            assert answer.status_code == 200, answer.text
            return cached_tokens(answer.json())

        def check(endpoint: str) -> None:
            text = f"def {endpoint}(a, b): return a + b  # " * 20
            assert cached(mine, endpoint, text, "one") == 0
            assert cached(mine, endpoint, text, "one") > 50, endpoint
            assert cached(probing, endpoint, text, "one") == 0
            for other in ("two", ""):
                assert cached(mine, endpoint, text, other) == 0

        dispatched = [name for name, one in ENDPOINTS.items() if one.dispatched]
        with ThreadPoolExecutor(len(dispatched)) as threads:
            list(threads.map(check, dispatched))
