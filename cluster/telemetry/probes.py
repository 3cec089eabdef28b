"""Probes for Kubernetes: `/ready` (accepts work) and `/live` (makes progress)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# A probe returns the reasons against it; an empty list means yes. It runs on the server's threads and only reads.
Probe = Callable[[], Sequence[str]]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


def probe_body(name: str, why_not: Sequence[str], facts: Mapping[str, str]) -> bytes:
    """`{"ready": false, "why": ["the model is being loaded"], …}`"""
    return json.dumps({name: not why_not, "why": list(why_not), **facts}).encode()


class ProbeApp:
    """Answers `/ready` and `/live` with 200 or 503 and passes every other path on."""

    def __init__(self, rest: WsgiApp, probes: Mapping[str, Probe], facts: Mapping[str, str]):
        self._rest = rest
        self._probes = probes
        self._facts = facts

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        name = environ.get("PATH_INFO", "").strip("/")
        probe = self._probes.get(name)
        if probe is None:
            return self._rest(environ, start_response)
        why_not = probe()
        body = probe_body(name, why_not, self._facts)
        status = "503 Service Unavailable" if why_not else "200 OK"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]
