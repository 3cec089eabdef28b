"""The check of an existing Ray cluster's head."""

from __future__ import annotations

from baton.doctor.checks import Check
from cluster.ray_head import Probe, probe

PROBE_SECONDS = 5.0
NAME = "Ray's head"


def check_ray_head(address: str, probe: Probe = probe) -> Check:
    """Ask the head at `address` (host:port of its GCS) once; never raises for one that does not respond."""
    match probe(address, PROBE_SECONDS):
        case "responds":
            return Check(NAME, "ok", f"{address} responds")
        case "refuses":
            return Check(
                NAME, "ok", f"{address} responds, and asks for its token, which this process does not have"
            )
        case "silent":
            return Check(
                NAME,
                "missing",
                f"{address} accepts connections at most, and has not responded within {PROBE_SECONDS:.0f} s",
                "it hangs, or a network policy drops packets: workers that serve go on, none can be started or replaced; "
                "restart the head",
            )
    return Check(
        NAME,
        "missing",
        f"nothing listens at {address}",
        "check the address, RAY_USE_TLS, and that the head runs",
    )
