"""The simulated cluster's time steps, compiled: a day of 300,000 requests takes about a second.

    arrival ─► the ready prefill worker that is free first, in order ─► first token ─► the decode worker with the
    fewest resident tokens and room for the request ─► in every slice, as many tokens as steps fit into it ─► done

A worker that starts is of no use until it is ready; requests that queue stay where they are when others come. One
that drains takes nothing new and holds its GPUs until it has finished.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

ABSENT, STARTING, READY, DRAINING = 0, 1, 2, 3
SLOTS = 64  # workers of a role, at most
CROWD = 16_384  # requests in the cluster at the same time, at most
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Pool(NamedTuple):
    """By worker."""

    state: Ints
    ready_at: Floats
    free_at: Floats  # prefill: when its queue is done
    load: Floats  # prefill: queued tokens; decode: reserved KV tokens
    batch: Floats  # decode: sequences
    arrived_requests: Floats
    arrived_tokens: Floats
    computed_tokens: Floats
    prefill_seconds: Floats
    output_tokens: Floats
    steps: Floats
    step_seconds: Floats
    first_tokens: NDArray[np.float64]  # [worker, bucket]


class Work(NamedTuple):
    """By request, then lists of requests with their lengths in `count`: waiting, prefilling, handed over, decoding."""

    arrival: Floats
    prompt: Floats
    output: Floats
    first_token: Floats
    finished: Floats
    worker: Ints
    left: Floats  # output tokens left
    waiting: Ints
    prefilling: Ints
    handed: Ints
    decoding: Ints
    count: Ints  # type: ignore[assignment]  # waiting, prefilling, handed, decoding, next arrival
    gpu_seconds: Floats  # of each pool
    peak: Ints  # requests at the same time


def make_pool(buckets: int) -> Pool:
    floats = [np.zeros(SLOTS) for _ in range(11)]
    return Pool(np.zeros(SLOTS, np.int64), *floats, np.zeros((SLOTS, buckets)))  # type: ignore[call-arg]


def make_work(arrival: Floats, prompt: Floats, output: Floats) -> Work:
    n = len(arrival)
    times = [np.full(n, np.inf) for _ in range(2)]
    lists = [np.zeros(CROWD, np.int64) for _ in range(4)]
    head = (arrival, prompt, output, *times, np.zeros(n, np.int64), np.zeros(n))
    rest = (np.zeros(5, np.int64), np.zeros(2), np.zeros(1, np.int64))
    return Work(*head, *lists, *rest)  # type: ignore[call-arg]


@numba.njit
def _best(pool: Pool, key: Any, limit: float) -> int:
    """The ready worker with the smallest key, if that is within the limit; else -1."""
    best = -1
    for w in range(SLOTS):
        if pool.state[w] == READY and key[w] <= limit and (best < 0 or key[w] < key[best]):
            best = w
    return best


@numba.njit
def _admit(work: Work, prefill: Pool, now: float, times: Any) -> None:
    """Requests that have come, and those that found no worker before."""
    count = work.count
    while count[4] < len(work.arrival) and work.arrival[count[4]] < now:
        work.waiting[count[0]] = count[4]
        count[0] += 1
        count[4] += 1
    taken = 0
    for i in range(count[0]):
        request = work.waiting[i]
        w = _best(prefill, prefill.free_at, np.inf)
        if w < 0:
            break
        taken += 1
        tokens = work.prompt[request]
        seconds = times[0] * tokens + times[1] * tokens * tokens
        prefill.free_at[w] = max(prefill.free_at[w], work.arrival[request], prefill.ready_at[w]) + seconds
        prefill.load[w] += tokens
        prefill.arrived_requests[w] += 1
        prefill.arrived_tokens[w] += tokens
        work.worker[request] = w
        work.first_token[request] = prefill.free_at[w]
        work.prefilling[count[1]] = request
        count[1] += 1
    for i in range(taken, count[0]):
        work.waiting[i - taken] = work.waiting[i]
    count[0] -= taken


@numba.njit
def _first_tokens(work: Work, prefill: Pool, now: float, times: Any, bounds: Any) -> None:
    count, kept = work.count, 0
    for i in range(count[1]):
        request = work.prefilling[i]
        at = work.first_token[request]
        if at > now:
            work.prefilling[kept] = request
            kept += 1
            continue
        w, tokens = work.worker[request], work.prompt[request]
        prefill.load[w] -= tokens
        prefill.computed_tokens[w] += tokens
        prefill.prefill_seconds[w] += times[0] * tokens + times[1] * tokens * tokens
        prefill.first_tokens[w, np.searchsorted(bounds, at - work.arrival[request])] += 1
        work.left[request] = work.output[request] - 1
        if work.left[request] <= 0:
            work.finished[request] = at
        else:
            work.handed[count[2]] = request
            count[2] += 1
    count[1] = kept


@numba.njit
def _take_over(work: Work, decode: Pool, kv_tokens: float) -> None:
    """Hand over in order; the first without room blocks those behind it."""
    count, taken = work.count, 0
    for i in range(count[2]):
        request = work.handed[i]
        need = work.prompt[request] + work.output[request]
        w = _best(decode, decode.load, max(0.0, kv_tokens - need))
        if w < 0:
            break
        decode.load[w] += need
        decode.batch[w] += 1
        work.worker[request] = w
        work.decoding[count[3]] = request
        count[3] += 1
        taken += 1
    for i in range(taken, count[2]):
        work.handed[i - taken] = work.handed[i]
    count[2] -= taken


@numba.njit
def _decode(work: Work, decode: Pool, now: float, seconds: float, times: Any) -> None:
    """Decode one slice that ends at `now`. A sequence that arrived within it decodes for its remainder."""
    count, kept = work.count, 0
    step = np.zeros(SLOTS)
    resident = np.zeros(SLOTS)
    for i in range(count[3]):
        request = work.decoding[i]
        resident[work.worker[request]] += work.prompt[request] + work.output[request] - work.left[request]
    for w in range(SLOTS):
        if decode.batch[w] > 0:
            step[w] = times[2] + times[3] * decode.batch[w] + times[4] * resident[w]
            decode.steps[w] += seconds / step[w]
            decode.step_seconds[w] += seconds
    for i in range(count[3]):
        request = work.decoding[i]
        w = work.worker[request]
        came = min(seconds, now - work.first_token[request])
        made = came / step[w]
        decode.output_tokens[w] += min(made, work.left[request])
        if made >= work.left[request]:
            work.finished[request] = now - came + work.left[request] * step[w]
            decode.load[w] -= work.prompt[request] + work.output[request]
            decode.batch[w] -= 1
        else:
            work.decoding[kept] = request
            kept += 1
        work.left[request] -= made
    count[3] = kept


@numba.njit
def _replicas(pool: Pool, now: float, busy: Any) -> int:
    """Make started workers ready and end drained ones. Return the number that hold GPUs."""
    held = 0
    for w in range(SLOTS):
        if pool.state[w] == STARTING and pool.ready_at[w] <= now:
            pool.state[w] = READY
        if pool.state[w] == DRAINING and busy[w] <= 1e-9:
            pool.state[w] = ABSENT
        if pool.state[w] != ABSENT:
            held += 1
    return held


@numba.njit
def advance(
    work: Work,
    prefill: Pool,
    decode: Pool,
    now: float,
    until: float,
    slice_seconds: float,
    times: Any,
    kv_tokens: float,
    bounds: Any,
) -> None:
    """`times`: prefill seconds per token and per pair of tokens; step seconds: base, per sequence, per resident token."""
    slices = int((until - now) / slice_seconds + 0.5)
    for _ in range(slices):
        if work.peak[0] >= CROWD - 256:
            return  # the queues are full: a request that arrives now is never served, and counts as late
        now += slice_seconds
        work.gpu_seconds[0] += slice_seconds * _replicas(prefill, now, prefill.load)
        work.gpu_seconds[1] += slice_seconds * _replicas(decode, now, decode.batch)
        _admit(work, prefill, now, times)
        _first_tokens(work, prefill, now, times, bounds)
        _take_over(work, decode, kv_tokens)
        _decode(work, decode, now, slice_seconds, times)
        work.peak[0] = max(work.peak[0], np.sum(work.count[:4]))
