"""One request of a batch, until it has an answer or its time is over."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from baton.batch.lines import Request
from baton.client.routers import Routers, check_key
from cluster.errors import ConfigError, UnauthenticatedError
from cluster.security.tls import ClientTls

# A quota, no free worker, a proxy without a router. Other statuses would be the same once more, and so would an answer
# with `x-should-retry: false`: of a request with which several workers failed, for example.
RETRIED = frozenset({429, 502, 503})
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Sending:
    """How requests are sent. `timeout`: seconds for one attempt; `retry_seconds`: within which a request is sent
    again."""

    urls: Sequence[str]
    api_key: str = ""
    tls: ClientTls | None = None
    concurrency: int = 32
    timeout: float = 600.0
    retry_seconds: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """Status and body of an answer, or the reason for which there is none."""

    status: int = 0
    request_id: str = ""
    body: Any = None
    error: tuple[str, str] | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200

    def tokens(self) -> tuple[int, int]:
        """Tokens of prompt and answer, as the body's usage counts them."""
        usage = self.body.get("usage") if isinstance(self.body, dict) else None
        if not isinstance(usage, dict):
            return 0, 0
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        answer = usage.get("completion_tokens", usage.get("output_tokens"))
        return (prompt if isinstance(prompt, int) else 0), (answer if isinstance(answer, int) else 0)


class Sender:
    """Sends to the routers in turn; a router without a connection is left out until its turn comes again."""

    def __init__(self, sending: Sending, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        scheme = "http" if sending.tls is None else "https"
        urls = [url if "//" in url else f"{scheme}://{url}" for url in sending.urls]
        self._urls = Routers([url.rstrip("/").removesuffix("/v1") for url in urls]).addresses
        self._turn = 0
        self._retry_seconds = sending.retry_seconds
        self._sleep = sleep
        headers = {"content-type": "application/json"}
        if api_key := check_key(sending.api_key):
            headers["authorization"] = f"Bearer {api_key}"
        # trust_env off: a proxy in the environment would get requests for routers on this machine
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(sending.timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=sending.concurrency, keepalive_expiry=5.0),
            verify=sending.tls.context() if sending.tls is not None else True,
            trust_env=False,
        )

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def send(self, request: Request) -> Outcome:
        """Send until there is an answer that another attempt would not change, or the time is over.

        Raises UnauthenticatedError: every other request would fail alike.
        """
        body = request.body
        content = orjson.dumps({**body, "priority": "batch"} if body.get("priority") is None else body)
        end = time.monotonic() + self._retry_seconds
        attempt = 0
        while True:
            outcome, wanted = await self._attempt(request.path, content)
            if outcome.status == 401:
                raise UnauthenticatedError("the routers require a valid API key (--api-key)", field="api_key")
            if wanted is None or (outcome.error is None and outcome.status not in RETRIED):
                return outcome
            pause = max(wanted, _pause_seconds(attempt))
            if time.monotonic() + pause > end:
                return outcome
            await self._sleep(pause)
            attempt += 1

    async def _attempt(self, path: str, content: bytes) -> tuple[Outcome, float | None]:
        """One attempt, and the pause in seconds that the router asked for; None: another one would not help."""
        url = self._urls[self._turn % len(self._urls)]
        self._turn += 1
        try:
            answer = await self._client.post(f"{url}{path}", content=content)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url} is not a URL ({error})", field="url") from error
        except httpx.HTTPError as error:
            # httpx's time-outs have no text
            return Outcome(error=("connection_error", f"{url}: {error or type(error).__name__}")), 0.0
        try:
            body = orjson.loads(answer.content)
            # Its depth is bounded there, at a quarter of what is read.
            orjson.dumps({"response": {"body": body}})
        except (orjson.JSONDecodeError, TypeError):
            body = answer.text
            if answer.status_code == 200:
                reason = f"{url}: the answer is not JSON, or is nested too deep"
                return Outcome(error=("invalid_answer", reason)), 0.0
        request_id = answer.headers.get("x-request-id", "")
        return Outcome(answer.status_code, request_id, body), _wanted_seconds(answer)


def _wanted_seconds(answer: httpx.Response) -> float | None:
    """Retry-After; a date is not read. None: the router asks not to send the request again."""
    if answer.headers.get("x-should-retry") == "false":
        return None
    try:
        return max(0.0, float(answer.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0


def _pause_seconds(attempt: int) -> float:
    """Twice as long each time, and half of it by chance: requests that failed together return apart."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(attempt, 10))
    return float(longest * random.uniform(0.5, 1.0))
