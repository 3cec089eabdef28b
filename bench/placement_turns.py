"""The placement script of this tree beside that of a commit: time inside Redis for fleets of several sizes, in turns.

python -m bench.placement_turns --base COMMIT --turns 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.pairs.trees import checked_out

FLEETS = (1, 8, 64, 500)
BLOCKS, CALLS = 128, 1500
# Only what `bench.placement` of both trees has
_MEASURE = """
import json, sys
from pathlib import Path
from bench.placement import script_seconds
print(json.dumps(script_seconds(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
"""


def p10_seconds(tree: Path, pairs: int) -> float:
    """Seconds of a call, in one process over one Redis. The tenth percentile hardly depends on other work."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        arguments = [directory, str(pairs), str(BLOCKS), str(CALLS)]
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            check=True,
            capture_output=True,
            text=True,
        )
    found = sorted(json.loads(done.stdout))
    return float(found[len(found) // 10])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement_turns")
    parser.add_argument("--base", required=True, help="the commit to compare this tree with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/placement"))
    given = parser.parse_args(arguments)
    print(f"load average {os.getloadavg()[0]:.1f}; p10 in µs, medians of {given.turns} turns")
    with checked_out(given.base, given.out) as base:
        for pairs in FLEETS:
            taken: dict[Path, list[float]] = {base.path: [], Path.cwd(): []}
            for turn in range(given.turns):
                for tree in taken if turn % 2 == 0 else reversed(taken):
                    taken[tree].append(p10_seconds(tree, pairs) * 1e6)
            old, new = (statistics.median(found) for found in taken.values())
            print(f"{pairs}+{pairs}: base {old:.0f}, new {new:.0f}, ratio {new / old:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
