"""Concurrent clients without pauses: Baton's, which have the addresses of all routers, and plain OpenAI ones, which
have one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import openai

from baton.client import AsyncClient
from cluster.errors import BatonError
from tests.chaos.checker import Checker
from tests.chaos.requests import Request, draw_long_request, draw_request
from tests.chaos.streams import Stream

REQUEST_SECONDS = 90.0
PAUSE_AFTER_ERROR_SECONDS = 0.3


class Workload:
    """`start`, then `pause`/`resume` as often as wanted, then `stop`. `finished` grows by every ended stream."""

    def __init__(
        self,
        grpc: Sequence[str],
        http: Sequence[str],
        checker: Checker,
        *,
        baton_clients: int,
        openai_clients: int,
        seed: str,
        distinct_requests: int = 0,
    ):
        """`distinct_requests`: how many different requests there are; 0 = every one is new."""
        self._grpc, self._http, self._checker = list(grpc), list(http), checker
        self._counts = (baton_clients, openai_clients)
        self._seed = seed
        self._distinct = distinct_requests
        self._running = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._checks: set[asyncio.Task[None]] = set()
        self._cancels: dict[Stream, asyncio.Task[None]] = {}
        self.live: list[Stream] = []
        self.finished: list[Stream] = []

    def start(self) -> None:
        baton, plain = self._counts
        self._running.set()
        clients = [self._baton_client(i) for i in range(baton)]
        clients += [self._openai_client(i) for i in range(plain)]
        self._tasks = [asyncio.create_task(client) for client in clients]

    def pause(self) -> None:
        """Streams that run go on; no new ones begin."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def idle(self, seconds: float) -> bool:
        """True once no stream runs."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self.live and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        return not self.live

    async def checked(self) -> None:
        """Every stream that has ended has been judged."""
        while self._checks:
            await asyncio.wait(set(self._checks))

    def cancel(self, stream: Stream) -> None:
        """The client goes away in the middle."""
        task = self._cancels.get(stream)
        if task is not None:
            stream.cancel_asked = True
            task.cancel()

    async def crowd(self, rng: random.Random, count: int) -> None:
        """This many long requests more, at once; returns when they have ended."""
        async with AsyncClient(self._grpc) as client:
            streams = [Stream("baton", draw_long_request(rng)) for _ in range(count)]
            await asyncio.gather(*(self._live(one, self._stream_baton(client, one)) for one in streams))

    async def stop(self) -> None:
        self._stopping = True
        self._running.set()
        for task in [*self._cancels.values(), *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.checked()

    def _draw(self, rng: random.Random, *, need_seed: bool) -> Request:
        """Draw a request. One of a finite set has a seed of its own, so its answer is the same each time."""
        if self._distinct:
            rng = random.Random(f"{self._seed}:ask:{rng.randrange(self._distinct)}")
        return draw_request(rng, need_seed=need_seed)

    async def _baton_client(self, index: int) -> None:
        rng = random.Random(f"{self._seed}:baton:{index}")
        routers = self._grpc[index % len(self._grpc) :] + self._grpc[: index % len(self._grpc)]
        async with AsyncClient(routers) as client:
            while not self._stopping:
                await self._running.wait()
                stream = Stream("baton", self._draw(rng, need_seed=bool(self._distinct)))
                await self._live(stream, self._stream_baton(client, stream))

    async def _openai_client(self, index: int) -> None:
        rng = random.Random(f"{self._seed}:openai:{index}")
        turn = index
        while not self._stopping:
            await self._running.wait()
            url = self._http[turn % len(self._http)]
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            stream = Stream("openai", self._draw(rng, need_seed=True), router=url)
            async with client:
                await self._live(stream, self._stream_openai(client, stream))
            if stream.outcome == "error":
                turn += 1
                await asyncio.sleep(PAUSE_AFTER_ERROR_SECONDS)

    async def _live(self, stream: Stream, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.live.append(stream)
        self._cancels[stream] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self.live.remove(stream)
            del self._cancels[stream]
            self.finished.append(stream)
        if stream.tokens:  # also of streams that broke: what came must have been right
            check = asyncio.create_task(self._check(stream))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)

    async def _check(self, stream: Stream) -> None:
        stream.verdict = await self._checker.check(stream.request, stream.tokens, stream.seed)

    async def _stream_baton(self, client: AsyncClient, stream: Stream) -> None:
        request = stream.request
        try:
            async with client.stream(
                request.prompt,
                request_id=stream.request_id,
                timeout_seconds=REQUEST_SECONDS,
                **request.options(),
            ) as answer:
                async for chunk in answer:
                    stream.workers = answer.worker_ids
                    stream.seed = answer.seed
                    stream.tokens += chunk.token_ids
                    stream.received()
            stream.attempts = answer.timings.attempts if answer.timings is not None else 0
            stream.end("done")
        except asyncio.CancelledError:
            stream.end("cancelled")
        except BatonError as error:
            stream.end("error", f"{type(error).__name__}: {error}")

    async def _stream_openai(self, client: openai.AsyncOpenAI, stream: Stream) -> None:
        request = stream.request
        stream.seed = request.seed
        try:
            models = await client.models.list()
            answer = await client.completions.create(
                model=models.data[0].id,
                prompt=request.prompt,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                stream=True,
                timeout=REQUEST_SECONDS,
                extra_body={"ignore_eos": True, "return_token_ids": True, "top_k": request.top_k},
            )
            async for chunk in answer:
                for choice in chunk.choices:
                    stream.tokens += (choice.model_extra or {}).get("token_ids") or []
                    stream.received()
            stream.end("done")
        except asyncio.CancelledError:
            stream.end("cancelled")
        except (openai.OpenAIError, OSError) as error:
            stream.end("error", f"{type(error).__name__}: {error}")
        except Exception as error:  # httpx's own, when a connection breaks in the middle
            stream.end("error", f"{type(error).__name__}: {error}")
