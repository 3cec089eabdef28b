"""How a request reaches a server: the contract, and which protocol is which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from loadgen.config import LoadConfig
from loadgen.record import RequestRecord
from loadgen.workload import Prompt

Clock: TypeAlias = Callable[[], float]


class RequestFailed(Exception):
    """The server said no, or the connection broke. `kind` groups failures in the report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Target(Protocol):
    """One server."""

    async def send(self, prompt: Prompt, record: RequestRecord) -> str:
        """Sends one request, notes every arrival in `record`, returns the answer's text.

        Raises RequestFailed. Cancelling it cancels the request at the server.
        """

    async def close(self) -> None: ...


def open_target(config: LoadConfig, address: str, clock: Clock) -> Target:
    """`clock` gives seconds since the run began."""
    if config.protocol == "grpc":
        from loadgen.grpc_target import GrpcTarget

        return GrpcTarget(config, address, clock)
    from loadgen.http_target import HttpTarget

    return HttpTarget(config, address, clock)
