"""A process's connection to Ray. Ray itself would wait for a head that hangs without a limit."""

from __future__ import annotations

import logging
import threading
import time

from cluster.errors import SetupError
from cluster.ray_head import call_ray, wait_for_head

RETRY_SECONDS = 1.0
START_SECONDS = 300.0
CONNECT_SECONDS = 60.0  # of one attempt, to a head that responds


def connect_to_ray(address: str, seconds: float = START_SECONDS, stop: threading.Event | None = None) -> str:
    """Connect, and wait for this machine's Ray node, which may start at the same time; returns the head's address.

    Raises SetupError, also once `stop` is set.
    """
    import ray

    stop = stop or threading.Event()
    deadline = time.monotonic() + seconds
    while not ray.is_initialized():
        try:
            head = head_address(address)
            wait_for_head(head, deadline - time.monotonic(), stop)
            call_ray(head, "connecting to Ray", lambda: _init(address), CONNECT_SECONDS, stop=stop)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if stop.wait(RETRY_SECONDS) or time.monotonic() > deadline:
                raise SetupError(
                    f"no Ray node of {address} on this machine: {error}", field="ray_address"
                ) from error
    return str(ray.get_runtime_context().gcs_address)


def head_address(address: str) -> str:
    """host:port of a head as `ray.init` takes it: "auto" is the environment's, else this machine's Ray.

    Raises ConnectionError if there is none, ValueError if it is no address.
    """
    from ray._private.services import canonicalize_bootstrap_address

    head = canonicalize_bootstrap_address(address)
    if head is None:
        raise ConnectionError(f"{address} names no running Ray")
    return str(head)


def _init(address: str) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
