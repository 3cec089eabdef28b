"""Which attack delays another tenant most: each alone beside it, in pairs of a calm and an attacked stretch."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from rich.table import Table

from tests.security.attacks.pairs import PairRunner, Pairs, mean
from tests.security.attacks.together import attacked_cluster

STRETCH_SECONDS = 4.0
PAIRS = 2


def run(names: Sequence[str], pairs: int = PAIRS) -> list[Pairs]:
    with attacked_cluster(mutual_tls=False) as (cluster, keys, certs):

        async def each() -> list[Pairs]:
            runner = PairRunner(cluster, keys, certs)
            await runner.tenant(3.0)  # warm
            found = []
            for name in names:
                found.append(one := await runner.run(name, [name], pairs, STRETCH_SECONDS))
                print(f"    {one.ratio(statistics.median):.2f} {dict(one.answers)}", flush=True)
            return found

        return asyncio.run(each())


def table(found: Sequence[Pairs]) -> Table:
    made = Table("attack alone", "p50 calm", "p50 ratio", "p99 ratio", "router", "workers", "failed")
    for one in found:
        calm, attacked = one.calm, one.attacked
        made.add_row(
            one.name,
            f"{1000 * statistics.median(calm.firsts):.0f} ms",
            f"{one.ratio(statistics.median):.2f}",
            f"{one.ratio():.2f}",
            f"{mean(calm.router):.2f} → {mean(attacked.router):.2f}",
            f"{mean(calm.workers):.2f} → {mean(attacked.workers):.2f}",
            str(len(one.failures)),
        )
    made.caption = (
        f"pairs of {STRETCH_SECONDS:.0f} s; router and workers: shares of a core, calm and attacked"
    )
    return made
