"""The load that two processes of one router carry, beside that of one.

Pairs of runs in alternating order, with the same streams at the same pace. The load is unsaturated and fixed, so processor
time is the figure: how many streams fill 0.7 of a core of each process follows from it.
"""

from __future__ import annotations

from pathlib import Path

from bench.context import Context
from bench.figures import Figure, Section
from bench.pairs.ratios import ratios
from bench.sections.token_path import REQUEST, ROUTER, probe

PAIRS = 5
PROCESSES = 2
TOKENS_PER_SECOND = 40  # of a stream
SHARE = 0.7  # of each process's core
LOADS = {
    ROUTER: ("HTTP, 256 streams, 2 workers", ("--streams", "256", "--workers", "2")),
    REQUEST: ("requests, uncached", ()),
}


def run(context: Context) -> Section:
    figures: list[Figure] = []
    for figure, (name, flags) in LOADS.items():
        context.say(f"routers: {name}")
        pairs = []
        for number in range(context.repeats(PAIRS)):
            order = (1, PROCESSES) if number % 2 == 0 else (PROCESSES, 1)
            found = {
                processes: probe(Path.cwd(), context, *flags, "--processes", str(processes))
                for processes in order
            }
            pairs.append((found[1], found[PROCESSES]))
        (ratio,) = [one for one in ratios(pairs) if one.name == figure]
        note = f"{ratio.pairs} pairs, 95 % {ratio.low:.2f} … {ratio.high:.2f}; {ratio.base:.1f} → {ratio.new:.1f} µs"
        figures.append(Figure(f"{name}: {figure}, 2 processes / 1", ratio.median, "", "", note))
        if figure == ROUTER:
            figures += [
                Figure(f"streams at {TOKENS_PER_SECOND} tokens/s, {count} × {SHARE} of a core", streams, "")
                for count, cost in ((1, ratio.base), (PROCESSES, ratio.new))
                for streams in [count * SHARE / (TOKENS_PER_SECOND * cost * 1e-6)]
            ]
            figures.append(Figure("streams, 2 processes / 1", PROCESSES / ratio.median, ""))
    return Section("routers", "A router of two processes, beside one", figures)
