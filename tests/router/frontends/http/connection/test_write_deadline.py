"""The deadline by which a client must read, on virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from router.frontends.http.connection.write_deadline import WriteDeadline
from tests.harness.virtual_time import VirtualLoop


def test_time_in_which_the_router_was_stopped_does_not_count() -> None:
    """It wrote nothing meanwhile that the client could have read."""
    loop = VirtualLoop()
    aborted: list[float] = []
    transport: Any = SimpleNamespace(
        get_extra_info=lambda name: None, abort=lambda: aborted.append(loop.time())
    )

    async def start() -> None:
        WriteDeadline(transport, None, 30.0).start()

    loop.run(start())
    loop.stand_still(60.0)
    loop.settle()
    assert not aborted
    loop.pass_time(31.0)
    assert len(aborted) == 1
    loop.close()
