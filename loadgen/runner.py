"""Drives sessions against targets: an open loop on a schedule, or a closed loop of users.

open:    pacer thread ──due──► session, session, …          however slow the server is
closed:  user 1: session ─► session ─► …                    the next begins when the last has ended
         user 2: session ─► …
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from loadgen.config import LoadConfig
from loadgen.key_watch import KeyWatch
from loadgen.record import Failure, RequestRecord
from loadgen.schedule import Pacer, session_schedule
from loadgen.target import Clock, RequestFailed, Target
from loadgen.workload import ChatPrompt, Prompt, TextPrompt, Workload

_SAMPLE_CHARACTERS = 2000


@dataclass
class Progress:
    """How far a run is."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    output_tokens: int = 0
    last_ttft: float = 0.0


class Runner:
    """Sends one configuration's requests. `records` has one for each request that was due so far."""

    def __init__(
        self,
        config: LoadConfig,
        targets: Sequence[Target],
        workload: Workload,
        clock: Clock,
        key_watch: KeyWatch,
    ):
        self._config = config
        self._targets = targets
        self._workload = workload
        self._clock = clock
        self._key_watch = key_watch
        self._in_flight = asyncio.Semaphore(config.max_in_flight)
        self._next_session = 0
        self.records: list[RequestRecord] = []
        self.progress = Progress()

    async def run(self) -> None:
        """Raises KeyRefused, in a group."""
        if self._config.rate is None:
            await self._closed_loop()
        else:
            await self._open_loop()

    async def _closed_loop(self) -> None:
        async with asyncio.TaskGroup() as users:
            for _ in range(self._config.concurrency):
                users.create_task(self._user())

    async def _user(self) -> None:
        while self._may_start(now := self._clock()):
            await self._session(now)

    async def _open_loop(self) -> None:
        schedule = session_schedule(self._config)
        due_times = aiter(Pacer(schedule, self._clock))
        async with aclosing(due_times), asyncio.TaskGroup() as sessions:
            async for due in due_times:
                sessions.create_task(self._session(due))

    def _may_start(self, intended: float) -> bool:
        if self._config.requests is not None:
            return len(self.records) < self._config.requests
        return intended < (self._config.seconds or 0.0)

    async def _session(self, intended: float) -> None:
        index, self._next_session = self._next_session, self._next_session + 1
        session = self._workload(index)
        target = index % len(self._targets)
        answer: str | None = None
        turn = 0
        while self._may_start(intended) and (prompt := session.next(answer)) is not None:
            record = RequestRecord(self._config.protocol, index, turn, intended, self._config.slo)
            answer = await self._request(target, prompt, record)
            turn += 1
            if answer is None or turn == self._config.session_turns:
                return
            await asyncio.sleep(self._config.think_seconds)
            intended = self._clock()

    async def _request(self, index: int, prompt: Prompt, record: RequestRecord) -> str | None:
        """Send one request; returns its answer, or None if it failed."""
        target, address = self._targets[index], self._config.addresses[index]
        self.records.append(record)
        self.progress.started += 1
        answer: str | None = None
        try:
            async with self._in_flight, asyncio.timeout(self._config.timeout_seconds):
                answer = await target.send(prompt, record)
        except TimeoutError:
            record.failure = Failure("deadline", "no end within the request's deadline", address)
        except RequestFailed as failed:
            record.failure = Failure(failed.kind, failed.message, address)
        else:
            self._finish(record, prompt, answer, address)
        self._count(record)
        self._key_watch.note((address, self._config.api_key), record.failure)
        return answer

    def _finish(self, record: RequestRecord, prompt: Prompt, answer: str, address: str) -> None:
        if not record.arrivals:
            record.failure = Failure("no_tokens", "the answer was empty", address)
        if len(self.records) <= self._config.keep_samples:
            record.sample_prompt = _shown(prompt)[-_SAMPLE_CHARACTERS:]
            record.sample_answer = answer[:_SAMPLE_CHARACTERS]

    def _count(self, record: RequestRecord) -> None:
        self.progress.finished += 1
        if record.ok:
            self.progress.output_tokens += record.output_tokens
            self.progress.last_ttft = record.ttft
        else:
            self.progress.failed += 1


def run_clock() -> Clock:
    """A clock of the seconds since this call."""
    zero = time.perf_counter()
    return lambda: time.perf_counter() - zero


def _shown(prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, ChatPrompt):
        return "\n".join(f"{role}: {content}" for role, content in prompt.messages)
    return f"{len(prompt.ids)} token ids"
