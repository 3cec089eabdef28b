"""An error that a client reads names no worker, no address and no part of the code, whatever its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import errors
from cluster.config.router import RouterConfig
from router.dispatch.attempt import Source
from router.dispatch.retry_policy import RetryPolicy
from router.text.tokenizer import ModelText
from tests.router.dispatch.test_engine_failures import Failing, run

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
