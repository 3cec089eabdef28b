"""A team that computes jobs of the CPU's kernels (jobs.py)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.ops.team import Team

# Of one job: few enough to cost nothing, and the wait for the last one is short.
MAX_SHARES = 16
# Polls of a helper before it sleeps, about 0.2 ms: it is awake throughout a step and asleep between steps.
IDLE_POLLS = 8192

Job = tuple[int, int, tuple[int, ...]]  # code (jobs.py), number of items, arguments


class KernelTeam(Team):
    """A team that also runs jobs of the CPU's kernels. Only one thread may call `run`."""

    def __init__(self, threads: int, dtype: torch.dtype, head_dim: int):
        super().__init__(threads)
        from engine.ops.cpu import job_kernels, jobs
        from engine.ops.cpu.codegen.elements import kind_of

        self.dtype = dtype
        self._work = jobs.work
        self._compile = partial(job_kernels.kernel, kind=kind_of(dtype), dim8=(0,) * (head_dim // 8))
        self._kernels: dict[int, int] = {}  # addresses by the job's code
        self._row = (ctypes.c_int64 * jobs.SIZE)()
        self._at = ctypes.addressof(self._row)
        self._begin, self._stop = jobs.KERNEL * 8, jobs.STOP
        self._listed, self._left, self._raised = jobs.LISTED, jobs.LEFT, jobs.FAILED
        self._started = 0  # helpers so far
        self._serving: list[Future[Any]] = []

    def run(self, code: int, total: int, arguments: Sequence[int]) -> None:
        """Run a job over the items [0, total); returns when it is done. Raises RuntimeError if its kernel does."""
        shares = self._shares(total)
        job = (self._kernel(code), total, shares, 0, 0, *arguments)
        struct.pack_into(f"{len(job)}q", self._row, self._begin, *job)
        if shares > 1:
            self._wake()
        self._work(self._at, 0, 0, 0)
        self._check()

    def _check(self) -> None:
        if self._row[self._raised]:
            self._row[self._raised] = 0
            raise RuntimeError("a CPU kernel raised an error, which is on stderr: its results are wrong")

    def _kernel(self, code: int) -> int:
        found = self._kernels.get(code)
        if found is None:
            found = self._kernels[code] = self._compile(code)
        return found

    def _shares(self, total: int) -> int:
        return 1 if self._helpers is None else min(total, MAX_SHARES)

    def compile(self, jobs: Sequence[Job]) -> NDArray[np.int64]:
        """The form of these jobs that `run_all` takes."""
        from engine.ops.cpu.jobs import JOB, PRODUCTS

        listed = np.zeros((len(jobs), JOB), np.int64)
        for row, (code, total, arguments), ahead in zip(listed, jobs, _ahead(jobs), strict=True):
            job = (self._kernel(code), total, self._shares(total), ahead, code in PRODUCTS, *arguments)
            row[: len(job)] = job
        return listed

    def run_all(self, listed: NDArray[np.int64]) -> None:
        """Run the jobs one after the other; returns when all are done. Raises RuntimeError if a kernel does."""
        if self._helpers is not None:
            self._row[self._listed] = 1  # first: helpers that are there stay
            self._wake()
        self._work(self._at, 0, listed.ctypes.data, len(listed))
        self._check()

    def _wake(self) -> None:
        assert self._helpers is not None, "only helpers are woken"
        missing = self.threads - 1 - (self._started - self._row[self._left])
        if missing <= 0:
            return
        self._started += missing
        self._serving = [one for one in self._serving if not one.done()]
        for _ in range(missing):
            self._serving.append(self._helpers.submit(_help, self._work, self._row))

    def split_torch(self, count: int, work: Callable[[int, int], None]) -> None:
        self._row[self._stop] = 1
        for one in self._serving:
            one.result()
        self._row[self._stop] = 0
        super().split_torch(count, work)


def _ahead(jobs: Sequence[Job]) -> list[int]:
    """The address from which each job prefetches: the jobs from one product up to the next take parts of the next one's
    weights, one after the other. 0: no product follows."""
    from engine.ops.cpu.jobs import AHEAD_BYTES, PRODUCTS, WEIGHTS

    addresses, following = [], 0
    for code, _, arguments in reversed(jobs):
        addresses.append(following)
        following = arguments[WEIGHTS] if code in PRODUCTS else following
    addresses.reverse()
    parts = -1  # since the last product
    for index, (code, _, _) in enumerate(jobs):
        parts = 0 if code in PRODUCTS else parts + 1
        if addresses[index]:
            addresses[index] += parts * AHEAD_BYTES
    return addresses


def bits_of(value: float) -> int:
    """The bits of a float, for a job's argument."""
    (bits,) = struct.unpack("i", struct.pack("f", value))
    return int(bits)


def _help(work: Any, row: ctypes.Array[ctypes.c_int64]) -> None:
    """Holds the team's numbers, which the team itself may be gone from while its helper still polls them."""
    work(ctypes.addressof(row), IDLE_POLLS, 0, 0)
