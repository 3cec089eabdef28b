"""A request that failed in two engines is not dispatched a third time; one whose workers merely died goes on."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import (
    AttemptsExhaustedError,
    BatonError,
    DrainingError,
    EngineFailedError,
    EngineRequestError,
    InternalError,
    PeerLostError,
)
from router.dispatch import life
from router.dispatch.attempt import Source
from router.tokens.tokenizer import ModelText
from tests.router.dispatch.test_life import NEW, Scripted, World, deliver, end

REQUEST = EngineRequestError("non-finite logits")
FAILED = EngineFailedError("the engine failed while it ran this request: IndexError")


@pytest.fixture(scope="module")
def text(checkpoint):
    made = ModelText(checkpoint("llama"))
    yield made
    made.close()


class Failing(World):
    """The first attempts fail as given, at P or D, after a number of tokens; later ones succeed."""

    def __init__(self, text: ModelText, ends: list[tuple[Source, BatonError, int]]):
        super().__init__(text, [])
        self.ends = ends

    def attempt(self, **facts: object) -> Scripted:
        made = super().attempt(**facts)
        number = len(self.attempts) - 1
        if number < len(self.ends):
            source, error, tokens = self.ends[number]
            made.start = lambda: self.fail(made, source, error, tokens)  # type: ignore[method-assign]
        return made

    def fail(self, made: Scripted, source: Source, error: BatonError, tokens: int) -> None:
        position = made.from_position
        for _ in range(tokens):
            position = made.play("next", position)
        made.ends(source, end("ABORTED", error))


async def run(world: Failing, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(life, "Attempt", world.attempt)
    async with asyncio.timeout(60):
        return len(await deliver(world))


@pytest.mark.parametrize("error", [REQUEST, FAILED])
@pytest.mark.parametrize("source", list(Source))
async def test_one_failure_is_retried_at_another_worker(text, monkeypatch, error, source):
    world = Failing(text, [(source, error, 0)])
    assert await run(world, monkeypatch) == NEW
    (first, second) = world.excluded
    assert (source.value[0] in first, source.value[0] in second) == (False, True), "not where it failed"


@pytest.mark.parametrize("errors", [(REQUEST, REQUEST), (FAILED, REQUEST), (FAILED, FAILED)])
@pytest.mark.parametrize("sources", [(Source.PREFILL, Source.DECODE), (Source.DECODE, Source.DECODE)])
async def test_two_failures_end_the_request_whatever_happens_in_between(text, monkeypatch, errors, sources):
    """Tokens sent in between, and workers that were merely lost, do not reset the count."""
    between = (Source.DECODE, PeerLostError("the stream ended early"), 1)
    world = Failing(text, [(sources[0], errors[0], 2), between, (sources[1], errors[1], 2)])
    with pytest.raises(AttemptsExhaustedError, match="failed in 2 engines") as caught:
        await run(world, monkeypatch)
    assert len(world.attempts) == 3, "a third engine has seen it"
    assert not caught.value.retryable
    assert world.released == [one.transfer_id for one in world.attempts]


@pytest.mark.parametrize(
    "error", [PeerLostError("lost"), DrainingError("leaves"), InternalError("a rank does not answer")]
)
async def test_errors_that_are_no_engine_failure_do_not_count(text, monkeypatch, error):
    world = Failing(text, [(Source.DECODE, error, 1)] * 5)
    assert await run(world, monkeypatch) == NEW
