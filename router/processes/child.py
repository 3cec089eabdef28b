"""One process of a router: `python -m router.processes.child`, started by the parent; stdin has its settings."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

import uvloop

from cluster.config.router import RouterConfig
from cluster.errors import BatonError
from cluster.process.parent_death import die_with_parent
from cluster.telemetry import logs
from router.processes.member import Member
from router.processes.memory import SharedMemory
from router.processes.parent_link import ParentLink

log = logging.getLogger(__name__)


def main() -> None:
    setup: dict[str, Any] = json.load(sys.stdin)
    # The parent's death ends this process until it serves; from then on the end of the link drains it. Set here and not
    # between fork and exec, where another thread of the parent may hold a lock.
    die_with_parent()
    if os.getppid() != setup["parent"]:
        raise SystemExit("the router's parent process has ended")
    config = RouterConfig.model_validate(setup["config"])
    logs.configure(config.router_id)
    try:
        uvloop.run(_run(config, setup))
    except BatonError as error:
        raise SystemExit(f"{config.router_id}: {error.message}") from None


async def _run(config: RouterConfig, setup: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    # Ctrl-C reaches every process of a terminal; the parent decides when this one leaves.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    from router.server import Router

    memory = SharedMemory(setup["memory"], config.processes, setup["tenants"])
    parent = ParentLink(socket.socket(fileno=setup["link"]))
    listeners = [socket.socket(fileno=one) for one in setup["http"]]
    member = Member(setup["name"], setup["index"], memory, listeners, parent)
    running = Router(config, member)
    parent.start(running.snapshot)
    await running.start()
    # Until here SIGTERM ends it. From here on its clients are served until the parent says that the router leaves.
    loop.add_signal_handler(signal.SIGTERM, _ignored)
    await parent.report({"started": {"http": running.http_url, "grpc": running.grpc_address}})
    await parent.drain_wanted.wait()
    await running.close()


def _ignored() -> None:
    log.warning("SIGTERM to one process of a router is ignored; the router leaves when its parent gets it")


if __name__ == "__main__":
    main()
