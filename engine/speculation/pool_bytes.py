"""Prints the bytes of a draft model's KV pool, for engine settings as JSON on standard input.

`baton up` runs it in a process of its own, so that it does not load torch itself (as with engine/cards.py).
"""

from __future__ import annotations

import sys

from cluster.config.worker import EngineConfig
from engine.speculation import load_draft


def main() -> None:
    config = EngineConfig.model_validate_json(sys.stdin.read())
    sys.stdout.write(str(load_draft.settings(config).kv_memory_bytes))


if __name__ == "__main__":
    main()
