"""Fails the build of an image for CUDA, with a sentence, if the torch in it is no CUDA build.

python check_cuda.py INDEX      where torch was installed from, for the sentence

An index without a CUDA build for this platform, or a later package that wants another torch, leaves one for CPUs, which
would be noticed on the first node with a GPU. torch is not imported, because nothing else of it is needed here.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path


def why_not(index: str) -> str:
    """Empty: it is one."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return f"torch is not installed: {index} has none for this platform; name another index by CUDA_INDEX"
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if not facts.get("cuda"):
        kind = "for ROCm" if facts.get("hip") else "for CPUs"
        return (
            f"torch {facts['__version__']}, installed from {index}, is a build {kind}: name an index of CUDA builds "
            "for this platform, as by --build-arg CUDA_INDEX=https://download.pytorch.org/whl/cu130"
        )
    return ""


if __name__ == "__main__":
    sys.exit(why_not(sys.argv[1]) or None)
