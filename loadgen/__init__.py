"""The load generator: offers a workload to a server, and reports what its clients saw.

It knows nothing of the server but its two public protocols, gRPC (`proto/wire/inference.proto`) and OpenAI's
HTTP, so that it measures any OpenAI server by the same rules.

    config ─► schedule + workload ─► runner ─► target (gRPC | HTTP) ─► records ─► report (table, JSON, HTML)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadgen.config import LoadConfig as LoadConfig
    from loadgen.config import Slo as Slo
    from loadgen.load import run as run
    from loadgen.load import run_all as run_all
    from loadgen.report import Report as Report
    from loadgen.report import merge as merge

_HOMES = {"LoadConfig": "config", "Slo": "config", "Report": "report", "merge": "report"}
__all__ = ["LoadConfig", "Report", "Slo", "merge", "run", "run_all"]


def __getattr__(name: str) -> Any:
    """Loads on first use: `baton --help` reads `loadgen.cli` and should not wait for numpy."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'loadgen' has no attribute {name!r}")
    return getattr(import_module(f"loadgen.{_HOMES.get(name, 'load')}"), name)
