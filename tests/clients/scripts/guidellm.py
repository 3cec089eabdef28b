"""`guidellm run` over chats and completions. Prints `ok NAME` or `failed NAME: why` for each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

TOKENIZER = os.environ["TOKENIZER"]
REQUESTS, WHOLE = 8, 4  # when its count is reached, guidellm cancels the requests that still run


def run(name: str, path: str, stream: bool) -> None:
    backend = {
        "kind": "openai_http",
        "target": os.environ["BASE_URL"],
        "request_format": path,
        "stream": stream,
    }
    data = {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": 8}
    report = Path(f"{name}.json").absolute()
    options = {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": 2},
        "constraint": {"kind": "max_requests", "count": REQUESTS},
        "tokenizer": {"kind": "huggingface_auto", "model": TOKENIZER},
        "data": data,
        "output": {"kind": "json", "path": str(report)},
    }
    command = ["guidellm", "run", "--disable-console"]
    for option, value in options.items():
        command += [f"--{option}", json.dumps(value)]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=150
    )
    why = " ".join(ended.stdout.split()[-60:])
    if ended.returncode == 0 and report.exists():
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        good = totals["successful"] >= WHOLE and totals["errored"] == 0
        why = json.dumps(totals)
    else:
        good = False
    print(f"ok {name}" if good else f"failed {name}: {why}", flush=True)


run("chat", "/v1/chat/completions", True)
run("completions", "/v1/completions", True)
run("whole", "/v1/chat/completions", False)
