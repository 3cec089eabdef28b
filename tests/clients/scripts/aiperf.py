"""`aiperf profile` over chats and completions. Prints `ok NAME` or `failed NAME: why` for each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

# aiperf reads a tokenizer from the hub's cache alone, not from a directory
CACHE, COMMIT = Path("hub").absolute(), "0" * 40
SECONDS = {"AIPERF_SERVICE_REGISTRATION_TIMEOUT": "200"}  # for its nine processes on few cores


def fill_cache(name: str) -> None:
    model = CACHE / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "snapshots").mkdir()
    (model / "snapshots" / COMMIT).symlink_to(os.environ["TOKENIZER"])


def run(kind: str) -> None:
    out = Path(kind)
    command = ["aiperf", "profile", "--model", os.environ["MODEL"], "--url", os.environ["BASE_URL"]]
    command += ["--endpoint-type", kind, "--streaming", "--tokenizer", "local/demo", "--ui", "none"]
    command += ["--request-count", "4", "--concurrency", "2", "--isl", "32", "--osl", "8"]
    command += ["--workers-max", "1", "--record-processors", "1", "--artifact-dir", str(out)]
    ended = subprocess.run(
        command,
        env={**os.environ, **SECONDS, "HF_HUB_CACHE": str(CACHE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=250,
    )
    reports = list(out.rglob("profile_export_aiperf.json"))
    count = 0
    if reports:
        count = json.loads(reports[0].read_text()).get("request_count", {}).get("avg", 0)
    good = ended.returncode == 0 and count == 4
    why = f"{count} requests; " + " ".join(ended.stdout.split())[-400:]
    print(f"ok {kind}" if good else f"failed {kind}: {why}", flush=True)


fill_cache("local/demo")
run("chat")
run("completions")
