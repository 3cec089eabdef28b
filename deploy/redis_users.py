"""Makes the ACL files of the chart from the rights that the components declare.

python -m deploy.redis_users [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from baton.doctor.redis_check import RIGHTS

FILES = Path(__file__).resolve().parent / "helm" / "baton" / "files"
TARGET, INDEX_TARGET = FILES / "redis-users.acl", FILES / "redis-index-users.acl"
_INDEX = "-index"  # how the names of components end that use the prefix index's own Redis
_HEAD = """\
# Users of Redis and their ACL rules (Redis >= 7 or Valkey), made by `make chart` from router/rights.py, worker/rights.py
# and baton/autoscaler/rights.py. NAMESPACE is the prefix of a deployment's keys: in the chart the namespace of Kubernetes,
# a dash, and the release's name.
"""
_INDEX_HEAD = """\
# Users of a Redis of the prefix index's own (externalIndex) and their ACL rules, as in redis-users.acl.
"""


def document() -> str:
    return _HEAD + _lines(index=False)


def index_document() -> str:
    return _INDEX_HEAD + _lines(index=True)


def _lines(*, index: bool) -> str:
    return "".join(
        f"{component.removesuffix(_INDEX)} {rights('NAMESPACE').rules}\n"
        for component, rights in RIGHTS.items()
        if component.endswith(_INDEX) == index
    )


def main(arguments: list[str]) -> int:
    made = {TARGET: document(), INDEX_TARGET: index_document()}
    if arguments == ["--check"]:
        stale = [one.name for one, text in made.items() if not one.is_file() or one.read_text() != text]
        for name in stale:
            print(f"{name} is not what the components declare: run python -m deploy.redis_users")
        return 1 if stale else 0
    for target, text in made.items():
        target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
