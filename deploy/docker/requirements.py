"""Prints what an image installs: the project's dependencies and those of its extras.

python deploy/docker/requirements.py router|worker|ray|cuda
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = {
    "router": ("router",),
    "worker": ("worker",),
    "ray": ("worker", "ray"),
    "cuda": ("worker", "ray"),
}
# numba compiles kernels for CPUs; Triton, which the CUDA build of torch brings, those for GPUs.
WITHOUT = {"cuda": {"numba"}}


def requirements(image: str, project: Path) -> list[str]:
    """Raises KeyError for an image without extras."""
    declared = tomllib.loads(project.read_text())["project"]
    extras = (declared["optional-dependencies"][extra] for extra in EXTRAS[image])
    named = dict.fromkeys([*declared["dependencies"], *(one for extra in extras for one in extra)])
    without = WITHOUT.get(image, set())
    return [one for one in named if re.split(r"[\[<>=!~; ]", one)[0] not in without]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], Path("pyproject.toml"))))
