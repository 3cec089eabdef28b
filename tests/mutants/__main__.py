"""`make mutants`: apply each deliberate change of the catalogue to a scratch copy, and print the survivors."""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutants.catalogue import Mutant, read_catalogue
from tests.mutants.runner import FAILED, PASSED, Verdict, copy_tree, judge, run_tests

STYLES = {
    Verdict.KILLED: "green",
    Verdict.TIMED_OUT: "green",
    Verdict.SURVIVED: "red",
    Verdict.BROKEN: "magenta",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="entries whose area or name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="scratch copies that run at the same time")
    parser.add_argument("--seconds", type=float, default=300, help="limit of one entry's tests")
    given = parser.parse_args()
    mutants = [m for m in read_catalogue() if given.only in m.area or given.only in m.name]
    if not mutants:
        print(f"no entry's area or name contains {given.only!r}")
        return 2
    console = Console()
    with tempfile.TemporaryDirectory(prefix="baton-mutants-") as scratch:
        copies = [copy_tree(Path(scratch) / str(job)) for job in range(given.jobs)]
        if not _pass_unchanged(mutants, copies[0], console):
            return 1
        verdicts = _judge_all(mutants, copies, given.seconds, console)
    return _report(mutants, verdicts, console)


def _pass_unchanged(mutants: Sequence[Mutant], root: Path, console: Console) -> bool:
    """Tests that fail without a change would count every change as noticed."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    console.print(f"{len(mutants)} changes; {len(tests)} tests or files of tests first without any of them")
    code = run_tests(tests, root, 3600)
    if code != PASSED:
        said = (root / "pytest.log").read_text()[-3000:]
        console.print(said, markup=False)
        console.print("[red]they fail already" if code == FAILED else "[red]they could not be run")
    return code == PASSED


def _judge_all(
    mutants: Sequence[Mutant], copies: Sequence[Path], seconds: float, console: Console
) -> dict[Mutant, Verdict]:
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    verdicts: dict[Mutant, Verdict] = {}

    def work(root: Path) -> None:
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            verdict = verdicts[mutant] = judge(mutant, root, seconds)
            console.print(
                f"{len(verdicts):4}/{len(mutants)} [{STYLES[verdict]}]{verdict.value:9}[/] "
                f"{time.monotonic() - began:5.1f} s  {mutant.area}: {mutant.name}",
                highlight=False,
            )

    threads = [threading.Thread(target=work, args=(root,)) for root in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


def _report(mutants: Sequence[Mutant], verdicts: dict[Mutant, Verdict], console: Console) -> int:
    table = Table("area", "changes", "killed", "survived", "broken")
    for area in sorted({mutant.area for mutant in mutants}):
        found = Counter(verdicts[mutant] for mutant in mutants if mutant.area == area)
        killed = found[Verdict.KILLED] + found[Verdict.TIMED_OUT]
        counts = (sum(found.values()), killed, found[Verdict.SURVIVED], found[Verdict.BROKEN])
        table.add_row(area, *map(str, counts))
    console.print(table)
    left = [m for m in mutants if verdicts[m] in (Verdict.SURVIVED, Verdict.BROKEN)]
    for mutant in left:
        console.print(
            f"[red]{verdicts[mutant].value}[/]: {mutant.file}: {mutant.area}: {mutant.name}", highlight=False
        )
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
