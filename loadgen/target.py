"""The contract of a load target, and its failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from loadgen.record import RequestRecord
from loadgen.workload import Prompt

Clock: TypeAlias = Callable[[], float]


class RequestFailed(Exception):
    """The server refused the request, or the connection broke. `kind` groups failures in the report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Target(Protocol):
    """One server."""

    async def send(self, prompt: Prompt, record: RequestRecord) -> str:
        """Send one request, note every arrival in `record`, and return the answer's text.

        Raises RequestFailed. Cancelling it cancels the request at the server.
        """

    async def close(self) -> None: ...
