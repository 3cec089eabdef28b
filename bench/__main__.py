"""`python -m bench`: runs sections, prints their tables, writes out/bench/report.json."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

# Before torch is imported: processes that busy-wait on two cores would disturb each other's measurements.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SECTIONS = (
    "engine",
    "int8",
    "int4",
    "experts",
    "quality",
    "speculation",
    "grammars",
    "steps",
    "handoff",
    "digests",
    "router",
    "placement",
    "token_path",
    "routers",
    "fleet",
    "slow_clients",
    "prefix",
    "interference",
    "concurrent8",
    "memory",
    "overload",
)
DESCRIPTION = "Measures Baton beside the limits of this machine."


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=DESCRIPTION)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--quick", action="store_true", help="short runs, to check that everything works")
    given = parser.parse_args(arguments)
    names = [name for name in given.only.split(",") if name]
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return run(names, given.out, quick=given.quick)


def run(names: list[str], out: Path, *, quick: bool) -> int:
    """Run the sections one after the other and write each as soon as it is done. Return 1 if any failed to run."""
    from rich.console import Console
    from rich.markdown import Markdown

    from bench import machine, report
    from bench.context import Context

    console = Console()
    context = Context(out, console, quick)
    facts = machine.describe()
    command = f"python -m bench --only {','.join(names)}" + (" --quick" if quick else "")
    sections = [context.limits.section()]
    failed: list[str] = []
    for name in names:
        context.say(f"section {name}")
        try:
            sections.append(import_module(f"bench.sections.{name}").run(context))
        except Exception:
            console.print_exception()
            failed.append(name)
        report.write(out, facts, sections, command)
    console.print(Markdown(report.markdown(facts, sections, command)))
    if failed:
        console.print(f"[red]did not run: {', '.join(failed)}[/red]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
