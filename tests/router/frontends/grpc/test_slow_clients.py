"""gRPC clients that read nothing, beside clients that read: streams of the others are neither late nor incomplete."""

from __future__ import annotations

import contextlib
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.harness import router_process
from tests.harness.router_process import RouterBench
from tests.harness.waiting import wait_for
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc

SLOW, FAST, ROUNDS = 16, 4, 6
CHOICES, TOKENS = 4, 800  # of 215 bytes each: ten times the window of a stream
OF_ALL = CHOICES * TOKENS
# What is taken for a client that reads nothing: the stream's window of 64 KiB has 305 tokens, and the message that waits
# for more of it, and the request's credit, 256 each at most.
MAX_TAKEN = 1000
KEPT_BYTES = 512 << 10  # for each of them
NOISE_BYTES = 8 << 20
# Each client has a connection of its own, with a window that does not grow.
ALONE = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65535),
]
Call = Iterator[pb.GenerateResponse]


@pytest.fixture(scope="module")
def bench(router_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterBench]:
    out = tmp_path_factory.mktemp("slow-clients")
    with router_process.run(out, router_model, write_seconds=600) as running:
        yield running


@contextlib.contextmanager
def opened(bench: RouterBench) -> Iterator[Call]:
    request = pb.GenerateRequest(text="a prompt")
    request.options.n, request.options.max_tokens, request.options.logprobs = CHOICES, TOKENS, 20
    with grpc.insecure_channel(bench.grpc, options=ALONE) as channel:
        call: Any = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=300)
        try:
            yield call
        finally:
            call.cancel()


def check_whole(answers: list[pb.GenerateResponse]) -> None:
    begin = answers[0].started.prompt_tokens
    for choice in range(CHOICES):
        chunks = [one.chunk for one in answers if one.HasField("chunk") and one.chunk.choice == choice]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert [token.position for token in tokens] == list(range(begin, begin + TOKENS))
        assert all(token.choice == choice and len(token.top_logprobs) == 20 for token in tokens)
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert chunks[-1].finish_reason == "length"
    assert answers[-1].completed.usage.completion_tokens == OF_ALL


def read_whole(bench: RouterBench) -> None:
    with opened(bench) as call:
        check_whole(list(call))


def tokens_taken(bench: RouterBench) -> int:
    """By the router from its workers, without the first one of each choice."""
    with urllib.request.urlopen(f"{bench.http}/metrics", timeout=60) as answer:
        (count,) = re.findall(
            r"^baton_inter_token_latency_seconds_count\{\S+ (\S+)", answer.read().decode(), re.M
        )
    return int(float(count))


@pytest.mark.long
def test_they_hold_up_nobody_and_get_everything_once_they_read(bench: RouterBench) -> None:
    def fast(rounds: int) -> None:
        with ThreadPoolExecutor(FAST) as threads:
            for done in [threads.submit(read_whole, bench) for _ in range(rounds * FAST)]:
                done.result()

    router = psutil.Process(bench.pid)
    fast(2)
    taken, memory = tokens_taken(bench), router.memory_info().rss
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(opened(bench)) for _ in range(SLOW)]
        begun = [[next(call)] for call in slow]
        fast(1)
        fast_tokens = FAST * (OF_ALL - CHOICES)
        held = [0]

        def settled() -> bool:
            held.append(tokens_taken(bench) - taken - fast_tokens)
            return held[-1] == held[-2] > SLOW

        wait_for(settled, 60, "nothing more is taken for those that do not read")
        assert held[-1] < SLOW * MAX_TAKEN
        fast(ROUNDS)
        assert tokens_taken(bench) - taken - (ROUNDS + 1) * fast_tokens == held[-1]
        assert router.memory_info().rss - memory < SLOW * KEPT_BYTES + NOISE_BYTES
        for call, answers in zip(slow, begun, strict=True):
            check_whole([*answers, *call])
