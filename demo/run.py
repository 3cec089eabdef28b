"""`make demo`: a cluster, a few answers streaming, 30 seconds of load over both protocols, a report."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule

from baton.client import AsyncClient
from loadgen.config import LoadConfig
from loadgen.html import page
from loadgen.load import run_all
from loadgen.report import Report
from loadgen.table import print_report

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "demo"
MODEL = ROOT / "demo" / "model"
START_SECONDS = 240.0
STOP_SECONDS = 90.0
LOAD_SECONDS = float(os.environ.get("BATON_DEMO_SECONDS", "30"))
SHIPPED_SHARE = 0.9

PROMPTS = ("def parse_headers(lines):\n    ", "class Queue:\n    ")
QUESTIONS = (
    "Write a Python function `read_lines`: read a file and return its lines.",
    "What does `os.path.join` do?",
    "Write a Python function `is_prime`.",
    "Now add a docstring.",
    "What does `json.dumps` do?",
    "Write a class `Counter` that counts words.",
)

console = Console()


def start_cluster() -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start `baton up`, almost with its defaults; return once it reports that it is ready."""
    state_file = OUT / "state.json"
    state_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "baton", "up", "--model", str(MODEL), "--routers", "1"]
    command += ["--prefill", "1", "--decode", "1", "--pool", "ray", "--local-prefill", "fallback"]
    command += ["--http-port", "0", "--grpc-port", "0", "--state-file", str(state_file)]
    command += ["--kv-memory", "256MiB"]  # 170,000 tokens of this model; more would only fill the machine
    console.print(f"[dim]$ baton {' '.join(command[3:])}[/dim]", soft_wrap=True)
    process = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + START_SECONDS
    while not state_file.exists():
        if process.poll() is not None:
            raise SystemExit(f"baton up ended with code {process.returncode}")
        if time.monotonic() > deadline:
            stop_cluster(process)
            raise SystemExit(f"the cluster was not ready within {START_SECONDS:.0f} s")
        time.sleep(0.1)
    return process, json.loads(state_file.read_text())


def stop_cluster(process: subprocess.Popen[bytes]) -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return -1


async def show_text(address: str) -> None:
    """Text as it comes, and the workers that computed it."""
    async with AsyncClient(address) as client:
        for prompt in PROMPTS:
            console.print(Rule(style="dim"))
            console.print(prompt, end="", style="bold", markup=False, highlight=False)
            stream = client.stream(prompt, max_tokens=80, temperature=0.5, seed=7)
            async for chunk in stream:
                console.print(chunk.text, end="", markup=False, highlight=False)
            t = stream.timings
            if t is not None:
                console.print(
                    f"\n[dim]prefilled by {t.prefill_worker}, decoded by {t.decode_worker}, "
                    f"{t.kv_bytes_shipped / 1024:.0f} KiB of KV handed over by {t.transport}[/dim]"
                )
    console.print(Rule(style="dim"))


async def load(state: dict[str, Any]) -> Report:
    """Multi-turn conversations over both protocols at the same time."""
    common: dict[str, Any] = {
        "concurrency": 2,
        "seconds": LOAD_SECONDS,
        "warmup_requests": 1,
        "workload": "conversation",
        "turns": 4,
        "questions": QUESTIONS,
        "max_tokens": 48,
        "temperature": 0.5,
    }
    configs = [
        LoadConfig(protocol="grpc", targets=(state["grpc"],), seed=1, **common),
        LoadConfig(protocol="http", targets=(state["http"],), seed=2, **common),
    ]
    return await run_all(configs, console=console)


def check(report: Report) -> list[str]:
    """The demo's requirements that are not met."""
    problems = []
    if report.failed:
        problems.append(f"{report.failed} of {report.requests} requests failed: {report.errors}")
    if report.kv_shipped_requests < SHIPPED_SHARE * report.requests:
        problems.append(f"KV was handed over for {report.kv_shipped_requests} of {report.requests} requests")
    if report.transport != "nixl":
        problems.append(f"KV moved by {report.transport!r}, not by nixl")
    return problems


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    process, state = start_cluster()
    try:
        asyncio.run(show_text(state["grpc"]))
        report = asyncio.run(load(state))
    finally:
        code = stop_cluster(process)
    print_report(report, console)
    (OUT / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
    (OUT / "report.html").write_text(page(report))
    console.print(f"report: {OUT / 'report.html'}", soft_wrap=True)
    problems = check(report)
    if code != 0:
        problems.append(f"baton up did not stop cleanly (code {code})")
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
