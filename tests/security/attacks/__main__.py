"""`make attack`: every attack of tests/security/attacks, lying peers, and attacks at once on a cluster without and with
mutual TLS; prints tables of what held."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.security.attacks import alone, attackers, together
from tests.security.attacks.outcomes import FILE

# Starts Ray, which takes a minute or more; `make test-long` runs it
LEFT_OUT = (
    "tests/security/attacks/test_listening.py"
    "::test_a_cluster_on_ray_listens_on_loopback_but_for_ports_that_rays_token_guards"
)
ATTACKS = (
    "tests/security/attacks",
    "tests/fuzz/test_hostile_peers.py",
    "tests/fuzz/test_handoff.py",
    "tests/fuzz/test_link.py",
    "tests/fuzz/test_workers.py",
)
# Of most files the tests wait for limits of time
PROCESSES = 4


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.attacks", description=__doc__)
    parser.add_argument("--only", default="", help="attacks whose name contains this (as pytest's -k)")
    parser.add_argument("--together", action="store_true", help="only attacks at once, further ones too")
    parser.add_argument(
        "--alone", nargs="*", help="only each attack on the router's ports alone; default: every one"
    )
    given = parser.parse_args()
    if given.alone is not None:
        found = alone.run(given.alone or [*attackers.ATTACKS])
        Console().print(alone.table(found))
        return 0
    code = 0 if given.together else one_by_one(given.only)
    return code if given.only else max(code, at_once(further=given.together))


def at_once(*, further: bool) -> int:
    outcomes: list[together.Outcome] = []
    seconds = together.START_SECONDS + (2 if further else 1) * together.SECONDS
    for title, mutual_tls in (("without TLS", False), ("mutual TLS", True)):
        print(f"attacks at once, {title}: about {seconds:.0f} s", flush=True)
        outcomes += (found := together.run(title, mutual_tls=mutual_tls, further=further))
        for one in found:
            for line in (*one.pairs.failures[:5], json.dumps(one.pairs.answers)):
                print(f"  {line}")
    Console().print(together.table(outcomes))
    return 0 if all(one.held for one in outcomes) else 1


def one_by_one(only: str) -> int:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not system", "-k", only]
        command += ["-n", str(PROCESSES), "--dist", "loadfile", "--durations", "15", "--deselect", LEFT_OUT]
        command += ["-p", "tests.security.attacks.outcomes", *ATTACKS]
        code = subprocess.run(command, check=False, env={**os.environ, FILE: str(file)}).returncode
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    Console().print(table(sorted(lines, key=lambda line: str(line["module"]))))
    return code


def table(lines: list[dict[str, object]]) -> Table:
    """Of lines that are ordered by module."""
    made = Table("attack", "held", "s", title=f"{len(lines)} attacks")
    last = ""
    for line in lines:
        if line["module"] != last:
            last = str(line["module"])
            made.add_section()
            made.add_row(f"[bold]{last}", "", "")
        held = {"passed": "[green]yes", "skipped": "[yellow]not run"}.get(str(line["outcome"]), "[red]NO")
        name = str(line["name"]).removeprefix("test_").replace("_", " ").replace("[", r"\[")
        made.add_row(f"  {name}", held, f"{line['seconds']:.1f}")
    return made


if __name__ == "__main__":
    sys.exit(main())
