"""What another tenant notices of many attacks at once: its time to the first token beside that of calm stretches between
them, its failed requests, and the router's memory.

All three have a bound for the attacks of BOUNDED. Together with FURTHER, which only `--together` runs, failures and memory
have it.

Beside it the machine's own limit: the same time to the first token while unrelated processes use the processors as the
attackers did, and the router because of them, at the same times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from baton.local.certs import make_certs
from tests.end_to_end.conftest import run_cluster
from tests.harness.cluster import Cluster
from tests.harness.embedding_files import with_embeddings
from tests.harness.router import KeyFile
from tests.security.attacks.attackers import ATTACKS
from tests.security.attacks.pairs import REST_SECONDS, STEP_SECONDS, PairRunner, Pairs, mean
from tests.security.attacks.tenant import p99

MODEL = Path(__file__).parents[3] / "demo" / "model"
FLAGS = ("--pool", "process", "--kv-memory", "256MiB")
PAIRS = 4
STRETCH_SECONDS = 6.5  # so long that p99 is not the slowest request of all
CONTROL_SECONDS = 6.0
SECONDS = PAIRS * (2 * STRETCH_SECONDS + 2 + REST_SECONDS) + CONTROL_SECONDS  # of one measurement
START_SECONDS = 20.0  # with the stop
# Without work: large, held and many bodies, connections and calls that are held, tokenising, answers that are refused
BOUNDED = ["large-body", "held-body", "silent", "http2", "watch", "tokenize", "count", "large-answer"]
# What is served and read is no attack but work, of which workers give each tenant its share: --alone shows what that costs
WORK = ["most-logprobs", "embedding", "slow-masks"]
FURTHER = [name for name in ATTACKS if name not in (*BOUNDED, *WORK)]
MAX_RATIO = 1.5
MAX_MEMORY = 1 << 30
# Computes for a share of each step, in turns of 5 ms: the shares come as JSON. In a session of its own, as the router.
BURN = """
import json, sys, time
from tests.security.attacks.priority import lowest_priority
if sys.argv[1] == "lowest":
    lowest_priority()
ends = time.monotonic()
for share in json.loads(sys.argv[2]):
    ends += float(sys.argv[3])
    while time.monotonic() < ends:
        pause = time.process_time() + 0.005 * share
        while time.process_time() < pause:
            sum(range(200))
        time.sleep(0.005 * (1 - share))
"""


@dataclass(frozen=True)
class Outcome:
    title: str
    bounds_ratio: bool
    pairs: Pairs
    control: list[float]  # seconds to the first token while unrelated processes compute as much

    @property
    def machine(self) -> float:
        return p99(self.control) / p99(self.pairs.calm.firsts)

    @property
    def held(self) -> bool:
        pairs = self.pairs
        within = pairs.ratio() <= MAX_RATIO or not self.bounds_ratio
        return within and not pairs.failures and pairs.memory <= MAX_MEMORY


@contextlib.contextmanager
def attacked_cluster(*, mutual_tls: bool) -> Iterator[tuple[Cluster, list[str], Path | None]]:
    """A cluster, the keys of its tenant and of two attackers, and its certificates."""
    with tempfile.TemporaryDirectory(prefix="baton-attacked-") as made:
        directory = Path(made)
        keys = KeyFile(directory / "keys.yaml")
        named = [keys.add("tenant"), keys.add("first"), keys.add("second")]
        certs = directory / "certs" if mutual_tls else None
        flags = [*FLAGS, "--api-keys-file", str(keys.path)]
        if certs:
            make_certs(certs, [], 2)
            flags += ["--certs", str(certs)]
        with_embeddings(MODEL, directory / "model")
        with run_cluster(directory / "cluster", directory / "model", *flags) as cluster:
            yield cluster, named, certs


def run(title: str, *, mutual_tls: bool, further: bool) -> list[Outcome]:
    """Measure the bounded attacks; `further`: then all attacks, on the same cluster."""
    with attacked_cluster(mutual_tls=mutual_tls) as (cluster, keys, certs):
        return asyncio.run(_measure(PairRunner(cluster, keys, certs), title, further))


async def _measure(runner: PairRunner, title: str, further: bool) -> list[Outcome]:
    await runner.tenant(3.0)  # warm
    found = [await _outcome(runner, title, BOUNDED, bounds_ratio=True)]
    if further:
        found.append(
            await _outcome(runner, f"{title}, further attacks too", BOUNDED + FURTHER, bounds_ratio=False)
        )
    return found


async def _outcome(runner: PairRunner, title: str, attacks: Sequence[str], *, bounds_ratio: bool) -> Outcome:
    found = await runner.run(title, attacks, PAIRS, STRETCH_SECONDS)
    calm_share = mean(found.calm.router)
    with (
        _burning("own", [share - calm_share for share in found.attacked.router]),
        _burning("lowest", found.attacked.attackers),
    ):
        control = await runner.tenant(CONTROL_SECONDS)
    return Outcome(title, bounds_ratio, found, control.firsts)


@contextlib.contextmanager
def _burning(priority: Literal["own", "lowest"], shares: Iterable[float]) -> Iterator[None]:
    within = json.dumps([min(max(share, 0.0), 1.0) for share in shares])
    process = subprocess.Popen(
        [sys.executable, "-c", BURN, priority, within, str(STEP_SECONDS)],
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def table(outcomes: list[Outcome]) -> Table:
    made = Table(
        "attacks at once",
        "TTFT p99, calm",
        "attacked",
        "ratio",
        "machine's own",
        "failed",
        "router's memory",
        "held",
    )
    for one in outcomes:
        pairs = one.pairs
        made.add_row(
            one.title,
            f"{1000 * p99(pairs.calm.firsts):.0f} ms",
            f"{1000 * p99(pairs.attacked.firsts):.0f} ms",
            f"{pairs.ratio():.2f}" + ("" if one.bounds_ratio else " (no bound)"),
            f"{one.machine:.2f}",
            f"{len(pairs.failures)} of {len(pairs.attacked.firsts) + len(pairs.failures)}",
            f"{pairs.memory / (1 << 20):.0f} MiB",
            "[green]yes" if one.held else "[red]NO",
        )
    made.caption = (
        f"in {PAIRS} pairs of stretches, {len(outcomes[0].pairs.calm.firsts)} calm requests; bounds: ratio ≤ {MAX_RATIO}, "
        f"no request failed, ≤ {MAX_MEMORY >> 20} MiB. Attacks: {', '.join(BOUNDED)}; further ones, beside which "
        f"the ratio has no bound: {', '.join(FURTHER)}. Machine's own: the ratio while unrelated processes compute as "
        "much as attackers and router did"
        if outcomes
        else None
    )
    return made
