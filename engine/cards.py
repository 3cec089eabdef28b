"""Prints the memory of every CUDA card as torch sees it, as JSON: [[total bytes, free bytes], …].

`baton up` runs it in a process of its own, so that it needs neither torch nor a CUDA context itself.
"""

from __future__ import annotations

import json
import sys

import torch


def main() -> None:
    cards = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        cards.append((total, free))
    sys.stdout.write(json.dumps(cards))


if __name__ == "__main__":
    main()
