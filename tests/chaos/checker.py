"""Compares finished streams with the reference in a process of its own, so that this delays no client."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.requests import Request
from tests.harness.exactness import GAP, judge


@dataclass(frozen=True)
class Verdict:
    """The comparison of one stream: `wrong` are the indexes of tokens that the reference would not have given."""

    checked: int
    near_ties: int
    wrong: tuple[int, ...]


class Checker:
    def __init__(self, model: Path, gap: float = GAP):
        self._model, self._gap = model, gap
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_lower_priority)

    async def check(self, request: Request, output: list[int], seed: int | None) -> Verdict:
        """`seed` is the one that was used."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, judge_stream, self._model, request, output, seed, self._gap
        )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _lower_priority() -> None:
    """Leave the cores to the cluster under test."""
    import torch

    os.nice(10)
    torch.set_num_threads(1)


def judge_stream(
    model: Path, request: Request, output: list[int], seed: int | None, gap: float = GAP
) -> Verdict:
    found = judge(model, request.prompt, output, request.params(seed), gap=gap)
    return Verdict(found.checked, len(found.near_ties), tuple(found.wrong))
