"""Decode steps of two ranks on this CPU, processes that add by gloo: operation by operation, and as lists of jobs
between the sums; by turns.

python -m bench.probes.rank_steps --model DIR
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.checkpoint import SHAPE, write_model
from bench.probes.adapter_steps import RANK, step_of, write_adapter
from cluster.config.worker import EngineConfig
from cluster.sockets import listen_at
from engine.build import load_model
from engine.lora.loaded import LoadedAdapters
from engine.parallel.group import DistributedGroup
from engine.runner import ModelRunner

RANKS, ADAPTERS = 2, 1
KINDS = list(itertools.product((1, 8), (0, ADAPTERS)))  # rows, adapters


def measure(
    rank: int, address: str, model: Path, adapter: Path, rounds: int
) -> dict[tuple[int, int, bool], list[float]]:
    """Seconds of this rank's thread for each kind of step, by whether it was lists. All ranks call it; each runs the
    leader's plans."""
    group = DistributedGroup(rank, RANKS, address, torch.device("cpu"))
    config = EngineConfig(
        model=model, dtype="bfloat16", kv_memory_bytes=128 << 20, max_model_len=256, max_loras=1, max_lora_rank=RANK
    )  # fmt: skip
    runner = ModelRunner(load_model(config, group))
    if rank:
        runner.serve()
        return {}
    LoadedAdapters(runner.adapters).load(adapter)
    jobs, times = runner._decode_jobs, dict[tuple[int, int, bool], list[float]]()
    assert jobs is not None, "this CPU has the kernels"
    for number in range(rounds + 1):
        for kind in KINDS:
            for listed in (True, False) if number % 2 else (False, True):
                runner._decode_jobs = jobs if listed else None
                began = time.thread_time()
                runner.execute(step_of(*kind))
                if number:  # the first makes lists
                    times.setdefault((*kind, listed), []).append(time.thread_time() - began)
    runner.stop_ranks()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="written if it is not there")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    if not given.model.exists():
        write_model(given.model, SHAPE)
    address, listener = listen_at("127.0.0.1")
    listener.close()
    with tempfile.TemporaryDirectory() as directory, get_context("spawn").Pool(RANKS) as pool:
        adapter = write_adapter(Path(directory) / "adapter", 0)
        calls = [(rank, address, given.model, adapter, given.rounds) for rank in range(RANKS)]
        times = pool.starmap(measure, calls, chunksize=1)[0]
    print("| rows | adapters | one by one | lists | lists, over one by one |")
    print("|---:|---:|---:|---:|---|")
    for kind in KINDS:
        one, listed = times[*kind, False], times[*kind, True]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(listed, one, strict=True)], n=4)
        medians = " | ".join(f"{statistics.median(some) * 1e3:.1f} ms" for some in (one, listed))
        print(f"| {kind[0]} | {kind[1]} | {medians} | {middle:.2f} ({low:.2f} … {high:.2f}) |")


if __name__ == "__main__":
    main()
