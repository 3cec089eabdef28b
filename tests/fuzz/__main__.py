"""`make fuzz CASES=20000 SEED=1`: the fuzz tests at length, and their table. Results add up until `--fresh`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.fuzz.tally import Tally

RESULTS = Path("out/fuzz/results.jsonl")
PARTS = (
    "test_http",
    "test_openapi",
    "test_grpc",
    "test_workers",
    "test_handoff",
    "test_link",
    "test_models",
    "test_extremes",
    "test_hostile_peers",
    "test_router_extremes",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    given = parser.parse_args()
    if given.fresh:
        RESULTS.unlink(missing_ok=True)
    failed = [name for name in given.only.split(",") if not _run(name, given.cases, given.seed)]
    if RESULTS.exists():
        print(Tally.read(RESULTS).markdown())
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(name: str, cases: int, seed: int) -> bool:
    """One part in a process of its own: what it finds is written also if a later one breaks."""
    environment = {**os.environ, "BATON_FUZZ_CASES": str(cases), "BATON_FUZZ_RESULTS": str(RESULTS)}
    command = [sys.executable, "-m", "pytest", "-q", f"tests/fuzz/{name}.py"]
    command += ["--timeout", "0", f"--hypothesis-seed={seed}"]
    return subprocess.run(command, check=False, env=environment).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
