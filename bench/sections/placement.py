"""The placement script and settling by themselves, inside Redis, for fleets of several sizes."""

from __future__ import annotations

from collections.abc import Iterator

from bench import placement
from bench.context import Context
from bench.figures import Figure, Section
from loadgen.report import summarise

FLEETS = (1, 8, 64, 500)
BLOCKS = 128
CALLS = 1500
HELD = 1000  # attempts of the router that settles
SETTLINGS_PER_SECOND = 20


def run(context: Context) -> Section:
    return Section("placement", "Placement inside Redis", list(_figures(context)))


def _figures(context: Context) -> Iterator[Figure]:
    out, calls = context.out / "placement", context.repeats(CALLS)
    p10: dict[str, float] = {}
    for pairs in FLEETS:
        for hot in (False, True) if pairs == FLEETS[-1] else (False,):
            found = sorted(placement.script_seconds(out / "redis", pairs, BLOCKS, calls, hot=hot))
            name = f"{pairs}+{pairs}" + (", hot prefix" if hot else "")
            p10[name] = found[len(found) // 10]
            note = f"p10; p50 {summarise(found).p50 * 1e6:.0f}, {len(found)} calls, {BLOCKS} blocks"
            yield Figure(f"placement, {name}", p10[name] * 1e6, "µs", "", note)
    yield Figure("500+500 beside 64+64", p10["500+500"] / p10["64+64"], "", "≤ 1.4")
    yield Figure("500+500, hot prefix beside none", p10["500+500, hot prefix"] / p10["500+500"], "", "≤ 1.2")
    settled = summarise(placement.settle_seconds(out / "redis", HELD, context.repeats(300)))
    yield Figure("settling", settled.p50 * 1e6, "µs", "", f"p50; {HELD} attempts, 5 prefilled and 5 released")
    share = 16 * SETTLINGS_PER_SECOND * settled.p50
    yield Figure("settling, 16 routers of 100 requests/s", share, "of a core", "≤ 0.1")
