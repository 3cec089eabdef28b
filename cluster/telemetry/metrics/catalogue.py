"""All declarations together."""

from __future__ import annotations

from cluster.telemetry.metrics import autoscaler, process, router, worker
from cluster.telemetry.metrics.declaration import Declaration


def _declared() -> dict[str, Declaration]:
    found: dict[str, Declaration] = {}
    for module in (process, router, worker, autoscaler):
        for one in vars(module).values():
            if isinstance(one, Declaration) and found.setdefault(one.name, one) is not one:
                raise ValueError(f"{one.name} is declared twice")
    return found


DECLARED = _declared()  # by name
