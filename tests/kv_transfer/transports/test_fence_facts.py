"""What fences a late write on this machine, and what does not: the facts the landing ring is built on.

A write into live KV blocks would corrupt a stranger's request if it could land after its request has ended. So:
what may a receiver rely on before it uses memory again?
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kv_transfer.decode_side.receiver_rank import FAST_POLL_SECONDS, SETTLE_SECONDS
from kv_transfer.memory import aligned_bytes
from kv_transfer.transports.nixl import NixlEndpoint

# Facts of the NIXL and UCX that are installed: they change with those, not with this tree.
pytestmark = pytest.mark.long

SIZE = 16 << 20
FILL = 0xAB
NOW_A_FENCE = "if this were a fence here, this test should say so and the design may change"


class Writer:
    def __init__(self, endpoint: NixlEndpoint) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_transfer.transports.nixl_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[3],
        )
        self.tell({"bytes": SIZE, "fill": FILL, "agent": endpoint.name, "metadata": endpoint.metadata.hex()})
        assert self.answer(endpoint) == "ready"

    def tell(self, message: dict[str, object]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def answer(self, endpoint: NixlEndpoint | None) -> str:
        """Its next line; the target is polled meanwhile, an unpolled side completes nothing."""
        import select

        assert self.process.stdout is not None
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if endpoint is not None:
                endpoint.arrivals()
            if select.select([self.process.stdout], [], [], 0.001)[0]:
                return self.process.stdout.readline().strip()
        raise AssertionError("the writer does not answer")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(params=["", "tcp"], ids=["shared-memory", "tcp"])
def tls(request, monkeypatch) -> str:
    """UCX's transports, on both sides: between hosts without RDMA it is TCP."""
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def target(tls) -> Iterator[tuple[NixlEndpoint, torch.Tensor]]:
    endpoint = NixlEndpoint(f"target-{os.getpid()}")
    memory = aligned_bytes(SIZE)
    endpoint.register(memory)
    yield endpoint, memory
    endpoint.close()


@pytest.fixture
def writer(target) -> Iterator[Writer]:
    made = Writer(target[0])
    yield made
    made.stop()


def settled(memory: torch.Tensor, endpoint: NixlEndpoint | None) -> torch.Tensor:
    """The memory once nothing has changed in it for a while."""
    deadline, last = time.monotonic() + 10, memory.clone()
    quiet = time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - quiet < 0.3:
        if endpoint is not None:
            endpoint.arrivals()
        if not torch.equal(memory, last):
            last, quiet = memory.clone(), time.monotonic()
        time.sleep(0.01)
    return last


def landed(memory: torch.Tensor) -> bool:
    return bool((memory == FILL).any())


def write(writer: Writer, memory: torch.Tensor, **more: object) -> None:
    writer.tell({"bytes": SIZE, "address": memory.data_ptr(), **more})


def test_a_terminal_handle_is_a_fence(target, writer):
    """Proof one: after DONE nothing of that write comes any more, so the memory may be used again."""
    endpoint, memory = target
    write(writer, memory)
    assert writer.answer(endpoint) == "done"
    assert bool((memory == FILL).all())
    memory.zero_()
    assert not landed(settled(memory, endpoint))


def test_the_end_of_the_process_is_a_fence_once_the_target_has_polled(target, writer, record_property):
    """Proof two: once the writer's parent has reaped it and we have polled for as long as a rank does, nothing lands
    any more. Without the polls that is not so over TCP: the last bytes lie in the socket until then."""
    endpoint, memory = target
    write(writer, memory)
    endpoint.arrivals()
    writer.process.send_signal(signal.SIGKILL)
    writer.process.wait(10)
    before = memory.clone()
    settled_at = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < settled_at:
        endpoint.arrivals()
        time.sleep(FAST_POLL_SECONDS)
    record_property("landed after the writer's end", not torch.equal(before, memory))
    memory.zero_()
    assert not landed(settled(memory, endpoint))


def test_a_new_agent_over_the_same_memory_is_no_fence(target, writer, tls, record_property):
    """The target's agent goes and another takes its place: what the writer says then proves nothing. Over shared
    memory the bytes land although it gets an error; over TCP no process is left to take them."""
    endpoint, memory = target
    endpoint.close()
    renewed = NixlEndpoint(f"renewed-{os.getpid()}")
    renewed.register(memory)
    write(writer, memory, seconds=2)  # it may be pending for ever
    state = writer.answer(renewed)
    here = settled(memory, renewed)
    record_property("state", state)
    record_property("landed", landed(here))
    renewed.close()
    if not tls:
        assert landed(here), NOW_A_FENCE


def _deregister(endpoint: NixlEndpoint) -> None:
    for registered in endpoint._registered:
        endpoint._agent.deregister_memory(registered)
    endpoint._registered.clear()


NOT_FENCES: dict[str, Callable[[NixlEndpoint], None]] = {
    "nothing at all": lambda endpoint: None,
    "deregistering the memory": _deregister,
}


@pytest.mark.parametrize("name", NOT_FENCES)
def test_no_action_of_the_receiver_alone_is_a_fence(name, target, writer, tls, record_property):
    """A write posted after the receiver's own measure reports success over shared memory, and has landed whole. Over
    TCP it is recorded only: there it is a matter of the other side's polls. Our code relies on neither."""
    endpoint, memory = target
    NOT_FENCES[name](endpoint)
    write(writer, memory)
    state = writer.answer(endpoint)
    here = settled(memory, endpoint)
    record_property("state", state)
    record_property("landed", landed(here))
    if not tls:
        assert state == "done"
        assert bool((here == FILL).all()), NOW_A_FENCE


def test_releasing_a_handle_takes_nothing_back(target, writer, tls, record_property):
    """`release_xfer_handle` on a transfer that may be in progress: over shared memory the bytes still come. (Over TCP they
    come only as far as the writer goes on polling, which this one does not.)"""
    endpoint, memory = target
    write(writer, memory, release=True)
    assert writer.answer(endpoint) == "released"
    here = settled(memory, endpoint)
    record_property("landed", landed(here))
    assert landed(here) or tls, NOW_A_FENCE
