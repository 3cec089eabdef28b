"""`make clients`: unmodified clients of others against a small cluster, and a table of what worked.

Each client has an environment of its own under --environments, made from tests/clients/NAME.txt (pinned, with hashes).
What each sent is written to tests/clients/recorded/NAME.jsonl, which
tests/router/frontends/http/test_recorded_clients.py replays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.clients.recording import Recording, record
from tests.harness import cluster

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "demo" / "model"
FLAGS = (
    "--pool",
    "process",
    "--dtype",
    "float32",
    "--local-prefill",
    "fallback",
    "--kv-memory",
    "64MiB",
    *("--served-model-name", "demo"),
    *("--tool-parser", "hermes"),  # the demo model's template has no tools
)
INSTALL_SECONDS = 600.0
RUN_SECONDS = 600.0
NAMES = tuple(sorted(file.stem for file in (HERE / "scripts").glob("*.py")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"which of {', '.join(NAMES)}; default: all")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "clients")
    parser.add_argument("--url", help="a router that runs already")
    given = parser.parse_args()
    table = Table("client", "version", "what was done", "ok", box=None, pad_edge=False)
    good = True
    with contextlib.ExitStack() as stack:
        url = given.url
        if url is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(cluster.run(out, MODEL, *FLAGS)).http
        for name in given.names:
            for version, done, fault in _try(name, given.environments / name, url):
                table.add_row(name, version, done, fault or "yes")
                good = good and not fault
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)
    sys.exit(0 if good else 1)


def _try(name: str, environment: Path, url: str) -> list[tuple[str, str, str]]:
    """Rows of version, what was done, and the fault or nothing."""
    try:
        python = _installed(name, environment)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return [("", "install", f"skipped: {type(error).__name__}")]
    with record(url) as recording:
        said = _run(name, python, recording.url)
    _keep(name, recording)
    version = _version(name, python)
    rows = []
    for line in said:
        kind, _, rest = line.partition(" ")
        if kind in ("ok", "failed"):
            done, _, fault = rest.partition(": ")
            rows.append((version, done, "" if kind == "ok" else fault or "no"))
    return rows or [(version, "start", " ".join(said[-3:]) or "printed nothing")]


def _installed(name: str, environment: Path) -> Path:
    python = environment / "bin" / "python"
    marker = environment / ".installed"
    lock = HERE / f"{name}.txt"
    if not marker.exists() or marker.read_text() != lock.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--require-hashes",
            "-r",
            str(lock),
        ]
        subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
        marker.write_text(lock.read_text())
    return python


def _run(name: str, python: Path, url: str) -> list[str]:
    path = f"{python.parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables = {"BASE_URL": url, "MODEL": "demo", "TOKENIZER": str(MODEL), "OPENAI_API_KEY": "-"}
    variables["REFERENCE"] = json.dumps([sys.executable, str(HERE / "reference.py"), str(MODEL)])
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [str(python), "-P", str(HERE / "scripts" / f"{name}.py")],
                env={**kept, **variables, "PATH": path, "HF_HUB_OFFLINE": "1"},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=RUN_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return [f"failed run: not over after {RUN_SECONDS:.0f} s"]
    return ended.stdout.splitlines()


def _keep(name: str, recording: Recording) -> None:
    """Write requests with a body that the router answered; those alike in their fields once."""
    lines: dict[str, str] = {}
    for one in recording.requests:
        if isinstance(one["body"], dict):
            shape = json.dumps([one["path"], _shape(one["body"])])
            lines.setdefault(shape, json.dumps(one, sort_keys=True))
    if not lines:
        return
    file = HERE / "recorded" / f"{name}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines.values()))


def _shape(value: object) -> object:
    if isinstance(value, dict):
        return {name: _shape(part) for name, part in sorted(value.items())}
    if isinstance(value, list):
        return [_shape(part) for part in value[:3]]
    return type(value).__name__


def _version(name: str, python: Path) -> str:
    asked = f"import importlib.metadata as m; print(m.version({name!r}))"
    ended = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=False)
    return ended.stdout.strip()


if __name__ == "__main__":
    main()
