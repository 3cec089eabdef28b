"""Compare the speed of this tree with a commit's: pairs of short measurements, one of each tree, in alternating order.

    python -m bench.pairs --base COMMIT --pairs 20        about a minute per pair, on an idle machine
    python -m bench.pairs --base HEAD --quick             two short pairs, to check that it works

Every figure is a time, so a ratio above 1 is a slowdown. The interval of the median ratio decides: a slowdown is
reported where it lies wholly above the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

# Before torch is imported: processes that busy-wait on shared cores would disturb each other's measurements.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from bench import checkpoint
from bench.pairs.measure import Effort, measure
from bench.pairs.ratios import Ratio, ratios
from bench.pairs.trees import checked_out

BOUND = 1.03


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description=__doc__.partition("\n")[0])
    parser.add_argument("--base", required=True, help="the commit to compare this tree with")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--bound", type=float, default=BOUND, help="fail if an interval lies wholly above it")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/pairs"),
        help="file to which samples are added, so that a run can be resumed",
    )
    parser.add_argument("--quick", action="store_true", help="two short pairs, to check that it works")
    given = parser.parse_args(arguments)
    effort = Effort.quick() if given.quick else Effort()
    out: Path = given.out / ("quick" if given.quick else "full")
    with checked_out(given.base, out) as base:
        file = out / f"{base.commit[:12]}.jsonl"
        if given.quick:
            file.unlink(missing_ok=True)
        model = checkpoint.write(out / "model").absolute()
        trees = {"base": base.path, "new": Path.cwd()}
        done = len(_read(file))
        for number in range(done, 2 if given.quick else given.pairs):
            began = time.monotonic()
            order = ("base", "new") if number % 2 == 0 else ("new", "base")
            pair = {name: measure(trees[name], model, out / name, effort) for name in order}
            with file.open("a") as log:
                log.write(json.dumps(pair) + "\n")
            print(f"pair {number + 1}: {time.monotonic() - began:.0f} s", flush=True)
    found = ratios([(pair["base"], pair["new"]) for pair in _read(file)])
    print(_table(found, base.commit, given.bound))
    return 1 if not given.quick and any(ratio.low > given.bound for ratio in found) else 0


def _read(file: Path) -> list[dict[str, dict[str, float]]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _table(found: list[Ratio], commit: str, bound: float) -> str:
    lines = [
        f"This tree beside {commit[:12]}; ratios of times, new / base; a slowdown is an interval wholly above {bound}.",
        "",
        "| figure | pairs | base | new | median ratio | 95 % interval | |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for one in found:
        verdict = "slower" if one.low > bound else "ok"
        base, new = (f"{seconds * 1e3:.3f} ms" for seconds in (one.base, one.new))
        interval = f"{one.low:.3f} … {one.high:.3f}"
        lines.append(
            f"| {one.name} | {one.pairs} | {base} | {new} | {one.median:.3f} | {interval} | {verdict} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
