"""`make gpu-check`: is the engine right on this machine's CUDA card, and how near to the card's limits?

Nothing is installed: the Python and torch found here are used. What the engine can't do without is named; what only a
test needs is skipped by name. `--device cpu` runs the same tests without a card, on a small model: to see that they run.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
CAPABILITY = (8, 0)  # the oldest cards that compute in bf16
# module → package
NEEDED = {
    "torch": "torch>=2.11",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "pydantic": "pydantic",
    "msgspec": "msgspec",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "psutil": "psutil",
    "prometheus_client": "prometheus-client",
    "pytest": "pytest",
}


def missing() -> list[str]:
    found = []
    for module, package in NEEDED.items():
        try:
            import_module(module)
        except ImportError:
            found.append(package)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, default=HERE.parents[1] / "out/gpu-check.json", help="figures")
    options, more = parser.parse_known_args()
    if packages := missing():
        print(f"gpu-check: {sys.executable} lacks {', '.join(packages)}")
        return 2
    import pytest
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device here")
        return 1
    if options.device == "cuda" and torch.cuda.get_device_capability() < CAPABILITY:
        name, number = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability()))
        print(f"gpu-check: {name} has compute capability {number}; 8.0 is the least that computes in bf16")
        return 1
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else this Python has installed
    ini = ["-c", str(HERE / "pytest.ini"), "--confcutdir", str(HERE)]
    return int(pytest.main([*ini, f"--device={options.device}", f"--json={options.json}", *more, str(HERE)]))


if __name__ == "__main__":
    sys.exit(main())
