"""Calls of both clients, through one blocking interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import baton
from baton.client import Chunk, Completion

Outcome = tuple[list[Chunk], Completion]
AS_GIVEN: dict[str, Any] = {"shuffle": lambda addresses: None}  # the first address is the first asked
Streamer = Callable[..., Outcome]


def blocking(addresses: Any, prompt: Any, hook: Any = None, settings: Any = None, **options: Any) -> Outcome:
    with (
        baton.Client(addresses, **AS_GIVEN, **(settings or {})) as client,
        client.stream(prompt, **options) as stream,
    ):
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            if hook:
                hook(chunks)
        return chunks, stream.completion()


def by_asyncio(
    addresses: Any, prompt: Any, hook: Any = None, settings: Any = None, **options: Any
) -> Outcome:
    async def run() -> Outcome:
        async with (
            baton.AsyncClient(addresses, **AS_GIVEN, **(settings or {})) as client,
            client.stream(prompt, **options) as stream,
        ):
            chunks = []
            async for chunk in stream:
                chunks.append(chunk)
                if hook:
                    await asyncio.to_thread(hook, chunks)
            return chunks, stream.completion()

    return asyncio.run(run())
