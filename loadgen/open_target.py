"""Opens the target of a configuration's protocol."""

from __future__ import annotations

from loadgen.config import LoadConfig
from loadgen.target import Clock, Target


def open_target(config: LoadConfig, address: str, clock: Clock) -> Target:
    """`clock` gives seconds since the run began."""
    if config.protocol == "grpc":
        from loadgen.grpc_target import GrpcTarget

        return GrpcTarget(config, address, clock)
    from loadgen.http_target import HttpTarget

    return HttpTarget(config, address, clock)
