"""The metrics of a process at /metrics, beside their declarations."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from cluster.telemetry.metrics.catalogue import DECLARED
from cluster.telemetry.metrics.declaration import Process

OF_WORKERS = {"worker", "role", "model"}
OF_HISTOGRAMS = {"le"}


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def differences(text: str, process: Process) -> list[str]:
    """One line for each metric that is shown otherwise than it is declared, or only one of both."""
    constant = OF_WORKERS if process in ("prefill", "decode") else set()
    found = []
    missing = {name for name, one in DECLARED.items() if process in one.shown_by}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("baton_") or family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        one = DECLARED.get(name)
        if one is None or process not in one.shown_by:
            found.append(f"{process} shows {name}, which is not declared for it")
            continue
        missing.discard(name)
        shown = (family.type, family.documentation)
        if shown != (one.kind, one.help):
            found.append(f"{name} is shown as {shown}")
        for labels in {tuple(sorted(sample.labels)) for sample in family.samples}:
            if set(labels) - OF_HISTOGRAMS - constant != set(one.labels):
                found.append(f"{name} is shown with the labels {labels}")
    return found + [f"{process} does not show {name}" for name in sorted(missing)]
