"""The load generator: offers a workload to a server, and reports what its clients saw.

It knows nothing of the server but its two public protocols, gRPC (`proto/wire/inference.proto`) and OpenAI's
HTTP, so that it measures any OpenAI server by the same rules.

    config ─► schedule + workload ─► runner ─► target (gRPC | HTTP) ─► records ─► report (table, JSON, HTML)
"""

from __future__ import annotations

from loadgen.config import LoadConfig, Slo
from loadgen.report import Report, merge
from loadgen.run import run, run_all

__all__ = ["LoadConfig", "Report", "Slo", "merge", "run", "run_all"]
