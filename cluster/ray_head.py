"""Whether Ray's head responds, and calls of Ray that end when it does not.

A head that hangs (stopped, or cut off by the network) still accepts connections, and most of Ray's calls then wait for it
without a limit. The probe is the one of `ray health-check`: GCS's CheckAlive, which its event loop answers. It is sent by
gRPC alone, so a process that has not imported Ray can send it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, TypeVar

import grpc

from cluster.errors import SetupError
from cluster.protocol.times import RAY_HEAD_LOST_SECONDS, RAY_HEAD_PROBE_SECONDS, RAY_HEAD_SILENT_SECONDS

log = logging.getLogger(__name__)
Result = TypeVar("Result")
# responds; refuses: responds, and does not accept the token; silent: no answer in time; absent: nothing listens there, or
# there is no route
Reply = Literal["responds", "refuses", "silent", "absent"]
Probe = Callable[[str, float], Reply]
_RESPONSES: tuple[Reply, ...] = ("responds", "refuses")
_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_POLL_SECONDS = 0.1
_ATTEMPT_SECONDS = 0.5


def probe(address: str, seconds: float = RAY_HEAD_PROBE_SECONDS, token: str | None = None) -> Reply:
    """Ask the head at `address` (host:port of its GCS) once. Blocks for `seconds` at most. `token`: Ray's, "" for none, by
    default the environment's. Raises SetupError if a file that Ray's environment names cannot be read.

    An error of the head's own is a response, too.
    """
    with _channel(address) as channel:
        call = channel.unary_unary(_METHOD, None, None)  # the empty request, as it is
        try:
            call(b"", timeout=seconds, metadata=_metadata(token))
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNAVAILABLE
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "silent"
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return "refuses"
            return "absent" if code is grpc.StatusCode.UNAVAILABLE else "responds"
    return "responds"


def _channel(address: str) -> grpc.Channel:
    """A connection of its own per probe: after a partition an old one would wait for TCP's retransmissions."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options)
    files = [os.environ.get(f"RAY_TLS_{name}") for name in ("CA_CERT", "SERVER_KEY", "SERVER_CERT")]
    root, key, cert = (_content(file) if file else None for file in files)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, cert), options)


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    token = _environments_token() if token is None else token
    return (("authorization", f"Bearer {token.strip()}"),) if token else ()


def _environments_token() -> str:
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    file = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    if not token and file and Path(file).is_file():
        token = _content(file).decode(errors="replace")
    return token


def _content(file: str) -> bytes:
    """The content of a file that Ray's environment names (RAY_TLS_…, RAY_AUTH_TOKEN_PATH). Raises SetupError."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise SetupError(
            f"{file}, which Ray's environment names, cannot be read ({error.strerror}): give this user the right, or "
            "correct the variable",
            field="ray_address",
        ) from None


class RayHeadWatch:
    """Probes one head on a thread, from construction until `close`."""

    def __init__(
        self,
        address: str,
        *,
        means: str,
        probe: Probe = probe,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`means`: what its silence has as a consequence in this process, for the log."""
        self.address = address
        self.has_responded = False
        self._means = means
        self._probe = probe
        self._clock = clock
        self._looked = clock()
        self._silent = 0.0
        self._failure = ""  # why the last probe could not be sent
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ray-head", daemon=True).start()

    @property
    def silent_seconds(self) -> float:
        """How long the head has not responded; 0 while it does."""
        return self._silent

    @property
    def why_silent(self) -> str:
        """The silence as a sentence, once it is longer than RAY_HEAD_SILENT_SECONDS; else ""."""
        return _sentence(self.address, self._silent) if self._silent >= RAY_HEAD_SILENT_SECONDS else ""

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            reply = self._ask()
            self.look(reply)
            self._closed.wait(RAY_HEAD_PROBE_SECONDS if reply in _RESPONSES else _ATTEMPT_SECONDS)

    def _ask(self) -> Reply:
        try:
            reply = self._probe(self.address, RAY_HEAD_PROBE_SECONDS)
        except Exception as error:  # an unreadable certificate, for example
            if repr(error) != self._failure:  # else it is the same as half a second ago
                log.exception("Ray's head at %s cannot be asked", self.address)
            self._failure = repr(error)
            return "absent"
        self._failure = ""
        return reply

    def look(self, reply: Reply) -> None:
        """Count the time since the last reply. More than two probes' time of it was this process's own stop."""
        responds = reply in _RESPONSES
        self.has_responded = self.has_responded or responds
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * RAY_HEAD_PROBE_SECONDS), now
        before, self._silent = self._silent, 0.0 if responds else self._silent + passed
        if before < RAY_HEAD_SILENT_SECONDS <= self._silent:
            log.error("%s: %s", self.why_silent, self._means)
        elif before >= RAY_HEAD_SILENT_SECONDS and not self._silent:
            log.warning("Ray's head at %s responds again, after %.0f s", self.address, before)


def _sentence(address: str, seconds: float) -> str:
    return f"Ray's head at {address} has not responded for {seconds:.0f} s"


def _hangs(address: str, seconds: float) -> SetupError:
    text = f"{_sentence(address, seconds)}: it hangs, or a network policy drops packets; restart the head"
    return SetupError(text, field="ray_address")


def wait_for_head(
    address: str,
    seconds: float,
    stop: threading.Event | None = None,
    probe: Probe = probe,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until the head responds: one that is absent for `seconds`, because it may be starting, one that is silent for
    RAY_HEAD_LOST_SECONDS. Raises SetupError, at once where it refuses the token, and once `stop` is set."""
    stop = stop or threading.Event()
    began = clock()
    silent_since: float | None = None
    while (reply := probe(address, RAY_HEAD_PROBE_SECONDS)) != "responds":
        if reply == "refuses":  # a token stays as it is while processes run
            raise SetupError(
                f"Ray's head at {address} refuses this process's token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to "
                "the token that the head was started with",
                field="ray_address",
            )
        now = clock()
        if reply == "silent":
            silent_since = now if silent_since is None else silent_since
            if now - silent_since + RAY_HEAD_PROBE_SECONDS >= RAY_HEAD_LOST_SECONDS:
                raise _hangs(address, now - began)
        else:
            silent_since = None
        if now - began >= seconds:
            if reply == "silent":
                raise _hangs(address, now - began)
            raise SetupError(
                f"no Ray head at {address} within {seconds:.0f} s: nothing listens there; check the address, "
                "RAY_USE_TLS, and that the head runs",
                field="ray_address",
            )
        if stop.wait(_ATTEMPT_SECONDS):
            raise SetupError(f"stopped before Ray's head at {address} responded", field="ray_address")


class _Call(Generic[Result]):
    """A call on a daemon thread of its own, which stays behind if it is not waited for to the end."""

    def __init__(self, call: Callable[[], Result]):
        self._call = call
        self._ended = threading.Event()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="ray-call", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def result(self) -> Result:
        """The result of a call that has ended. Raises the call's exception."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


def within(call: Callable[[], Result], seconds: float) -> Result:
    """Return `call()`, run on a thread of its own. Raises TimeoutError after `seconds`."""
    running = _Call(call)
    if not running.wait(seconds):
        raise TimeoutError
    return running.result()


def call_ray(
    address: str,
    what: str,
    call: Callable[[], Result],
    seconds: float,
    *,
    stop: threading.Event | None = None,
    stop_seconds: float = 0.0,
    probe: Probe = probe,
) -> Result:
    """Return `call()`, run on a thread of its own. Raises SetupError when the head is silent for RAY_HEAD_LOST_SECONDS
    meanwhile, after `seconds`, and `stop_seconds` after `stop` is set: so long has a call that looks at `stop` itself. The
    thread then stays behind, because Ray has no way to end the call."""
    watch = RayHeadWatch(address, means=f"{what} waits for it", probe=probe)
    running = _Call(call)
    deadline = time.monotonic() + seconds
    stopped = math.inf
    try:
        while not running.wait(_POLL_SECONDS):
            if watch.silent_seconds >= RAY_HEAD_LOST_SECONDS:
                raise SetupError(
                    f"{_sentence(address, watch.silent_seconds)}: {what} was given up; restart the head, and start "
                    "this again",
                    field="ray_address",
                )
            now = time.monotonic()
            if stop is not None and stop.is_set():
                stopped = min(stopped, now)
            if now - stopped >= stop_seconds:
                raise SetupError(f"{what} was stopped", field="ray_address")
            if now >= deadline:
                raise SetupError(
                    f"{what} by Ray's head at {address} did not end within {seconds:.0f} s; the head's logs say why",
                    field="ray_address",
                )
    finally:
        watch.close()
    return running.result()
