"""The tenant beside whom attacks are made: what it notices of them is its time to the first token, and what fails."""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time

import httpx

BETWEEN_SECONDS = 0.25
PROMPT_TOKENS = 600
REQUEST_SECONDS = 30.0


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1] if seconds else math.inf


async def tenant(
    http: str, key: str, verify: ssl.SSLContext | bool, seconds: float
) -> tuple[list[float], list[str]]:
    """Requests in even steps, each on a connection of its own and with a prompt of its own."""
    firsts: list[float] = []
    failures: list[str] = []

    async def one() -> None:
        body = {"prompt": [random.randrange(10, 4000) for _ in range(PROMPT_TOKENS)], "max_tokens": 2}
        began = time.monotonic()
        try:
            async with (
                httpx.AsyncClient(verify=verify, timeout=REQUEST_SECONDS) as client,
                client.stream(
                    "POST",
                    f"{http}/v1/completions",
                    json={**body, "stream": True, "ignore_eos": True},
                    headers={"authorization": f"Bearer {key}"},
                ) as answer,
            ):
                if answer.status_code != 200:
                    failures.append(f"{answer.status_code} {(await answer.aread()).decode()[:200]}")
                    return
                lines = [line async for line in _timed(answer, began, firsts)]
            if lines[-1:] != ["data: [DONE]"]:
                failures.append(f"ended with {lines[-1:]}")
        except httpx.HTTPError as error:
            failures.append(f"{type(error).__name__}: {error}")

    tasks = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(BETWEEN_SECONDS)
    await asyncio.gather(*tasks)
    return firsts, failures


async def _timed(answer: httpx.Response, began: float, firsts: list[float]):  # type: ignore[no-untyped-def]
    first = True
    async for line in answer.aiter_lines():
        if line:
            if first:
                firsts.append(time.monotonic() - began)
                first = False
            yield line
