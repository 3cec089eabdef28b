"""A process's connection to Ray. Ray itself would wait for a head that hangs without a limit."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

from cluster.errors import SetupError
from cluster.protocol.times import RAY_HEAD_SILENT_SECONDS
from cluster.ray_head import call_ray, probe, wait_for_head

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
            wait_for_head(head, deadline - time.monotonic(), stop, partial(probe, token=_token()))
            call_ray(head, "connecting to Ray", partial(_init, address, head), CONNECT_SECONDS, stop=stop)
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


def _token() -> str:
    """The token that Ray sends from this process, "" for none. A head that refuses it answers the probe at once, and
    `ray.init` only says that it failed to connect, 10 s later. Raises SetupError if Ray is to send one and has none."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    try:
        headers: dict[str, str] = AuthenticationTokenLoader.instance().get_token_for_http_header()
    except AuthenticationError:
        raise SetupError(
            "RAY_AUTH_MODE is token, and this process has none: set RAY_AUTH_TOKEN to the token that Ray's head was "
            "started with",
            field="ray_address",
        ) from None
    return headers.get("authorization", "").removeprefix("Bearer ")


def _init(address: str, head: str) -> None:
    import ray

    with _nodes_of_other_containers(head):
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


@contextlib.contextmanager
def _nodes_of_other_containers(head: str) -> Iterator[None]:
    """Ray 2.55 and later look for this machine's node among the processes only, and do not see one that runs in another
    container of the pod (ray-project/ray#63923). The head knows it by its address."""
    from ray._private import services

    visible = services.find_node_ids
    services.find_node_ids = lambda: visible() or _nodes_at_own_address(head)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        services.find_node_ids = visible


def _nodes_at_own_address(head: str) -> set[str]:
    """Ids of nodes that live, as hexadecimal digits."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    nodes = GcsClient(address=head).get_all_node_info(timeout=RAY_HEAD_SILENT_SECONDS).values()
    return {
        one.node_id.hex()
        for one in nodes
        if one.state == one.ALIVE and _is_own_address(one.node_manager_address)
    }


def _is_own_address(address: str) -> bool:
    """Whether a socket may have it here. What this machine calls its own needs a route to other networks, or a name."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
