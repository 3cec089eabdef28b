"""Prints what an image installs: the project's dependencies and those of its extras.

python deploy/docker/requirements.py router|worker
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

EXTRAS = {"router": ("router",), "worker": ("worker", "ray")}


def requirements(image: str, project: Path) -> list[str]:
    """Raises KeyError for an image that is neither router nor worker."""
    declared = tomllib.loads(project.read_text())["project"]
    extras = (declared["optional-dependencies"][extra] for extra in EXTRAS[image])
    return list(dict.fromkeys([*declared["dependencies"], *(one for extra in extras for one in extra)]))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], Path("pyproject.toml"))))
