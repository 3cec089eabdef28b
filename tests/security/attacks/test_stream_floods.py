"""Clients without a key open calls as fast as they can on the router's gRPC port; calls with a key go on."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import grpc
import pytest

from tests.harness.router import KeyFile
from tests.harness.waiting import wait_for
from wire import inference_pb2 as pb

SECONDS = 6.0
PATIENCE = 5.0  # of a client with a key
SHARE = 0.9  # of the calls with a key
GENERATE = pb.GenerateRequest(text="abc", options=pb.GenerateOptions(max_tokens=2)).SerializeToString()
ALONE = [("grpc.use_local_subchannel_pool", 1)]
STRANGER = "127.0.0.2"  # of another share than 127.0.0.1


def outcome(call: Any, message: bytes, metadata: Any) -> str:
    try:
        list(call(message, metadata=metadata, timeout=PATIENCE))
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def generate(channel: grpc.Channel) -> Any:
    return channel.unary_stream("/baton.v1.Inference/Generate", None, None)


@pytest.fixture
def metadata(router: Any, keys: KeyFile) -> Any:
    made = (("authorization", f"Bearer {keys.add('acme')}"),)
    with grpc.insecure_channel(router.grpc, options=ALONE) as channel:
        wait_for(lambda: outcome(generate(channel), GENERATE, made) == "OK", 60, "the key is known")
    return made


class Callers:
    """Calls with a key for a time: on one connection, and each on a new one."""

    def __init__(self, address: str, metadata: Any, seconds: float = SECONDS):
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._address, self._metadata = address, metadata
        self._ends = time.monotonic() + seconds

    def run(self) -> None:
        threads = [threading.Thread(target=one) for one in (self._on_one, self._on_new_ones)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    def share(self, kind: str) -> float:
        of_kind = {result: number for (of, result), number in self.outcomes.items() if of == kind}
        return of_kind.get("OK", 0) / max(1, sum(of_kind.values()))

    def _on_one(self) -> None:
        with grpc.insecure_channel(self._address, options=ALONE) as channel:
            while time.monotonic() < self._ends:
                self.outcomes["open", outcome(generate(channel), GENERATE, self._metadata)] += 1
                time.sleep(0.05)

    def _on_new_ones(self) -> None:
        while time.monotonic() < self._ends:
            with grpc.insecure_channel(self._address, options=ALONE) as channel:
                self.outcomes["new", outcome(generate(channel), GENERATE, self._metadata)] += 1
            time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--reset",),
        ("--connections", "16", "--message", "16384"),
    ],
    ids=["left open", "reset at once", "with long messages"],
)
def test_calls_with_a_key_are_answered_beside_a_flood_of_another_share(
    router: Any, metadata: Any, flags: tuple[str, ...]
) -> None:
    """All calls waited in one queue: in 4 of 12 runs one call was answered in 5 s."""
    command = [sys.executable, "-m", "tests.security.attacks.stream_flood", router.grpc]
    command += ["--source", STRANGER, "--seconds", str(SECONDS), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
        assert attack.stdout is not None, "it is a pipe"
        assert attack.stdout.readline() == "begun\n"
        callers = Callers(router.grpc, metadata)
        callers.run()
        did = json.loads(attack.stdout.read())
    print(callers.outcomes, did)
    assert callers.share("open") >= SHARE and callers.share("new") >= SHARE, (callers.outcomes, did)


@pytest.mark.long
def test_silent_connections_of_another_share_take_no_place(router: Any, metadata: Any) -> None:
    host, _, port = router.grpc.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(1500):  # more than max_grpc_connections
            with contextlib.suppress(OSError):
                where = (host, int(port))
                stack.enter_context(socket.create_connection(where, 5, source_address=(STRANGER, 0)))
        callers = Callers(router.grpc, metadata, 2.0)
        callers.run()
    assert callers.share("open") == callers.share("new") == 1, callers.outcomes


@pytest.mark.long
def test_bursts_of_long_messages_are_not_cut(router: Any, metadata: Any) -> None:
    """800 calls of 128 KiB on 20 connections at once: refused by limits at most, each with its reason."""
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(router.grpc, options=ALONE)) for _ in range(20)]
        lists = [one.unary_unary("/baton.v1.Inference/ListModels", None, None) for one in channels]
        calls = [
            one.future(bytes(128 << 10), metadata=metadata, timeout=60) for one in lists for _ in range(40)
        ]
        codes = Counter(str(one.code().name) for one in calls)
    assert not codes.keys() & {"UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL"}, codes


@pytest.mark.long
def test_a_wrong_key_ends_no_other_call_of_its_connection(router: Any, metadata: Any) -> None:
    """As behind a proxy, which sends calls of several tenants on one connection."""
    over = threading.Event()

    def questions() -> Any:
        over.wait(60)
        yield b""

    with grpc.insecure_channel(router.grpc, options=ALONE) as channel:
        ask = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None, None
        )
        streams = [ask(questions(), metadata=metadata, timeout=60) for _ in range(4)]
        wrong = (("authorization", "Bearer wrong"),)
        calls = [generate(channel)(GENERATE, metadata=wrong, timeout=60) for _ in range(500)]
        assert {one.code() for one in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        assert outcome(generate(channel), GENERATE, metadata) == "OK"
        assert all(one.is_active() for one in streams)
        over.set()


@pytest.mark.long
def test_wrong_keys_from_a_shared_address_hinder_no_other_client_there(router: Any, metadata: Any) -> None:
    over = threading.Event()
    seen: Counter[str] = Counter()

    def wrong() -> None:
        while not over.wait(0.04):
            with grpc.insecure_channel(router.grpc, options=ALONE) as channel:
                seen[outcome(generate(channel), GENERATE, (("authorization", "Bearer wrong"),))] += 1

    attacker = threading.Thread(target=wrong)
    attacker.start()
    try:
        callers = Callers(router.grpc, metadata, 8.0)
        callers.run()
    finally:
        over.set()
        attacker.join()
    assert callers.share("open") == callers.share("new") == 1, (callers.outcomes, seen)
