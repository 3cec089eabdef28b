"""Closing a client or a stream ends its pause before another attempt."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import baton
from cluster.errors import CancelledError
from tests.baton.client_calls import AS_GIVEN
from tests.harness.stub_inference import StubRouter

PAUSE = 600.0  # longer than a test may take: nothing waits it out


def begin_pausing(monkeypatch: pytest.MonkeyPatch, begun: threading.Event | asyncio.Event) -> None:
    def pause_seconds(*_: Any) -> float:
        begun.set()
        return PAUSE

    monkeypatch.setattr("baton.client.base.pause_seconds", pause_seconds)


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "client"])
async def test_aclose_ends_the_pause_before_a_reconnect(
    router: StubRouter, other: StubRouter, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    router.inference.end_early_at = 1
    begun = asyncio.Event()
    begin_pausing(monkeypatch, begun)
    async with baton.AsyncClient([router.address, other.address], **AS_GIVEN) as client:
        stream = client.stream("x", max_tokens=5)
        chunks = []

        async def read() -> None:
            async for chunk in stream:
                chunks.append(chunk)

        reader = asyncio.create_task(read())
        await begun.wait()
        await (client if whole else stream).aclose()
        if whole:
            with pytest.raises(CancelledError, match="closed"):
                await reader
        else:
            await reader
        assert len(chunks) == 1 and not client._pauses
    assert not other.inference.requests


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "client"])
def test_close_ends_the_pause_before_a_reconnect(
    router: StubRouter, other: StubRouter, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    router.inference.end_early_at = 1
    begun = threading.Event()
    begin_pausing(monkeypatch, begun)
    with baton.Client([router.address, other.address], **AS_GIVEN) as client:
        stream = client.stream("x", max_tokens=5)
        closed = client if whole else stream
        closer = threading.Thread(target=lambda: (begun.wait(60), closed.close()))
        closer.start()
        assert next(stream) is not None
        if whole:
            with pytest.raises(CancelledError, match="closed"):
                next(stream)
        else:
            assert list(stream) == []
        closer.join(60)
        assert not client._pauses
    assert not other.inference.requests


async def test_aclose_ends_the_pause_of_a_short_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = asyncio.Event()
    begin_pausing(monkeypatch, begun)
    client = baton.AsyncClient("127.0.0.1:1")
    call = asyncio.create_task(client.models())
    await begun.wait()
    await client.aclose()
    with pytest.raises(CancelledError, match="closed"):
        await call
