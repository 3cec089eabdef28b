"""The log of gRPC's core, which goes to standard error past the process's own log and its bound."""

from __future__ import annotations

import os


def silence() -> None:
    """Turn it off, unless GRPC_VERBOSITY says otherwise; call it before grpc is imported.

    The core writes a line for each handshake that fails, so whatever connects to a port could fill a disk. Calls that
    fail report the reason in their status.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
