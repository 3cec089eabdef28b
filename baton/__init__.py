"""Baton: prefill and decode on separate workers, the KV cache handed over between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.version import VERSION as __version__

if TYPE_CHECKING:
    from baton.client import AsyncClient as AsyncClient
    from baton.client import Client as Client

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the clients on first use, so that the command line starts without them."""
    if name in ("Client", "AsyncClient"):
        from baton import client

        return getattr(client, name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
