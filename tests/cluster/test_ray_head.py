"""Ray's head as its callers see it: it responds, hangs, or is not there. What waits for it ends, with its address."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from cluster import ray_head
from cluster.errors import SetupError
from cluster.protocol.times import RAY_HEAD_LOST_SECONDS, RAY_HEAD_PROBE_SECONDS, RAY_HEAD_SILENT_SECONDS
from cluster.ray_head import RayHeadWatch, Reply, call_ray, probe, wait_for_head, within

HEAD = "10.0.0.7:6379"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gcs(grpc.GenericRpcHandler):
    """CheckAlive for callers with the token, as GCS answers it."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:  # type: ignore[type-arg]
        assert details.method == "/ray.rpc.NodeInfoGcsService/CheckAlive"

        def check(request: bytes, context: grpc.ServicerContext) -> bytes:
            if ("authorization", "Bearer right") not in details.invocation_metadata:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(check)


@pytest.fixture
def gcs() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Gcs()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(("token", "reply"), [("right", "responds"), ("wrong", "refuses"), ("", "refuses")])
def test_a_head_that_refuses_the_token_says_so(
    token: str, reply: Reply, gcs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is none, not that of the environment."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "right")
    assert probe(gcs, 10.0, token) == reply
    assert probe(gcs, 10.0) == "responds"


def test_a_refused_token_is_no_silence(unasked: None) -> None:
    watch = RayHeadWatch(HEAD, means="", clock=(clock := Clock()))
    clock.now += RAY_HEAD_SILENT_SECONDS
    watch.look("refuses")
    assert watch.has_responded and watch.silent_seconds == 0.0


def test_a_start_with_a_wrong_token_ends_at_once() -> None:
    clock = Clock()
    with pytest.raises(SetupError, match="refuses this process's token: set RAY_AUTH_MODE=token") as raised:
        wait_for_head(HEAD, 60.0, probe=Head(clock, "refuses"), clock=clock)
    assert HEAD in raised.value.message and raised.value.field == "ray_address"
    assert clock.now - 100.0 == RAY_HEAD_PROBE_SECONDS


def test_a_head_that_accepts_and_says_nothing_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        assert probe(f"127.0.0.1:{stopped.getsockname()[1]}", 0.2) == "silent"


def test_a_port_without_a_listener_is_absent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    assert probe(f"127.0.0.1:{port}", 10.0) == "absent"


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch's thread does nothing: the test reports what it would have seen."""
    monkeypatch.setattr(RayHeadWatch, "_run", lambda self: None)


def test_a_silence_is_logged_once_and_ends(unasked: None, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = RayHeadWatch(HEAD, means="nothing is replaced", clock=clock)
    caplog.set_level(logging.WARNING)
    watch.look("responds")
    for _ in range(6):
        clock.now += RAY_HEAD_PROBE_SECONDS
        watch.look("silent")
    assert watch.silent_seconds == 6 * RAY_HEAD_PROBE_SECONDS >= RAY_HEAD_SILENT_SECONDS
    assert watch.why_silent == f"Ray's head at {HEAD} has not responded for 12 s"
    watch.look("responds")
    assert (watch.why_silent, watch.silent_seconds) == ("", 0.0)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith(": nothing is replaced") and "responds again" in caplog.messages[1]


def test_a_probe_that_cannot_be_sent_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is repeated every half second, for as long as a certificate is unreadable, for example."""
    monkeypatch.setattr(ray_head, "_ATTEMPT_SECONDS", 0.0)
    asked, enough = list[str](), threading.Event()

    def unreadable(address: str, seconds: float) -> Reply:
        asked.append("one" if len(asked) < 3 else "other")
        if len(asked) > 6:
            enough.set()
        raise PermissionError(asked[-1])

    watch = RayHeadWatch(HEAD, means="nothing starts", probe=unreadable)
    assert enough.wait(30)
    watch.close()
    assert sum("cannot be asked" in one.message for one in caplog.records) == 2


def test_a_stop_of_the_watching_process_is_no_silence(unasked: None) -> None:
    clock = Clock()
    watch = RayHeadWatch(HEAD, means="", clock=clock)
    clock.now += 600.0
    watch.look("silent")
    assert watch.silent_seconds == 2 * RAY_HEAD_PROBE_SECONDS < RAY_HEAD_SILENT_SECONDS
    assert not watch.has_responded


class Head:
    """Its replies in turn, the last one for ever; every question takes as long as it may."""

    def __init__(self, clock: Clock, *replies: Reply):
        self._clock = clock
        self._replies = list(replies)

    def __call__(self, address: str, seconds: float) -> Reply:
        assert address == HEAD
        self._clock.now += seconds
        return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]


def test_a_start_waits_for_a_head_that_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "_ATTEMPT_SECONDS", 0.0)
    clock = Clock()
    wait_for_head(HEAD, 60.0, probe=Head(clock, "absent", "silent", "absent", "responds"), clock=clock)
    assert clock.now - 100.0 == 4 * RAY_HEAD_PROBE_SECONDS


@pytest.mark.parametrize(
    ("reply", "seconds", "said"),
    [("silent", RAY_HEAD_LOST_SECONDS, "it hangs"), ("absent", 60.0, "nothing listens there")],
)
def test_a_start_ends_with_the_heads_address(
    reply: Reply, seconds: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_head, "_ATTEMPT_SECONDS", 0.0)
    clock = Clock()
    with pytest.raises(SetupError, match=said) as raised:
        wait_for_head(HEAD, 60.0, probe=Head(clock, reply), clock=clock)
    assert HEAD in raised.value.message and raised.value.field == "ray_address"
    assert seconds <= clock.now - 100.0 <= seconds + RAY_HEAD_PROBE_SECONDS


def test_a_head_that_accepts_connections_is_not_said_to_be_absent() -> None:
    """Also where the time is up before it counts as lost."""
    clock = Clock()
    with pytest.raises(SetupError, match="has not responded"):
        wait_for_head(HEAD, 1.0, probe=Head(clock, "silent"), clock=clock)


def test_unreadable_files_of_rays_environment_are_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "ca.pem")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", missing)
    with pytest.raises(SetupError, match=f"{missing}.* cannot be read"):
        ray_head.probe(HEAD)


def test_a_start_that_is_stopped_ends() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(SetupError, match="stopped before"):
        wait_for_head(HEAD, 60.0, stop, probe=Head(Clock(), "absent"))


def test_calls_of_ray_give_their_result_or_their_error() -> None:
    assert call_ray(HEAD, "counting", lambda: 3, 10.0, probe=lambda *_: "responds") == 3
    with pytest.raises(ZeroDivisionError):
        call_ray(HEAD, "counting", lambda: 1 // 0, 10.0, probe=lambda *_: "responds")


def test_a_call_ends_when_the_head_hangs_or_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "_POLL_SECONDS", 0.01)
    never = threading.Event()
    with pytest.raises(SetupError, match=r"connecting by .* did not end within 0 s"):
        call_ray(HEAD, "connecting", never.wait, 0.05, probe=lambda *_: "responds")
    monkeypatch.setattr(ray_head, "RAY_HEAD_LOST_SECONDS", 0.1)
    monkeypatch.setattr(ray_head, "_ATTEMPT_SECONDS", 0.05)
    with pytest.raises(SetupError, match=f"{HEAD} has not responded .*: connecting was given up"):
        call_ray(HEAD, "connecting", never.wait, 60.0, probe=lambda *_: "silent")
    stop = threading.Event()
    stop.set()
    with pytest.raises(SetupError, match="connecting was stopped"):
        call_ray(HEAD, "connecting", never.wait, 60.0, stop=stop, probe=lambda *_: "responds")
    # A call that looks at `stop` itself has a while for it, and no more.
    given: dict[str, Any] = {"stop": stop, "stop_seconds": 0.15, "probe": lambda *_: "responds"}
    began = time.monotonic()
    with pytest.raises(SetupError, match="connecting was stopped"):
        call_ray(HEAD, "connecting", never.wait, 60.0, **given)
    assert time.monotonic() - began >= 0.15
    assert call_ray(HEAD, "connecting", lambda: 3, 60.0, **given) == 3
    with pytest.raises(TimeoutError):
        within(never.wait, 0.01)
    never.set()
