"""The threads that share one piece of work. Kernels and torch's products release the interpreter's lock, so Python
threads do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# Below this many pieces the others' waking (about 30 µs) costs more than they spare.
WORTH_SHARING = 64


class Team:
    """The caller and `threads - 1` helpers."""

    def __init__(self, threads: int):
        self.threads = threads
        self._helpers: ThreadPoolExecutor | None = None
        if threads > 1:
            self._helpers = ThreadPoolExecutor(threads - 1, "engine-helper", _one_thread)

    def split(self, count: int, work: Callable[[int, int], None], *, worth: bool | None = None) -> None:
        """Calls work(first, last) so that [0, count) is covered; returns when all is done."""
        worth = count >= WORTH_SHARING if worth is None else worth
        if self._helpers is None or not worth or count < self.threads:
            work(0, count)
            return
        borders = [count * i // self.threads for i in range(self.threads + 1)]
        others = [self._helpers.submit(work, borders[i], borders[i + 1]) for i in range(1, self.threads)]
        work(borders[0], borders[1])
        for other in others:
            other.result()

    def split_torch(self, count: int, work: Callable[[int, int], None]) -> None:
        """The same for work made of torch operations: each thread then runs its own alone. Many small products
        on one thread each are faster than each of them on all (1.6 times, measured on attention)."""
        if self._helpers is None:
            work(0, count)
            return
        torch.set_num_threads(1)
        try:
            self.split(count, torch.inference_mode()(work), worth=True)  # the mode is a thread's own
        finally:
            torch.set_num_threads(self.threads)


def _one_thread() -> None:
    """A helper's torch operations run on the helper: the setting is the thread's own."""
    torch.set_num_threads(1)
