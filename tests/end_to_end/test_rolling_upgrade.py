"""A rolling upgrade that changes the KV layout: both generations serve side by side, and requests move to the new one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, Completion
from cluster.membership.registry import request_drain
from tests.end_to_end.conftest import Start
from tests.harness.checkpoints import prompt_ids
from tests.harness.cluster import Cluster
from tests.harness.exactness import judge
from tests.harness.waiting import wait_for

FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "never", "--kv-memory", "64MiB")
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG, STREAMS = 600, 8


@contextlib.contextmanager
def next_generation(cluster: Cluster, directory: Path) -> Iterator[None]:
    """One worker of each role, as the cluster's own but for their page size."""
    processes = []
    try:
        for role in ("prefill", "decode"):
            file = next(Path(cluster.state["logs"]).parent.glob(f"{role}-*.json"))
            config = json.loads(file.read_text())
            config["worker_id"] = f"{role}-new"
            config["engine"]["page_size"] = 32
            (directory / f"{role}.json").write_text(json.dumps(config))
            command = [sys.executable, "-m", "baton", role, "--config", str(directory / f"{role}.json")]
            processes.append(subprocess.Popen(command))
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


@pytest.mark.long
def test_requests_move_to_the_new_generation_and_none_is_lost(
    checkpoint: Any, start_cluster: Start, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("BATON_DRAIN_MIGRATE_SECONDS", "0")
    model = checkpoint("llama")
    cluster = start_cluster(model, *FLAGS)
    old = {role: cluster.state[role][0]["id"] for role in ("prefill", "decode")}
    with next_generation(cluster, tmp_path):
        wait_for(lambda: sum(w["lease"] == "live" for w in cluster.workers()) == 4, 60.0, "both generations")
        prompts = [prompt_ids(70, seed=600 + i) for i in range(STREAMS)]

        async def roll() -> list[Completion]:
            async with AsyncClient(cluster.grpc) as client:
                streams = [client.stream(prompt, max_tokens=LONG, **OPTIONS) for prompt in prompts]
                for stream in streams:
                    await anext(stream)
                os.kill(cluster.process.pid, signal.SIGSTOP)  # what leaves is not started again
                for worker_id in old.values():
                    await asyncio.to_thread(request_drain, *registry(cluster), worker_id)
                for stream in streams:
                    async for _ in stream:
                        pass
                return [stream.completion() for stream in streams]

        try:
            answers = asyncio.run(roll())
            wait_for(lambda: len(cluster.workers()) == 2, 60.0, "the old ones have left")
            late = asyncio.run(one_more(cluster, prompts[0]))
        finally:
            os.kill(cluster.process.pid, signal.SIGCONT)
    for prompt, answer in zip([*prompts, prompts[0]], [*answers, late], strict=True):
        assert answer.timings is not None
        pair = {answer.timings.prefill_worker, answer.timings.decode_worker}
        assert pair in (set(old.values()), {"prefill-new", "decode-new"}), "a pair of two kinds"
        assert not judge(model, prompt, list(answer.token_ids)).wrong
    assert late.timings is not None and late.timings.decode_worker == "decode-new"
    assert {answer.timings.decode_worker for answer in answers if answer.timings} >= {"decode-new"}


async def one_more(cluster: Cluster, prompt: list[int]) -> Completion:
    async with AsyncClient(cluster.grpc) as client:
        return await client.generate(prompt, max_tokens=LONG, **OPTIONS)


def registry(cluster: Cluster) -> tuple[str, str]:
    file = next(Path(cluster.state["logs"]).parent.glob("decode-*.json"))
    return cluster.state["redis"]["url"], json.loads(file.read_text())["namespace"]
