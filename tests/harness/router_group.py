"""A router of several processes in front of stub workers, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.harness import router_process
from tests.harness.waiting import wait_for

START_SECONDS = 60.0
# A token of every stream each tenth of a second
STEPPING = ("bench.probes.token_stubs", "--pairs", "1", "--gap", "0.1")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class RouterGroup:
    http: str
    grpc: str
    pid: int  # of the parent
    directory: Path

    @property
    def address(self) -> tuple[str, int]:
        """Of the HTTP port."""
        host, _, port = self.http.partition("//")[2].rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def log(self) -> str:
        return (self.directory / "router.log").read_text(errors="replace")

    def pids(self) -> list[int]:
        """Of the processes; 0 for one that does not serve."""
        facts = json.loads((self.directory / "router.ready").read_text())
        return list(facts["processes"])

    def signal(self, index: int, number: signal.Signals) -> int:
        pid = self.pids()[index]
        os.kill(pid, number)
        return pid

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.http + path, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def why_not_ready(self) -> list[str]:
        why: list[str] = json.loads(self.get("/ready")[1])["why"]
        return why

    def view(self) -> dict[str, Any]:
        """`router` of /v1/cluster."""
        view: dict[str, Any] = json.loads(self.get("/v1/cluster")[1])["router"]
        return view

    def samples(self, path: str = "/metrics") -> Samples:
        return parse(self.get(path)[1])

    def wait_ready(self, what: str) -> None:
        wait_for(lambda: self.get("/ready")[0] == 200, START_SECONDS, what)


def answered(samples: Samples) -> float:
    """Requests that ended well, of all models."""
    return sum(
        value
        for (name, labels), value in samples.items()
        if name == "baton_requests_total" and ("outcome", "ok") in labels
    )


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def grown(samples: Samples) -> Samples:
    """Those that must never fall."""
    ends = ("_total", "_count", "_bucket", "_sum")
    return {key: value for key, value in samples.items() if key[0].endswith(ends)}


@contextlib.contextmanager
def run_group(
    directory: Path, model: Path, processes: int, stubs: tuple[str, ...] = STEPPING, **settings: Any
) -> Iterator[RouterGroup]:
    """It must not have logged an exception."""
    standard = {"processes": processes, "router_id": "group", "drain_seconds": 2.0}
    with router_process.run(directory, model, stubs, **{**standard, **settings}) as running:
        group = RouterGroup(running.http, running.grpc, running.pid, directory)
        yield group
    assert '"exception"' not in group.log and "Traceback" not in group.log, group.log


class HttpStream:
    """One streamed completion over a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int):
        self.status = status
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(
        cls, group: RouterGroup, tokens: int = 1000, headers: Mapping[str, str] | None = None
    ) -> HttpStream:
        """Returns once its first bytes have come."""
        return await cls.begin(*await asyncio.open_connection(*group.address), tokens, headers)

    @classmethod
    async def begin(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        tokens: int,
        headers: Mapping[str, str] | None = None,
    ) -> HttpStream:
        """As `open`, over a connection that is open."""
        body = json.dumps(
            {"prompt": "abc", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        ).encode()
        lines = [f"{name}: {value}" for name, value in (headers or {}).items()]
        head = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(body)}", *lines, "", ""]
        writer.write("\r\n".join(head).encode() + body)
        async with asyncio.timeout(30):
            first = await reader.readuntil(b"\r\n")
        return cls(reader, writer, int(first.split()[1]))

    async def rest(self) -> bytes:
        """Until the connection ends, or its last event."""
        got = bytearray()
        with contextlib.suppress(OSError):
            while b"[DONE]" not in got and (more := await self._reader.read(1 << 16)):
                got += more
        return bytes(got)

    async def close(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@dataclass
class Seen:
    """What happened to connections, each with one short request."""

    answers: Counter[int]
    refused: int = 0
    broken: int = 0  # reset, or closed without an answer


async def ask_until_refused(group: RouterGroup, seen: Seen) -> None:
    """One new connection after the other, until the port is closed."""
    body = b'{"prompt": "abc", "max_tokens": 1}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    while True:
        try:
            reader, writer = await asyncio.open_connection(*group.address)
        except ConnectionRefusedError:
            seen.refused += 1
            return
        with contextlib.closing(writer):
            try:
                writer.write(head + body)
                seen.answers[int((await reader.readuntil(b"\r\n")).split()[1])] += 1
            except (OSError, asyncio.IncompleteReadError):
                seen.broken += 1
