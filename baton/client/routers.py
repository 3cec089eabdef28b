"""The routers of a client, and the one in use."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from cluster.errors import ConfigError

# A router that hangs, or whose host is silent, is left within 5 s. gRPC's own pings, which measure the connection, have a
# time-out of 60 s, and while one is pending no keepalive is sent.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),  # also through a long wait for the first token
    ("grpc.max_receive_message_length", 64 << 20),
)


Shuffle = Callable[[list[str]], None]


class Routers:
    """A ring of addresses. A failure moves on from the failed address, once, however many calls report it.

    Each client shuffles the list: clients with the same list spread over all routers, and the clients of a router that
    dies spread over the remaining ones.
    """

    def __init__(self, addresses: str | Sequence[str], shuffle: Shuffle = random.shuffle) -> None:
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._addresses:
            raise ConfigError("a client needs the address of at least one router", field="addresses")
        shuffle(self._addresses)
        self._current = 0

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._addresses)

    @property
    def current(self) -> str:
        return self._addresses[self._current]

    def failed(self, address: str) -> None:
        if self.current == address:
            self._current = (self._current + 1) % len(self._addresses)


def check_key(api_key: str) -> str:
    """Return the key. Raises ConfigError where no header can hold it, as with a line's end from a file: the error of a
    library would show it."""
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(
            "api_key: has characters that no header may have, as the end of a line", field="api_key"
        )
    return api_key


def call_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call. Raises ConfigError, as `check_key`."""
    check_key(api_key)
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def default_reconnects(addresses: Sequence[str]) -> int:
    """Each address twice, also a single one: several routers, or several processes of one, may be behind it."""
    return 2 * len(addresses) - 1


def pause_seconds(reconnects: int, routers: int) -> float:
    """Pause before a reconnect: none in the first round over the other routers, growing in later ones."""
    rounds = reconnects // max(1, routers)
    return min(1.0, 0.1 * rounds)
