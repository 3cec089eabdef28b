"""Probes: asked from outside, as a kubelet asks them."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.kubelet.runtime import Running

Log = Callable[[str], None]


def port_number(container: Object, port: int | str) -> int:
    if isinstance(port, int):
        return port
    named = {one["name"]: one["containerPort"] for one in container.get("ports") or () if "name" in one}
    return int(named[port])


def ask(probe: Object, spec: Object, address: str, running: Running) -> str:
    """Empty if the answer is good, what was wrong otherwise."""
    seconds = float(probe["timeoutSeconds"])
    try:
        if http_get := probe.get("httpGet"):
            return _http(
                http_get, port_number(spec, http_get["port"]), http_get.get("host") or address, seconds
            )
        if tcp := probe.get("tcpSocket"):
            with socket.create_connection(
                (tcp.get("host") or address, port_number(spec, tcp["port"])), seconds
            ):
                return ""
        if call := probe.get("grpc"):
            return _grpc(f"{address}:{call['port']}", call.get("service") or "", seconds)
        code, output = running.execute(probe["exec"]["command"], seconds)
        return f"exit code {code}: {output[-300:]}" if code else ""
    except (OSError, http.client.HTTPException) as error:
        return repr(error)


def _http(probe: Object, port: int, host: str, seconds: float) -> str:
    connection: http.client.HTTPConnection
    if probe.get("scheme") == "HTTPS":
        # A kubelet does not verify either: it may show no certificate and asks by address.
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=seconds)
    headers = {one["name"]: one["value"] for one in probe.get("httpHeaders") or ()}
    try:
        connection.request("GET", probe["path"], headers=headers)
        answer = connection.getresponse()
        text = answer.read(300)
        return "" if 200 <= answer.status < 400 else f"status {answer.status}: {text!r}"
    finally:
        connection.close()


def _grpc(target: str, service: str, seconds: float) -> str:
    with grpc.insecure_channel(target) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
        except grpc.RpcError as error:
            return str(error)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else f"status {answer.status}"


@dataclass
class Probe:
    """When it is due, and what its answers have come to."""

    spec: Object
    good: bool
    due: float = 0.0
    _run: int = field(default=0, repr=False)
    said: str = ""

    def begin(self, now: float) -> None:
        self.due = now + self.spec.get("initialDelaySeconds", 0)

    def take(self, problem: str, now: float) -> bool:
        """True if this answer has turned it around."""
        self.due = now + self.spec["periodSeconds"]
        self.said = problem
        if (problem == "") == self.good:
            self._run = 0
            return False
        self._run += 1
        if self._run < self.spec["failureThreshold" if problem else "successThreshold"]:
            return False
        self.good, self._run = not self.good, 0
        return True


@dataclass
class Health:
    """The three probes of a container that runs."""

    startup: Probe | None
    readiness: Probe | None
    liveness: Probe | None

    @staticmethod
    def of(spec: Object) -> Health:
        made = [
            Probe(spec[name], good) if name in spec else None
            for name, good in (("startupProbe", False), ("readinessProbe", False), ("livenessProbe", True))
        ]
        health = Health(*made)
        for probe in made:
            if probe is not None:
                probe.begin(time.monotonic())
        return health

    @property
    def started(self) -> bool:
        return self.startup is None or self.startup.good

    @property
    def ready(self) -> bool:
        return self.started and (self.readiness is None or self.readiness.good)

    def check(self, ask_one: Callable[[Object], str], *, leaving: bool) -> str:
        """Asks what is due; why the container must be restarted, if it must. A pod that leaves is only asked
        whether it is ready."""
        now = time.monotonic()
        if self.startup is not None and not self.startup.good:
            return "" if leaving else self._start_up(self.startup, ask_one, now)
        if self.readiness is not None and now >= self.readiness.due:
            self.readiness.take(ask_one(self.readiness.spec), time.monotonic())
        alive = self.liveness
        if (
            alive is not None
            and not leaving
            and now >= alive.due
            and alive.take(ask_one(alive.spec), time.monotonic())
        ):
            return f"Liveness probe failed: {alive.said}"
        return ""

    def _start_up(self, probe: Probe, ask_one: Callable[[Object], str], now: float) -> str:
        if now < probe.due:
            return ""
        problem = ask_one(probe.spec)
        probe.due = time.monotonic() + probe.spec["periodSeconds"]
        probe.said = problem
        if not problem:
            probe.good = True
            return ""
        probe._run += 1
        return f"Startup probe failed: {problem}" if probe._run >= probe.spec["failureThreshold"] else ""
