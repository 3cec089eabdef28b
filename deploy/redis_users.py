"""Makes deploy/helm/baton/files/redis-users.acl from the rights that the components declare.

python -m deploy.redis_users [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from baton.doctor.redis_check import RIGHTS

TARGET = Path(__file__).resolve().parent / "helm" / "baton" / "files" / "redis-users.acl"
_HEAD = """\
# Users of Redis and their ACL rules (Redis >= 7 or Valkey), made by `make chart` from router/rights.py, worker/rights.py
# and baton/autoscaler/rights.py. NAMESPACE is the prefix of a deployment's keys: in the chart the namespace of Kubernetes,
# a dash, and the release's name.
"""


def document() -> str:
    return _HEAD + "".join(
        f"{component} {rights('NAMESPACE').rules}\n" for component, rights in RIGHTS.items()
    )


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if TARGET.is_file() and TARGET.read_text() == document():
            return 0
        print(f"{TARGET.name} is not what the components declare: run python -m deploy.redis_users")
        return 1
    TARGET.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
