"""docs/metrics.md, made from what processes show: `python -m deploy.observability.metrics_doc HOST:PORT…` writes it.

Name one router, one worker of each role and an autoscaler of a cluster without API keys that has served a request.
"""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

TARGET = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_OWNERS = ("router", "prefill", "decode", "autoscaler")
_OF_AUTOSCALER = "baton_autoscaling_"
_OF_WORKERS = frozenset({"worker", "role"})
_HEAD = """# Metrics

Made from a live scrape by `python -m deploy.observability.metrics_doc`; a test compares it with another one.

Routers show theirs at `/metrics` of the HTTP port, workers at `/metrics` of their own metrics port. Everything of a
worker carries `worker` and `role` besides. The autoscaler's are at `/metrics` of `baton autoscale`, or of the node that
runs Ray Serve's controller ([autoscaling.md](autoscaling.md)). With `metrics_aliases: vllm` vLLM's names stand beside
ours (cluster/telemetry/vllm_names.py). The usual `process_…` metrics are there too. What to make of them:
[observability.md](observability.md).

| metric | type | labels | shown by | what it is |
|---|---|---|---|---|
"""


@dataclass
class _Entry:
    kind: str
    help: str
    labels: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)


def document(scrapes: Iterable[str]) -> str:
    """The whole file, from the text that each process shows."""
    entries: dict[str, _Entry] = {}
    for scrape in scrapes:
        for family in text_string_to_metric_families(scrape):
            if not family.name.startswith("baton_") or family.name.endswith("_created"):
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            entry = entries.setdefault(name, _Entry(family.type, family.documentation))
            for sample in family.samples:
                of_worker = "worker" in sample.labels
                entry.labels |= set(sample.labels) - {"le"} - (_OF_WORKERS if of_worker else set())
                entry.owners.add(sample.labels["role"] if of_worker else _owner(name))
    return _HEAD + "".join(_row(name, entries[name]) for name in sorted(entries))


def _owner(name: str) -> str:
    return "autoscaler" if name.startswith(_OF_AUTOSCALER) else "router"


def _row(name: str, entry: _Entry) -> str:
    owners = ", ".join(owner for owner in _OWNERS if owner in entry.owners)
    labels = ", ".join(f"`{label}`" for label in sorted(entry.labels))
    return f"| `{name}` | {entry.kind} | {labels} | {owners} | {entry.help} |\n"


def main(addresses: Iterable[str]) -> None:
    scrapes = []
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            scrapes.append(answer.read().decode())
    TARGET.write_text(document(scrapes))


if __name__ == "__main__":
    main(sys.argv[1:])
