"""The version of what processes of a deployment say to each other (docs/wire-versions.md)."""

from __future__ import annotations

from cluster.errors import WireVersionError

# 2: Drained is acknowledged; digests are agreed in Hello; an attempt that ends with its first token has no decode worker.
WIRE_VERSION = 2


def check_wire_version(version: int, worker_id: str) -> None:
    """Of a request that has come. Raises WireVersionError."""
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"{worker_id} speaks wire version {WIRE_VERSION}, the request version {version}: "
            f"upgrade whichever is older",
            field="wire_version",
            limit=str(WIRE_VERSION),
        )
