"""`aiperf profile` over chats and completions. Prints `ok NAME` or `failed NAME: why` for each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path


def run(kind: str) -> None:
    out = Path(kind)
    command = ["aiperf", "profile", "--model", os.environ["MODEL"], "--url", os.environ["BASE_URL"]]
    command += [
        "--endpoint-type",
        kind,
        "--streaming",
        "--tokenizer",
        os.environ["TOKENIZER"],
        "--ui",
        "none",
    ]
    command += ["--request-count", "4", "--concurrency", "2", "--isl", "32", "--osl", "8"]
    command += ["--artifact-dir", str(out)]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=110
    )
    reports = list(out.rglob("profile_export_aiperf.json"))
    count = 0
    if reports:
        count = json.loads(reports[0].read_text()).get("request_count", {}).get("avg", 0)
    good = ended.returncode == 0 and count == 4
    why = f"{count} requests; " + " ".join(ended.stdout.split())[-400:]
    print(f"ok {kind}" if good else f"failed {kind}: {why}", flush=True)


run("chat")
run("completions")
