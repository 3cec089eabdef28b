"""A NIXL write that is complete stays complete, whatever state NIXL reports for its handle."""

from __future__ import annotations

import pytest

from kv_transfer.transports.nixl import NixlWrite


class Agent:
    def __init__(self) -> None:
        self.state = "PROC"
        self.released: list[str] = []

    def check_xfer_state(self, handle: str) -> str:
        return self.state

    def release_xfer_handle(self, handle: str) -> None:
        self.released.append(handle)
        raise RuntimeError("NIXL_ERR_BACKEND")


@pytest.mark.parametrize(("says", "state"), [("DONE", "done"), ("ERR", "error")])
def test_a_handle_that_nixl_does_not_release_keeps_nothing_waiting(says, state):
    agent = Agent()
    write = NixlWrite(agent, "handle", "PROC", lambda: None)
    assert write.poll() == "pending" and not agent.released
    agent.state = says
    assert [write.poll(), write.poll()] == [state, state]
    assert agent.released == ["handle"], "released once"
